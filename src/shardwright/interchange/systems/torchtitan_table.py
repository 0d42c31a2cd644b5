"""torchtitan's settings under the names of its releases up to 0.2. torchtitan_releases.py has the later names."""

import math
from typing import Any

from shardwright.config import largest
from shardwright.config.fault_gathering_reader import whole
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.plan import even_stages
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.interchange.reading.setting_notes import none_of_few
from shardwright.interchange.reading.settings import Flat, Settings
from shardwright.interchange.rows import Rule, Table, count, degree, number, word
from shardwright.interchange.systems.torchtitan_batch import (
    LENGTHS,
    number_or_all,
    read_batch,
    read_groups,
    write_batch,
)

WORLD = "world"
_SCHEDULES = {
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved-1f1b",
    "GPipe": "gpipe",
    "LoopedBFS": "looped-bfs",
    "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipev",
}
_P = "parallelism."
PARTS = _P + "module_fqns_per_model_part"  # the modules of each stage


def _all_names(name: str) -> str:
    """The names of a key of [parallelism], which was in [training] or [experimental] in 2024."""
    return f"{_P}{name} training.{name} experimental.{name}"


def _unknown_shards(degree: str, world: int, ranks: int, copies: int) -> str:
    """The fault of a shard degree that takes the devices that are left, whose number does not follow."""
    reason = say("how many there are is not said")
    if world:
        reason = say("{world} GPUs are not a multiple of {ranks} x {copies}", world=world, ranks=ranks, copies=copies)
    return say(
        "{setting} takes the GPUs that are left, and {reason}; say it with --devices, such as {near}",
        setting=f"{_P}data_parallel_shard_degree = {degree}",
        reason=reason,
        near=ranks * copies * 8,
    )


def _read_degrees(settings: Settings, fields: Flat) -> None:
    """Read dp, the shard degree times the replicate degree, and ZeRO, which shards over dp and context parallelism."""
    replica_ranks = fields["plan.tp"] * fields["plan.pp"] * fields["plan.cp"]
    copies = settings.count(_all_names("data_parallel_replicate_degree").split(), 1)
    text = settings.text([*_all_names("data_parallel_shard_degree").split(), "training.data_parallel_degree"], "-1")
    world = settings.count(WORLD, 0)
    if (shard_degree := number_or_all(text, _P + "data_parallel_shard_degree", settings)) is not None:
        shards = max(1, shard_degree)
    elif world and world % max(1, replica_ranks * copies) == 0:
        shards = world // max(1, replica_ranks * copies)
    else:
        shards = 1
        settings.faults.append(_unknown_shards(text[:20], world, replica_ranks, copies))
    fields["plan.dp"] = shards * copies
    reshard = settings.text(_P + "fsdp_reshard_after_forward", "default")
    is_zero_2 = reshard == "never" or (reshard == "default" and fields["plan.pp"] > 1)
    zero_ranks = shards * fields["plan.cp"]
    fields["plan.zero"] = 0 if zero_ranks == 1 else 2 if is_zero_2 else 3
    fields["plan.zero_ranks"] = zero_ranks if zero_ranks > 1 and copies > 1 else 0


def _write_degrees(job: JobSpec, settings: dict[str, Any]) -> None:
    plan = job.plan
    # torchtitan combines DDP with no other axis.
    if plan.zero == 0 and plan.cp == 1 and (plan.dp == 1 or plan.tp == plan.pp == 1):
        settings |= {
            _P + "data_parallel_replicate_degree": plan.dp,
            _P + "data_parallel_shard_degree": 1,
        }
        return
    shards = (plan.zero_ranks or plan.replicas) // plan.cp or 1
    if shards * plan.cp == 1 and plan.tp * plan.pp > 1:
        shards = plan.dp
    settings |= {
        _P + "data_parallel_replicate_degree": plan.dp // shards,
        _P + "data_parallel_shard_degree": shards,
    }
    settings[_P + "fsdp_reshard_after_forward"] = "always" if plan.zero == 3 else "never"


def generated_stages(stages: int, layers: int, first: int, last: int) -> list[int]:
    """Layers of each stage as torchtitan divides them, with the embedding and the head counted as `first` and `last`
    layers."""
    layers_per_stage, num_longer = divmod(layers + first + last, stages)
    stage_layers = [layers_per_stage + (stage < num_longer) for stage in range(stages)]
    stage_layers[0] -= first
    stage_layers[-1] -= last
    return stage_layers


def _read_pipeline(settings: Settings, fields: Flat) -> None:
    pp = fields["plan.pp"]
    schedule = settings.one_of(_all_names("pipeline_parallel_schedule").split(), _SCHEDULES, "1F1B")
    layers, layers_per_stage = (
        fields.get("layers", 0),
        settings.count(_P + "pipeline_parallel_layers_per_stage", 0),
    )
    less_layers = [settings.count(f"{_P}pipeline_parallel_{end}_stage_less_layers", 1) for end in ("first", "last")]
    parts = settings.raw(PARTS)
    if pp == 1:
        fields["plan.schedule"] = "1f1b"
        return
    virtual = SCHEDULES[schedule].stages_per_rank or 2
    stages: list[int] = []
    if isinstance(parts, list) and parts and all(isinstance(part, list) for part in parts):
        stages = [sum(str(name).startswith("layers.") for name in part) for part in parts]
        virtual = max(1, len(stages) // pp)
    elif layers_per_stage:
        virtual = max(1, -(-(layers + sum(less_layers)) // layers_per_stage) // pp)
    fields["plan.schedule"] = schedule
    if SCHEDULES[schedule].stages_per_rank == 0:
        fields["plan.virtual_stages"] = virtual
    if not stages and pp * virtual <= layers + 2:
        stages = generated_stages(pp * virtual, layers, *less_layers)
    if stages and (stages != even_stages(layers, len(stages)) or 0 in stages):
        fields["plan.layout"] = stages


def _write_pipeline(job: JobSpec, settings: dict[str, Any]) -> None:
    plan, layers = job.plan, job.model.layers
    if plan.pp == 1:
        return
    name = next((word for word, schedule in _SCHEDULES.items() if schedule == plan.schedule), None)
    settings |= {_P + "pipeline_parallel_schedule": name} if name else {}
    stages = plan.stage_layers(layers)
    if len(stages) == plan.pp * (SCHEDULES[plan.schedule].stages_per_rank or 2):
        for less in (1, 0):
            if stages == generated_stages(len(stages), layers, less, less):
                for end in ("first", "last"):
                    settings[f"{_P}pipeline_parallel_{end}_stage_less_layers"] = less
                return
    layer_numbers = iter(range(layers))
    parts = [[f"layers.{next(layer_numbers)}" for _ in range(count)] for count in stages]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    settings[PARTS] = parts


def _read_recompute(settings: Settings, fields: Flat) -> None:
    mode = settings.text(("activation_checkpoint.mode", "training.activation_checkpoint"), "selective")
    option = settings.text("activation_checkpoint.selective_ac_option", "2")
    if settings.raw("activation_checkpoint.selective_ac_type"):
        option = settings.text("activation_checkpoint.selective_ac_type")
    if mode == "full":
        fields["plan.recompute"] = "full"
    elif mode == "selective" and option == "op":
        fields |= {"plan.recompute": "selective", "plan.recompute_operators": ["norm", "activation"]}
        settings.note(
            say(
                "selective recomputation by operator keeps what products and attention give; norms and activations are "
                "computed again"
            )
        )
    elif mode == "selective" and 0 < (every := whole(option) or 0) <= 1000:
        fields |= {"plan.recompute": "full", "plan.recompute_every": every}
    elif mode != "none":
        mode_shown = f"{mode[:30]} {option[:30]}" if mode == "selective" else mode[:30]
        name = settings.shown("activation_checkpoint.mode")
        settings.faults.append(none_of_few(f"{name} = {mode_shown}", ["none", "full"]))


def _write_recompute(job: JobSpec, settings: dict[str, Any]) -> None:
    plan, key = job.plan, "activation_checkpoint."
    mode, option = "none", ""
    if plan.recompute == "full":
        mode, option = ("full", "") if plan.recompute_every == 1 else ("selective", str(plan.recompute_every))
    elif (
        plan.recompute == "selective"
        and set(plan.recompute_operators) == {"norm", "activation"}
        and plan.recompute_every == 1
    ):
        mode, option = "selective", "op"
    settings[key + "mode"] = mode
    settings |= {key + "selective_ac_option": option} if option else {}


# torchtitan's recipes of fp8: precision.float8, and whether weight gradients are in fp8 too.
_FLOAT8 = {"tensorwise": ("tensorwise", True), "rowwise": ("rowwise", True), "rowwise_with_gw_hp": ("rowwise", False)}


def _is_float8(converter: str) -> bool:
    """True if a converter puts linear layers in float8."""
    return "float8" in converter.lower() and "grouped" not in converter.lower()


def _read_numbers(settings: Settings, fields: Flat) -> None:
    numbers = {"bfloat16": "bf16", "float32": "float32", "float16": "fp16"}
    fields["precision.compute"] = settings.one_of("training.mixed_precision_param", numbers, "bfloat16")
    if settings.text("training.dtype", "float32") == "bfloat16":  # of weights, gradients and moments
        is_narrow = settings.text("training.mixed_precision_reduce", "float32") == "bfloat16"
        fields |= {"precision.master": "none", "precision.gradients": "compute"}
        fields["precision.reduce"] = "gradients" if is_narrow else "float32"
        if fields["precision.compute"] != "bf16":
            settings.lose("training.dtype", say("weights that are kept in bfloat16 are computed with in bfloat16 here"))
            fields["precision.compute"] = "bf16"
    converters = settings.words("model.converters")
    others = [converter for converter in converters if not _is_float8(converter)]
    if others:
        settings.lost.append(
            say(
                "{setting}: it can't be said here",
                setting=f"{settings.shown('model.converters')} {' '.join(others)[:60]}",
            )
        )
    recipe_names = ("quantize.linear.float8.recipe_name", "float8.recipe_name")
    if len(others) < len(converters) or settings.flag(("float8.enable_float8_linear", "training.enable_float8_linear")):
        recipe, has_weights = settings.one_of(recipe_names, _FLOAT8, "tensorwise")
        fields |= {"precision.float8": recipe, "precision.float8_weight_gradients": has_weights}
    settings.ignore(*recipe_names, "float8.enable_float8_linear", "training.enable_float8_linear")


def _write_numbers(job: JobSpec, settings: dict[str, Any]) -> None:
    precision = job.precision
    settings["training.mixed_precision_param"] = "bfloat16" if precision.compute == "bf16" else "float32"
    settings |= {"training.dtype": "bfloat16"} if precision.master_number == "bf16" else {}
    names = {recipe: name for name, recipe in _FLOAT8.items()}
    if name := names.get((precision.float8, precision.float8_weight_gradients)):
        settings |= {"model.converters": ["quantize.linear.float8"], "quantize.linear.float8.recipe_name": name}


def _read_offload(settings: Settings, fields: Flat) -> None:
    if settings.flag("training.enable_cpu_offload") and fields["plan.zero"]:
        fields |= {"plan.offload_optimizer": 1.0, "plan.offload_parameters": fields["plan.zero"] == 3}


def _write_offload(job: JobSpec, settings: dict[str, Any]) -> None:
    if job.plan.offload_optimizer == 1.0 and job.plan.offload_parameters == (job.plan.zero == 3):
        settings["training.enable_cpu_offload"] = True


def _read_rate(settings: Settings, fields: Flat) -> None:
    key = "lr_scheduler."
    steps = fields["optimizer.steps"]
    shape = settings.text((key + "decay_type", key + "lr_decay_type"), "linear")
    share = settings.text((key + "decay_ratio", key + "lr_decay_ratio"), "")
    if settings.count(key + "total_steps", steps) != steps:
        settings.lose(
            key + "total_steps", say("the learning rate is that of a run of {steps:,} steps here", steps=steps)
        )
    fields["optimizer.warmup_steps"] = min(steps, settings.count((key + "warmup_steps", "training.warmup_steps"), 200))
    fields["optimizer.min_learning_rate_ratio"] = min(
        1.0, settings.number((key + "min_lr_factor", key + "lr_min"), 0.0)
    )
    if shape not in ("linear", "cosine", "sqrt"):
        settings.faults.append(none_of_few(f"lr_scheduler.decay_type = {shape[:30]}", ["linear", "cosine", "sqrt"]))
    elif not share and shape != "sqrt":
        fields["optimizer.schedule"] = shape
    else:
        ratio = settings.number((key + "decay_ratio", key + "lr_decay_ratio"), 1.0)
        fields["optimizer.schedule"] = "wsd" if ratio > 0 else "constant"
        fields |= {"optimizer.decay_share": min(1.0, ratio), "optimizer.decay_shape": shape} if ratio > 0 else {}


def _write_rate(job: JobSpec, settings: dict[str, Any]) -> None:
    optimizer, key = job.optimizer, "lr_scheduler."
    settings[key + "warmup_steps"] = optimizer.warmup_steps
    settings[key + "min_lr_factor"] = optimizer.min_learning_rate_ratio
    if optimizer.schedule in ("linear", "cosine"):
        settings[key + "decay_type"] = optimizer.schedule
    elif optimizer.schedule == "wsd":
        settings |= {key + "decay_type": optimizer.decay_shape, key + "decay_ratio": optimizer.decay_share}
    elif optimizer.schedule == "constant":
        settings[key + "decay_ratio"] = 0.0


_DISPATCH = {
    "standard": "direct",
    "deepep": "node-aware",
    "hybridep": "node-aware",
    "minimal_async_ep": "direct",
}


def _read_experts(settings: Settings, fields: Flat) -> None:
    expert_tp = settings.count(_P + "expert_tensor_parallel_degree", 1)
    fields["plan.ep"] = settings.count(_all_names("expert_parallel_degree").split(), 1)
    fields["plan.expert_tp"] = 0 if expert_tp == fields["plan.tp"] or fields["plan.ep"] == 1 else expert_tp
    fields["plan.dispatch"] = settings.one_of(_P + "expert_parallel_comm_backend", _DISPATCH, "standard")


def _write_experts(job: JobSpec, settings: dict[str, Any]) -> None:
    shards = math.prod((settings[_P + "data_parallel_shard_degree"], job.plan.cp, job.plan.tp))
    # The ranks of ep and expert_tp are a part of the ranks that shard.
    if job.model.moe.experts and shards % (job.plan.ep * job.plan.expert_tp_size) == 0:
        settings |= {
            _P + "expert_parallel_degree": job.plan.ep,
            _P + "expert_tensor_parallel_degree": job.plan.expert_tp_size,
        }
        if job.plan.dispatch == "node-aware" and job.plan.ep > 1:
            settings[_P + "expert_parallel_comm_backend"] = "deepep"


def _read_sequence(settings: Settings, fields: Flat) -> None:
    fields["plan.sequence_parallel"] = fields["plan.tp"] > 1 and settings.flag(_P + "enable_sequence_parallel", True)


def _write_sequence(job: JobSpec, settings: dict[str, Any]) -> None:
    # With ep torchtitan does not split experts over tp, and each rank of tp sends its own tokens to them.
    if job.plan.tp > 1 and not job.plan.sequence_parallel and not (job.model.moe.experts and job.plan.ep > 1):
        settings[_P + "enable_sequence_parallel"] = False


_BF16_STATES = "fused_opt_states_bf16"


def _read_moments(settings: Settings, fields: Flat) -> None:
    are_narrow = settings.text("optimizer.implementation") == _BF16_STATES or "precision.master" in fields
    fields["precision.moments"] = "bf16" if are_narrow else "float32"


def _write_moments(job: JobSpec, settings: dict[str, Any]) -> None:
    if job.precision.moments == "bf16" and job.precision.master_number == "float32":
        settings["optimizer.implementation"] = _BF16_STATES


def _read_graphs(settings: Settings, _: Flat) -> None:
    settings.ignore("training.disable_cuda_graphs")


def _write_graphs(job: JobSpec, settings: dict[str, Any]) -> None:
    """Turn CUDA graphs off if they can't record the step: pipelines, experts with host-side counts, host offload."""
    if job.plan.pp > 1 or (job.model.moe.experts and job.plan.ep > 1) or job.plan.offload_optimizer:
        settings["training.disable_cuda_graphs"] = True


_CP = {"allgather": "all-gather", "alltoall": "ring"}

TABLE: Table = (
    degree(_all_names("tensor_parallel_degree"), "plan.tp", largest.RANKS, always=True),
    degree(_all_names("pipeline_parallel_degree"), "plan.pp", largest.PIPELINE_RANKS, always=True),
    degree(_all_names("context_parallel_degree"), "plan.cp", largest.RANKS),
    word(_all_names("context_parallel_rotate_method"), "plan.cp_method", _CP, "allgather", always=True).under(
        None, lambda job: job.plan.cp > 1
    ),
    Rule((_P + "data_parallel_shard_degree",), _read_degrees, _write_degrees),
    Rule((_P + "enable_sequence_parallel",), _read_sequence, _write_sequence),
    Rule((_P + "pipeline_parallel_schedule",), _read_pipeline, _write_pipeline),
    Rule((_P + "expert_parallel_degree",), _read_experts, _write_experts),
    Rule(("training.local_batch_size",), read_batch, write_batch),
    Rule(("fault_tolerance.enable",), read_groups),
    Rule(("activation_checkpoint.mode",), _read_recompute, _write_recompute),
    Rule(("training.mixed_precision_param",), _read_numbers, _write_numbers),
    Rule(("training.enable_cpu_offload",), _read_offload, _write_offload),
    Rule(("training.disable_cuda_graphs",), _read_graphs, _write_graphs),
    Rule(("optimizer.implementation",), _read_moments, _write_moments),
    count(" ".join(LENGTHS), "model.sequence", 2048, always=True),
    number("training.max_norm", "optimizer.clip_grad_norm", 1.0, always=True),
    word("optimizer.name", "optimizer.name", {"AdamW": "adamw", "Adam": "adam"}, "AdamW", always=True),
    number("optimizer.lr", "optimizer.learning_rate", 8e-4, always=True),
    number("optimizer.beta1", "optimizer.beta1", 0.9),
    number("optimizer.beta2", "optimizer.beta2", 0.95),
    number("optimizer.eps", "optimizer.epsilon", 1e-8),
    number("optimizer.weight_decay", "optimizer.weight_decay", 0.1, always=True),
    count("training.steps", "optimizer.steps", 10000, always=True),
    Rule(("lr_scheduler.warmup_steps",), _read_rate, _write_rate),
)
