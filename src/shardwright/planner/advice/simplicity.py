"""The simplicity of a plan: the number of things that a person who sets it up and mends it has to deal with.

The features that the software lacks come first, for somebody would have to write them. Then state in host memory, whose
links and room are shared with other programs. Then models that are held twice; axes in use, for each has groups,
failures and settings of its own; the order of work; strategies that save memory or bytes. Then smaller degrees, and
less sharding.
"""

from typing import NamedTuple

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.plan import PlanSpec
from shardwright.config.rank_order import DEFAULT_ORDER, order_words
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.software import software_of
from shardwright.config.software_support import missing_features

AXES = ("dp", "tp", "pp", "cp", "ep")


class Simplicity(NamedTuple):
    """The counts by which plans are compared; the first that differs decides, and less is simpler."""

    num_lacking: int
    num_hosted: int
    num_copies: int
    num_axes: int
    order: int
    num_extras: int
    ranks_of_model: int
    zero: int
    stages_per_rank: int


def simplicity(job: JobSpec) -> Simplicity:
    """The simplicity of a job's plan."""
    plan = job.plan
    has_stages = plan.pp > 1
    return Simplicity(
        num_lacking=len(missing_features(software_of(job.cluster.software), job)),
        num_hosted=len(kept_on_host(plan)),
        num_copies=plan.num_copies if has_stages else 1,
        num_axes=len(axes_in_use(plan)),
        order=SCHEDULES[plan.schedule].complexity if has_stages else 0,
        num_extras=len(extras(job)),
        ranks_of_model=plan.tp * plan.pp * plan.cp * plan.ep,
        zero=plan.zero,
        stages_per_rank=plan.stages_per_rank if has_stages else 1,
    )


def axes_in_use(plan: PlanSpec) -> list[str]:
    """The axes of more than one rank."""
    return [axis for axis in AXES if getattr(plan, axis) > 1]


def extras(job: JobSpec) -> list[str]:
    """The strategies of a plan that save memory, bytes or time on the device, in words."""
    plan = job.plan
    uses = {
        say("recomputation ({policy})", policy=plan.recompute): plan.recompute != "none",
        say("gradients compressed ({compression})", compression=plan.compress): plan.compress != "none",
        say("shards of a node beside copies of them"): plan.zero_ranks > 0,
        say("stages of uneven layers"): bool(plan.layout),
        say("the order {order}", order=order_words(plan)): plan.order != DEFAULT_ORDER and bool(order_words(plan)),
        say("{dispatch} dispatch", dispatch=plan.dispatch): plan.ep > 1 and plan.dispatch != "direct",
        say("fp8 ({recipe})", recipe=job.precision.float8): job.precision.float8 != "none",
    }
    return [name for name, is_used in uses.items() if is_used]


def kept_on_host(plan: PlanSpec) -> list[str]:
    """The state that a plan keeps in host memory, in words."""
    state_on_host = {
        say("optimizer state"): plan.offload_optimizer > 0,
        say("parameters"): plan.offload_parameters,
        say("activations"): plan.offload_activations,
    }
    return [say("{state} in host memory", state=name) for name, is_hosted in state_on_host.items() if is_hosted]
