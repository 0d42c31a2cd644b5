"""What a job asks for, field by field, whatever way it is said: two jobs of one meaning are the same plan.

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
from shardwright.config.other_systems.settings import Flat
from shardwright.config.plan import STAGES_PER_RANK, PlanSpec, layer_policies
from shardwright.config.rank_order import AXES, ORDERS, number_of

_READ_BY = {  # fields of [optimizer] that not all of them read
    "beta1": ("adamw", "adam", "lion", "muon"), "beta2": ("adamw", "adam", "lion", "muon", "adafactor"),
    "epsilon": ("adamw", "adam", "muon"), "momentum": ("sgd", "muon"), "newton_schulz_steps": ("muon",),
}  # fmt: skip
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
    mine, theirs = meaning(job), meaning(other)
    names = dict.fromkeys([*mine, *theirs])
    return [
        (name, mine.get(name), theirs.get(name)) for name in names if not is_close(mine.get(name), theirs.get(name))
    ]


def _batch(job: JobSpec) -> Flat:
    batch = job.batch
    ramp = {f"batch.ramp.{name}": getattr(batch.ramp, name) for name in ("start", "increment", "samples")}
    return {"batch.global_batch_size": batch.global_batch_size, **(ramp if batch.grows else {})}


def _plan(job: JobSpec) -> Flat:
    plan, model = job.plan, job.model
    replicas = plan.replicas
    zero = plan.zero if replicas > 1 else 0
    found: Flat = {name: getattr(plan, name) for name in _PLAN}
    found |= {
        "schedule": "1f1b" if plan.pp == 1 and plan.schedule == "sequential" else plan.schedule,
        "sequence_parallel": plan.sequence_parallel and plan.tp > 1,
        "order": _order(plan),
        "zero": zero,
        "zero_ranks": plan.zero_ranks if zero and plan.zero_ranks != replicas else 0,
        "layout": plan.stage_layers(model.layers),
        "recompute": _recompute(plan, model),
    }
    if STAGES_PER_RANK.get(plan.schedule) == 0:
        found["virtual_stages"] = plan.virtual_stages
    if plan.cp > 1:
        found["cp_method"] = plan.cp_method
    if model.moe.experts:
        found |= {"ep": plan.ep, "expert_tp": plan.expert_tp_size}
        found |= {"dispatch": plan.dispatch} if plan.ep > 1 else {}
    if zero >= 2 and plan.reductions != plan.model_copy(update={"reduce_each": "auto"}).reductions:
        found["reduce_each"] = plan.reductions
    found |= {"offload_parameters": True} if zero == 3 and plan.offload_parameters else {}
    found |= {"extra_warmup": plan.extra_warmup} if plan.schedule == "1f1b" and plan.extra_warmup else {}
    found |= {"most_alive": plan.most_alive} if plan.schedule == "auto" else {}
    found |= {"offload_activations": True} if plan.offload_activations and plan.recompute == "full" else {}
    by_method = {"powersgd": "compress_rank", "topk": "compress_share"}
    if plan.compress in by_method:
        found[by_method[plan.compress]] = getattr(plan, by_method[plan.compress])
    return found


def _order(plan: PlanSpec) -> str:
    """The order of the axes with more than one rank, where it is not the usual one."""
    order = [axis for axis in ORDERS[number_of(plan.order)].axes if getattr(plan, axis) > 1]
    return "-".join(order) if order != [axis for axis in AXES if axis in order] else "usual"


def _recompute(plan: PlanSpec, model: ModelSpec) -> Any:
    """What each layer computes again, in words."""
    if plan.recompute == "budget":
        return f"budget {plan.memory_limit_gib:g} GiB"
    if plan.recompute == "stage" and set(plan.stage_layers(model.layers)) != {1}:
        return "stage"
    named = plan.model_copy(update={"recompute": "full"}) if plan.recompute == "stage" else plan
    policies = ["+".join(sorted(policy)) or "none" for policy in layer_policies(named, model.layers)]
    return policies[0] if len(set(policies)) == 1 else policies


def _precision(job: JobSpec) -> Flat:
    precision = job.precision
    found: Flat = {
        "compute": precision.compute, "gradients": precision.gradient_number, "reduce": precision.reduce_number,
        "moments": precision.moments, "float8": precision.float8, "float8_dispatch": precision.float8_dispatch,
    }  # fmt: skip
    if precision.compute == "fp16":
        found["loss_scale"] = precision.loss_scale
        found |= {"loss_scale_growth_steps": precision.loss_scale_growth_steps} if precision.loss_scale else {}
    if precision.float8 != "none":
        found["float8_weight_gradients"] = precision.float8_weight_gradients
    if precision.float8 == "delayed":
        found["float8_history"] = precision.float8_history
    return found


def _optimizer(job: JobSpec) -> Flat:
    optimizer = job.optimizer
    dropped = {name for name, readers in _READ_BY.items() if optimizer.name not in readers}
    dropped |= {"decay_share", "decay_shape"} if optimizer.schedule != "wsd" else set()
    dropped |= {"min_learning_rate_ratio"} if optimizer.schedule == "constant" else set()
    dropped |= set() if job.batch.grows else {"batch_rule"}
    return {name: getattr(optimizer, name) for name in OptimizerSpec.model_fields if name not in dropped}


def _model(model: ModelSpec) -> Flat:
    found = arithmetic(model)
    found |= {"sequence": model.sequence, "dropout": model.dropout, "init_std": model.init_std}
    if model.mtp_layers:
        found["mtp_weight"] = model.mtp_weight
    if model.positions == "rotary" and not model.is_latent:
        found["rotary_dim"] = model.rotary_width
    if model.positions != "rotary":
        del found["rotary_base"]
    if not model.is_latent:
        del found["latent"]
    found |= {f"{name}.{key}": value for name in ("latent", "window", "rotary_scaling") if name in found
              for key, value in found.pop(name).items()}  # fmt: skip
    experts = found.pop("moe")
    if not model.moe.experts:
        return found
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
    return found | {f"moe.{name}": value for name, value in experts.items() if name in MoeSpec.model_fields}
