"""The meaning of a job, field by field, however it is written: two jobs of one meaning are the same plan.

Defaults are filled in, and a field that nothing reads (the method of context parallelism of one rank, the memory of an
optimizer that has none) counts as its default. Fields that change only how fast or how often something else is done
(buckets, logs, checkpoints, watching) are not in it: other systems have their own.
"""

from typing import Any

from shardwright.config.hugging_face.same_arithmetic import arithmetic, is_close
from shardwright.config.job import JobSpec
from shardwright.config.model import ModelSpec
from shardwright.config.moe import MoeSpec
from shardwright.config.optimizer import OptimizerSpec
from shardwright.config.optimizer_facts import OPTIMIZERS
from shardwright.config.other_systems.settings import Flat
from shardwright.config.plan import PlanSpec, layer_policies
from shardwright.config.rank_order import AXES, ORDERS, number_of
from shardwright.config.rate_schedules import RATE_SCHEDULES
from shardwright.config.schedule_facts import SCHEDULES

_PLAN = ("dp", "tp", "pp", "cp", "microbatch_size", "offload_optimizer", "compress")
_ROUTING = ("capacity_factor", "z_coefficient", "aux_loss", "bias_update")


def meaning(job: JobSpec) -> Flat:
    """All that counts, by whole names of fields."""
    return {
        **{f"model.{name}": value for name, value in _model(job.model).items()},
        **{f"plan.{name}": value for name, value in _plan(job).items()},
        **_batch(job),
        **{f"precision.{name}": value for name, value in _precision(job).items()},
        **{f"optimizer.{name}": value for name, value in _optimizer(job).items()},
    }


def differences(job: JobSpec, other: JobSpec) -> list[tuple[str, Any, Any]]:
    """Fields that two jobs have otherwise: the name, the value of the one and of the other."""
    mine, settings = meaning(job), meaning(other)
    names = dict.fromkeys([*mine, *settings])
    return [
        (name, mine.get(name), settings.get(name)) for name in names if not is_close(mine.get(name), settings.get(name))
    ]


def _batch(job: JobSpec) -> Flat:
    batch = job.batch
    ramp = {f"batch.ramp.{name}": getattr(batch.ramp, name) for name in ("start", "increment", "samples")}
    return {"batch.global_batch_size": batch.global_batch_size, **(ramp if batch.grows else {})}


def _plan(job: JobSpec) -> Flat:
    plan, model, facts = job.plan, job.model, SCHEDULES[job.plan.schedule]
    replicas = plan.replicas
    zero = plan.zero if replicas > 1 else 0
    meant: Flat = {name: getattr(plan, name) for name in _PLAN}
    meant |= {
        "schedule": "1f1b" if plan.pp == 1 and plan.schedule == "sequential" else plan.schedule,
        "sequence_parallel": plan.sequence_parallel and plan.tp > 1,
        "order": _order(plan),
        "zero": zero,
        "zero_ranks": plan.zero_ranks if zero and plan.zero_ranks != replicas else 0,
        "layout": plan.stage_layers(model.layers),
        "recompute": _recompute(plan, model),
    }
    if facts.stages_per_rank == 0:
        meant["virtual_stages"] = plan.virtual_stages
    if plan.cp > 1:
        meant["cp_method"] = plan.cp_method
    if model.moe.experts:
        meant |= {"ep": plan.ep, "expert_tp": plan.expert_tp_size}
        meant |= {"dispatch": plan.dispatch} if plan.ep > 1 else {}
    if zero >= 2 and plan.reductions != plan.model_copy(update={"reduce_each": "auto"}).reductions:
        meant["reduce_each"] = plan.reductions
    meant |= {"offload_parameters": True} if zero == 3 and plan.offload_parameters else {}
    meant |= {"extra_warmup": plan.extra_warmup} if "extra_warmup" in facts.understands and plan.extra_warmup else {}
    meant |= {"most_alive": plan.most_alive} if "most_alive" in facts.understands else {}
    meant |= {"offload_activations": True} if plan.offload_activations and plan.recompute == "full" else {}
    by_method = {"powersgd": "compress_rank", "topk": "compress_share"}
    if plan.compress in by_method:
        meant[by_method[plan.compress]] = getattr(plan, by_method[plan.compress])
    return meant


def _order(plan: PlanSpec) -> str:
    """The order of the axes with more than one rank, where it is not the usual one."""
    order = [axis for axis in ORDERS[number_of(plan.order)].axes if getattr(plan, axis) > 1]
    return "-".join(order) if order != [axis for axis in AXES if axis in order] else "usual"


def _recompute(plan: PlanSpec, model: ModelSpec) -> Any:
    """The recomputation of each layer, in words."""
    if plan.recompute == "budget":
        return f"budget {plan.memory_limit_gib:g} GiB"
    if plan.recompute == "stage" and set(plan.stage_layers(model.layers)) != {1}:
        return "stage"
    named = plan.model_copy(update={"recompute": "full"}) if plan.recompute == "stage" else plan
    policies = ["+".join(sorted(policy)) or "none" for policy in layer_policies(named, model.layers)]
    return policies[0] if len(set(policies)) == 1 else policies


def _precision(job: JobSpec) -> Flat:
    precision = job.precision
    meant: Flat = {
        "compute": precision.compute, "gradients": precision.gradient_number, "reduce": precision.reduce_number,
        "moments": precision.moments, "float8": precision.float8, "float8_dispatch": precision.float8_dispatch,
    }  # fmt: skip
    if precision.compute == "fp16":
        meant["loss_scale"] = precision.loss_scale
        meant |= {"loss_scale_growth_steps": precision.loss_scale_growth_steps} if precision.loss_scale else {}
    if precision.float8 != "none":
        meant["float8_weight_gradients"] = precision.float8_weight_gradients
    if precision.float8 == "delayed":
        meant["float8_history"] = precision.float8_history
    return meant


def _optimizer(job: JobSpec) -> Flat:
    optimizer = job.optimizer
    dropped = {name for facts in OPTIMIZERS.values() for name in facts.reads} - optimizer.facts.reads
    of_schedules = {name for facts in RATE_SCHEDULES.values() for name in facts.reads}
    dropped |= of_schedules - RATE_SCHEDULES[optimizer.schedule].reads
    dropped |= set() if job.batch.grows else {"batch_rule"}
    return {name: getattr(optimizer, name) for name in OptimizerSpec.model_fields if name not in dropped}


def _model(model: ModelSpec) -> Flat:
    meant = arithmetic(model)
    meant |= {"sequence": model.sequence, "dropout": model.dropout, "init_std": model.init_std}
    if model.mtp_layers:
        meant["mtp_weight"] = model.mtp_weight
    if model.positions == "rotary" and not model.is_latent:
        meant["rotary_dim"] = model.rotary_width
    if model.positions != "rotary":
        del meant["rotary_base"]
    if not model.is_latent:
        del meant["latent"]
    meant |= {f"{name}.{key}": value for name in ("latent", "window", "rotary_scaling") if name in meant
              for key, value in meant.pop(name).items()}  # fmt: skip
    experts = meant.pop("moe")
    if not model.moe.experts:
        return meant
    experts |= {name: getattr(model.moe, name) for name in _ROUTING}
    if model.moe.aux_loss != "none":
        experts |= {"aux_coefficient": model.moe.aux_coefficient, "aux_scope": model.moe.aux_scope}
    if model.moe.capacity_factor and model.moe.gate != "expert-choice":
        experts["overflow"] = model.moe.overflow
    if model.moe.gate == "softmax" and model.moe.normalise:
        experts["softmax_over"] = "chosen"  # weights that add up to one are the softmax over the chosen
    for name in ("partners", "co_activation_decay") if model.moe.gate != "correlation" else ():
        del experts[name]
    if model.moe.num_groups == 1:
        del experts["groups_kept"], experts["group_score"]
    return meant | {f"moe.{name}": value for name, value in experts.items() if name in MoeSpec.model_fields}
