"""The meaning of a job, field by field: two jobs with equal meanings are the same plan, however they are written.

Defaults are filled in. A field without effect (the method of context parallelism with one rank, the momentum of an
optimizer without momentum) counts as its default. Fields that change only speed or frequency (buckets, logs,
checkpoints, monitoring) are left out: each system has its own.
"""

from collections.abc import Container
from typing import Any

from shardwright.config.compression_facts import COMPRESSIONS
from shardwright.config.hugging_face.same_arithmetic import arithmetic, is_close
from shardwright.config.job import JobSpec
from shardwright.config.model import ModelSpec
from shardwright.config.moe import MoeSpec
from shardwright.config.number_types import NUMBER_TYPES
from shardwright.config.optimizer import OptimizerSpec
from shardwright.config.optimizer_facts import OPTIMIZERS
from shardwright.config.plan import PlanSpec, layer_policies
from shardwright.config.rank_order import AXES, ORDERS, number_of
from shardwright.config.rate_schedules import RATE_SCHEDULES
from shardwright.config.recompute_facts import RECOMPUTES
from shardwright.config.recompute_policy import WHOLE_LAYER
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.interchange.reading.settings import Flat

_PLAN = ("dp", "tp", "pp", "cp", "microbatch_size", "offload_optimizer", "compress")
_ROUTING = ("capacity_factor", "z_coefficient", "aux_loss", "bias_update")


def meaning(job: JobSpec) -> Flat:
    """The fields that have an effect, by full name."""
    return {
        **{f"model.{name}": value for name, value in _model(job.model).items()},
        **{f"plan.{name}": value for name, value in _plan(job).items()},
        **_batch(job),
        **{f"precision.{name}": value for name, value in _precision(job).items()},
        **{f"optimizer.{name}": value for name, value in _optimizer(job).items()},
    }


def differences(job: JobSpec, other: JobSpec) -> list[tuple[str, Any, Any]]:
    """The fields whose values differ: name, value in `job`, value in `other`."""
    fields, other_fields = meaning(job), meaning(other)
    names = dict.fromkeys([*fields, *other_fields])
    return [
        (name, fields.get(name), other_fields.get(name))
        for name in names
        if not is_close(fields.get(name), other_fields.get(name))
    ]


def without_unread(job: JobSpec, stated: Container[str]) -> JobSpec:
    """The job with defaults for fields that its optimizer, its learning rate and its plan do not read; fields of
    `stated`, by full name, stay."""
    changes: dict[str, Any] = {}
    for section, names in (("optimizer", unread_of_optimizer(job)), ("plan", unread_of_plan(job.plan))):
        spec = getattr(job, section)
        fields = type(spec).model_fields
        defaults = {name: fields[name].default for name in sorted(names) if f"{section}.{name}" not in stated}
        changes[section] = spec.model_copy(update=defaults)
    return job.model_copy(update=changes)


def unread_of_optimizer(job: JobSpec) -> set[str]:
    """The fields of [optimizer] without effect: of other optimizers and of other schedules of the learning rate."""
    optimizer = job.optimizer
    unread = {name for facts in OPTIMIZERS.values() for name in facts.reads} - optimizer.facts.reads
    schedule_fields = {name for facts in RATE_SCHEDULES.values() for name in facts.reads}
    unread |= schedule_fields - RATE_SCHEDULES[optimizer.schedule].reads
    return unread if job.batch.grows else unread | {"batch_rule"}


def unread_of_plan(plan: PlanSpec) -> set[str]:
    """The fields of [plan] about context parallelism, without effect where sequences are not divided."""
    return {"cp_method"} if plan.cp == 1 else set()


def _batch(job: JobSpec) -> Flat:
    batch = job.batch
    ramp = {f"batch.ramp.{name}": getattr(batch.ramp, name) for name in ("start", "increment", "samples")}
    return {"batch.global_batch_size": batch.global_batch_size, **(ramp if batch.grows else {})}


def _plan(job: JobSpec) -> Flat:
    plan, model, facts = job.plan, job.model, SCHEDULES[job.plan.schedule]
    replicas = plan.replicas
    zero = plan.zero if replicas > 1 else 0
    fields: Flat = {name: getattr(plan, name) for name in _PLAN}
    fields |= {
        "schedule": "1f1b" if plan.pp == 1 and plan.schedule == "sequential" else plan.schedule,
        "sequence_parallel": plan.sequence_parallel and plan.tp > 1,
        "order": _order(plan),
        "zero": zero,
        "zero_ranks": plan.zero_ranks if zero and plan.zero_ranks != replicas else 0,
        "layout": plan.stage_layers(model.layers),
        "recompute": _recompute(plan, model),
    }
    if facts.stages_per_rank == 0:
        fields["virtual_stages"] = plan.virtual_stages
    if "cp_method" not in unread_of_plan(plan):
        fields["cp_method"] = plan.cp_method
    if model.moe.experts:
        fields |= {"ep": plan.ep, "expert_tp": plan.expert_tp_size}
        fields |= {"dispatch": plan.dispatch} if plan.ep > 1 else {}
    if zero >= 2 and plan.reductions != plan.model_copy(update={"reduce_each": "auto"}).reductions:
        fields["reduce_each"] = plan.reductions
    fields |= {"offload_parameters": True} if zero == 3 and plan.offload_parameters else {}
    fields |= {"extra_warmup": plan.extra_warmup} if "extra_warmup" in facts.understands and plan.extra_warmup else {}
    fields |= {"most_alive": plan.most_alive} if "most_alive" in facts.understands else {}
    keeps_inputs = "offload_activations" in RECOMPUTES[plan.recompute].reads
    fields |= {"offload_activations": True} if plan.offload_activations and keeps_inputs else {}
    return fields | {name: getattr(plan, name) for name in COMPRESSIONS[plan.compress].reads}


def _order(plan: PlanSpec) -> str:
    """The order of the axes with more than one rank; "usual" if it is the default order."""
    order = [axis for axis in ORDERS[number_of(plan.order)].axes if getattr(plan, axis) > 1]
    return "-".join(order) if order != [axis for axis in AXES if axis in order] else "usual"


def _recompute(plan: PlanSpec, model: ModelSpec) -> Any:
    """The recompute policy of each layer, as text; a single policy if all layers have the same."""
    facts = RECOMPUTES[plan.recompute]
    if facts.layers is None:
        return f"{plan.recompute} {plan.memory_limit_gib:g} GiB"
    if facts.by_stage and set(plan.stage_layers(model.layers)) != {1}:
        return plan.recompute
    of_layers = [WHOLE_LAYER] if facts.by_stage else layer_policies(plan, model.layers)
    policies = ["+".join(sorted(policy)) or "none" for policy in of_layers]
    return policies[0] if len(set(policies)) == 1 else policies


def _precision(job: JobSpec) -> Flat:
    precision = job.precision
    fields: Flat = {
        "compute": precision.compute,
        "gradients": precision.gradient_number,
        "reduce": precision.reduce_number,
        "moments": precision.moments,
        "master": precision.master_number,
        "float8": precision.float8,
        "float8_dispatch": precision.float8_dispatch,
    }
    if NUMBER_TYPES[precision.compute].needs_loss_scale:
        fields["loss_scale"] = precision.loss_scale
        fields |= {"loss_scale_growth_steps": precision.loss_scale_growth_steps} if precision.loss_scale else {}
    if precision.float8 != "none":
        fields["float8_weight_gradients"] = precision.float8_weight_gradients
    if precision.has_delayed_scales:
        fields["float8_history"] = precision.float8_history
    return fields


def _optimizer(job: JobSpec) -> Flat:
    unread = unread_of_optimizer(job)
    return {name: getattr(job.optimizer, name) for name in OptimizerSpec.model_fields if name not in unread}


def _model(model: ModelSpec) -> Flat:
    fields = arithmetic(model)
    fields |= {"sequence": model.sequence, "dropout": model.dropout, "init_std": model.init_std}
    if model.is_adapted:
        names = ("rank", "alpha", "targets", "base", "double_quantization")
        fields |= {f"adapter.{name}": getattr(model.adapter, name) for name in names}
    if model.mtp_layers:
        fields["mtp_weight"] = model.mtp_weight
    if model.positions == "rotary" and not model.is_latent:
        fields["rotary_dim"] = model.rotary_width
    if model.positions != "rotary":
        del fields["rotary_base"]
    if not model.is_latent:
        del fields["latent"]
    fields |= {
        f"{name}.{key}": value
        for name in ("latent", "window", "rotary_scaling")
        if name in fields
        for key, value in fields.pop(name).items()
    }
    experts = fields.pop("moe")
    if not model.moe.experts:
        return fields
    experts |= {name: getattr(model.moe, name) for name in _ROUTING}
    if model.moe.aux_loss != "none":
        experts |= {"aux_coefficient": model.moe.aux_coefficient, "aux_scope": model.moe.aux_scope}
    gate = model.moe.gate_facts
    if model.moe.capacity_factor and not gate.sees_all:
        experts["overflow"] = model.moe.overflow
    if model.moe.gate == "softmax" and model.moe.normalise:
        experts["softmax_over"] = "chosen"  # normalised weights equal the softmax over the chosen experts
    for name in {"partners", "co_activation_decay"} - gate.reads:
        del experts[name]
    if model.moe.num_groups == 1:
        del experts["groups_kept"], experts["group_score"]
    return fields | {f"moe.{name}": value for name, value in experts.items() if name in MoeSpec.model_fields}
