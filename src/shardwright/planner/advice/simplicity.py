"""The simplicity of a plan: the number of things that a person who sets it up and mends it has to deal with.

First what the software lacks, for somebody would have to write it. Then what is kept in host memory, whose links and
room are not the plan's alone. Then models that are held twice; axes in use, for each has groups, failures and settings
of its own; how work is ordered; what is done beside training to save memory or bytes. Then smaller degrees, and less
that replicas share.
"""

from typing import NamedTuple

from shardwright.config.job import JobSpec
from shardwright.config.plan import PlanSpec
from shardwright.config.rank_order import EXAMPLE, order_words
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.software import software_of
from shardwright.config.software_support import lacks

AXES = ("dp", "tp", "pp", "cp", "ep")


class Simplicity(NamedTuple):
    """How much there is of each; plans are compared by the first that differs, and less is simpler."""

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
    """How simple a job's plan is."""
    plan = job.plan
    has_stages = plan.pp > 1
    return Simplicity(
        num_lacking=len(lacks(software_of(job.cluster.software), job)),
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
        f"recomputation ({plan.recompute})": plan.recompute != "none",
        f"gradients compressed ({plan.compress})": plan.compress != "none",
        "shards of a node beside copies of them": plan.zero_ranks > 0,
        "stages of uneven layers": bool(plan.layout),
        f"the order {order_words(plan)}": plan.order != EXAMPLE and bool(order_words(plan)),
        f"{plan.dispatch} dispatch": plan.ep > 1 and plan.dispatch != "direct",
        f"fp8 ({job.precision.float8})": job.precision.float8 != "none",
    }
    return [name for name, has in uses.items() if has]


def kept_on_host(plan: PlanSpec) -> list[str]:
    """The state that a plan keeps in host memory, in words."""
    kept = {
        "optimizer state": plan.offload_optimizer > 0,
        "parameters": plan.offload_parameters,
        "activations": plan.offload_activations,
    }
    return [f"{name} in host memory" for name, has in kept.items() if has]
