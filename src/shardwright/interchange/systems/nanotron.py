"""nanotron (Hugging Face): one YAML with the model by the keys of LlamaConfig, degrees, tokens and optimizer."""

from collections.abc import Mapping
from typing import Any

from shardwright.config import largest
from shardwright.config.base import PlanError, shortened
from shardwright.config.dotted_keys import flat_keys, nested_keys
from shardwright.config.hugging_face.config_json import fields_of
from shardwright.config.hugging_face.written_config import written_config
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.yaml_text import yaml_text
from shardwright.interchange.imported import Asked, ReadResult
from shardwright.interchange.known_settings import program
from shardwright.interchange.learning_rates import lowest_rate, lowest_ratio
from shardwright.interchange.reading.file_signs import FileSigns
from shardwright.interchange.reading.plain_data import read_data
from shardwright.interchange.reading.script_text import RENDEZVOUS, nodes_of, torchrun_line
from shardwright.interchange.reading.setting_notes import falls_linearly, priced_as
from shardwright.interchange.reading.settings import Flat, Settings
from shardwright.interchange.reading.shell_words import ShellFault
from shardwright.interchange.rows import Rule, Table, count, degree, number, read_row, write_table
from shardwright.interchange.started_configuration import ranks_faults, started_configuration
from shardwright.interchange.system import System
from shardwright.interchange.systems.nanotron_starcoder import KIND as STARCODER2
from shardwright.interchange.systems.nanotron_starcoder import read_starcoder2
from shardwright.interchange.systems.vocabularies import padded_vocabulary

_MODEL = "model.model_config."
_EXPERTS = "model.model_config.moe_config."
_RATE = "optimizer.learning_rate_scheduler."
_ADAM = "optimizer.optimizer_factory."
_ENGINES = {"1f1b": "1f1b", "afab": "gpipe"}
_KINDS = ("is_llama_config", "is_qwen2_config", STARCODER2)
_STYLES = {"linear": "linear", "cosine": "cosine", "1-sqrt": "linear", "constant": "constant"}
# Keys of the model that say how it is computed, or whether a token begins or ends a text.
_INERT = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "use_cache",
    "pretraining_tp",
    "_attn_implementation",
    "_fused_rotary_emb",
    "_fused_rms_norm",
    "_use_qkv_packed",
    "_use_doc_masking",
    "log_attn_probs",
    "ring_attn_heads_k_stride",
    "rope_interleaved",
    "initializer_range",
    "flex_attention_mask",
    *_KINDS,
)
_OF_LLAMA = (
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
    "vocab_size",
    "head_dim",
)

_NUMBERS = ("rms_norm_eps", "rope_theta")  # which may be texts such as 1e-05
SIGNS = (
    FileSigns(
        (("parallelism", "tokens"), ("parallelism", "checkpoints", "general")),
        commands=(r"\brun_train\w*\.py(?:[ \t]|\\\n)+(?:\S+(?:[ \t]|\\\n)+){0,8}--config-file\b",),
    ),
)


def _read_model(settings: Settings, fields: Flat) -> None:
    """Read the decoder as a Llama, with what nanotron's Qwen 2 adds: biases of attention, a window, no positions."""
    if settings.flag(_MODEL + STARCODER2):
        read_starcoder2(settings, fields, _MODEL)
        return
    if not any(settings.flag(_MODEL + kind) for kind in _KINDS):
        settings.faults.append(
            say("model.model_config is none of {kinds}; other models of nanotron are not read", kinds=tuple(_KINDS))
        )
    keys = {name: settings.raw(_MODEL + name) for name in _OF_LLAMA}
    keys |= {name: settings.number(_MODEL + name, keys[name]) for name in _NUMBERS if keys[name] is not None}
    keys["rope_scaling"] = _rope_scaling(settings)
    model, faults = fields_of(
        {"model_type": "llama"} | {key: value for key, value in keys.items() if value is not None}
    )
    settings.faults += [say("{subject}: {fault}", subject="model.model_config", fault=fault) for fault in faults]
    fields |= flat_keys(model, "model.")
    settings.ignore(*(_MODEL + name for name in _INERT))
    fields["model.qkv_bias"] = settings.flag(_MODEL + "attention_bias") and settings.flag(_MODEL + "is_qwen2_config")
    fields["model.no_rotary_every"] = settings.count(_MODEL + "no_rope_layer", 0, largest.LAYERS)
    fields["model.window.size"] = settings.count(_MODEL + "sliding_window_size", 0)
    fields["model.init_std"] = settings.number("model.init_method.std", 0.02)
    if settings.flag(_MODEL + "z_loss_enabled"):
        settings.lost.append(say("model.model_config.z_loss_enabled: the loss of all logits has no further term here"))
    settings.ignore(_MODEL + "z_loss_coefficient", _MODEL + "moe_config")
    _read_experts(settings, fields)


def _read_experts(settings: Settings, fields: Flat) -> None:
    """Read the experts of nanotron's Qwen 2: a softmax over all of them, and no loss that balances them."""
    if not any(name.startswith(_EXPERTS) for name in settings.given):
        return
    experts = settings.count(_EXPERTS + "num_experts", 8, largest.EXPERTS, 1)
    width = settings.count(_EXPERTS + "moe_intermediate_size", 1408, least=1)
    fields |= {"model.moe.experts": experts, "model.moe.ffn": width, "model.moe.normalise": False}
    fields |= {"model.moe.top_k": settings.count(_EXPERTS + "top_k", 2, experts, 1), "model.moe.aux_loss": "none"}
    if settings.flag(_EXPERTS + "enable_shared_expert"):
        shared = settings.count(_EXPERTS + "shared_expert_intermediate_size", 5632, least=1)
        fields |= {"model.moe.shared_experts": 1, "model.moe.shared_ffn": shared, "model.moe.shared_gate": True}
    if not settings.flag(_MODEL + "is_qwen2_config"):
        settings.faults.append(
            say("{section}: only is_qwen2_config has experts there; leave them out", section=_EXPERTS[:-1])
        )
    layers = settings.raw(_EXPERTS + "layers") or [-1]
    every_layer = list(range(fields.get("model.layers", 0)))
    if layers != [-1] and layers != every_layer[-len(layers) :]:
        settings.faults.append(
            say(
                "{setting}: experts in the last layers are read here",
                setting=settings.setting_text(_EXPERTS + "layers"),
            )
        )
    elif layers != [-1]:
        fields["model.moe.first_dense"] = len(every_layer) - len(layers)
    settings.ignore(*(_EXPERTS + name for name in ("shared_expert_intermediate_size", "router_aux_loss_coef")))
    settings.ignore(_EXPERTS + "token_dispatcher_type")
    fields["plan.ep"] = settings.count("parallelism.expert_parallel_size", 1, largest.RANKS, 1)
    fields["plan.expert_tp"] = 1 if fields["plan.tp"] > 1 else 0  # experts are whole on each rank of tp
    if settings.flag("parallelism.moe_layer_recompute") and not settings.flag("parallelism.recompute_layer"):
        settings.lost.append(say("parallelism.moe_layer_recompute: experts alone are not computed again here"))


def _rope_scaling(settings: Settings) -> dict[str, Any] | None:
    """The keys below rope_scaling."""
    prefix = _MODEL + "rope_scaling."
    keys = {name.removeprefix(prefix): settings.raw(name) for name in settings.given if name.startswith(prefix)}
    return keys or None


def _write_model(job: JobSpec, settings: dict[str, Any]) -> None:
    model = job.model
    plain = model.model_copy(update={"qkv_bias": False, "window": type(model.window)(), "no_rotary_every": 0})
    try:
        family, keys = written_config(plain)
    except PlanError:
        family, keys = "", {}
    if family != "llama":
        kind = say("one of {family}", family=family) if family else say("of no family of Hugging Face's")
        fault = say("nanotron has decoders like Llama's, and this is {kind}; take another --to", kind=kind)
        raise PlanError("model", [fault])
    is_llama = plain == model
    positions = dict(keys.get("rope_parameters") or {})
    keys["rope_theta"] = positions.pop("rope_theta", keys.get("rope_theta"))
    if positions.get("rope_type", "default") != "default":
        keys["rope_scaling"] = positions
    kept = {name: keys[name] for name in _OF_LLAMA if keys.get(name) is not None}
    if kept.get("head_dim", model.hidden // model.heads) * model.heads != model.hidden:
        raise PlanError("model", [say("nanotron has heads of hidden / heads numbers; take another --to")])
    kept.pop("head_dim", None)
    settings |= {_MODEL + name: value for name, value in kept.items()}
    settings |= {_MODEL + ("is_llama_config" if is_llama else "is_qwen2_config"): True}
    if not is_llama:
        settings |= {_MODEL + "attention_bias": model.qkv_bias, _MODEL + "no_rope_layer": model.no_rotary_every or None}
        settings[_MODEL + "sliding_window_size"] = model.window.size or None
    settings["model.init_method.std"] = model.init_std


def _read_vocab(settings: Settings, fields: Flat) -> None:
    unit = settings.count("model.make_vocab_size_divisible_by", 1, least=1)
    fields["model.vocab"] = padded_vocabulary(settings, fields, fields.get("model.vocab", 0), unit)


def _write_vocab(job: JobSpec, settings: dict[str, Any]) -> None:
    settings["model.make_vocab_size_divisible_by"] = 1


def _read_batch(settings: Settings, fields: Flat) -> None:
    for name in ("micro_batch_size", "sequence_length", "batch_accumulation_per_replica", "train_steps"):
        if not settings.has(f"tokens.{name}"):
            settings.faults.append(
                say("{setting} is not said, and {system} needs it; add it", setting=f"tokens.{name}", system="nanotron")
            )
    accumulation = settings.count("tokens.batch_accumulation_per_replica", 1, largest.BATCH, 1)
    fields["batch.global_batch_size"] = fields["plan.microbatch_size"] * accumulation * fields["plan.dp"]
    fields["plan.schedule"] = settings.one_of("parallelism.pp_engine", _ENGINES, "afab", "plan.schedule")
    settings.ignore("parallelism.expert_parallel_size")


def _write_batch(job: JobSpec, settings: dict[str, Any]) -> None:
    settings["tokens.batch_accumulation_per_replica"] = job.num_microbatches
    names = {schedule: engine for engine, schedule in _ENGINES.items()}
    settings["parallelism.pp_engine"] = names.get("1f1b" if job.plan.pp == 1 else job.plan.schedule)


def _read_sharding(settings: Settings, fields: Flat) -> None:
    fields["plan.zero"] = settings.count("optimizer.zero_stage", 0, 1)
    fields["plan.sequence_parallel"] = (
        settings.one_of("parallelism.tp_mode", {"ALL_REDUCE": False, "REDUCE_SCATTER": True}, "ALL_REDUCE")
        and fields["plan.tp"] > 1
    )
    fields["plan.cp_method"] = "ring"
    if not settings.flag("parallelism.tp_recompute_allgather", True) and fields["plan.tp"] > 1:
        settings.lost.append(say("parallelism.tp_recompute_allgather is false: gathered inputs are not kept here"))


def _write_sharding(job: JobSpec, settings: dict[str, Any]) -> None:
    plan = job.plan
    settings["optimizer.zero_stage"] = min(1, plan.zero) if plan.replicas > 1 else 0
    settings["parallelism.tp_mode"] = "REDUCE_SCATTER" if plan.sequence_parallel else "ALL_REDUCE"


def _read_recompute(settings: Settings, fields: Flat) -> None:
    fields["plan.recompute"] = "full" if settings.flag("parallelism.recompute_layer") else "none"


def _write_recompute(job: JobSpec, settings: dict[str, Any]) -> None:
    settings["parallelism.recompute_layer"] = job.plan.recompute == "full" and job.plan.recompute_every == 1


def _read_numbers(settings: Settings, fields: Flat) -> None:
    types = {"bfloat16": "bf16", "float16": "fp16", "float32": "float32"}
    fields["precision.compute"] = settings.one_of("model.dtype", types, "bfloat16", "precision.compute")
    adds_in_float32 = settings.flag("optimizer.accumulate_grad_in_fp32")
    fields["precision.gradients"] = "float32" if adds_in_float32 else "compute"
    if not adds_in_float32 and fields["precision.compute"] != "float32":
        # The optimizer changes the weights of the model, and its moments have their type.
        fields |= {"precision.master": "none", "precision.moments": fields["precision.compute"]}


def _write_numbers(job: JobSpec, settings: dict[str, Any]) -> None:
    names = {"bf16": "bfloat16", "fp16": "float16", "float32": "float32"}
    settings["model.dtype"] = names[job.precision.compute]
    settings["optimizer.accumulate_grad_in_fp32"] = job.precision.master == "float32"


def _read_rate(settings: Settings, fields: Flat) -> None:
    rate = fields["optimizer.learning_rate"]
    least = settings.number(_RATE + "min_decay_lr", 0.0)
    fields["optimizer.min_learning_rate_ratio"] = lowest_ratio(rate, least) if rate else 0.0
    style = settings.text(_RATE + "lr_decay_style", "linear")
    fields["optimizer.schedule"] = _STYLES.get(style, "linear")
    if style not in _STYLES or style == "1-sqrt":
        settings.lost.append(falls_linearly(f"{_RATE}lr_decay_style = {shortened(style, 40)}"))
    fields["optimizer.warmup_steps"] = min(settings.count(_RATE + "lr_warmup_steps", 0), fields["optimizer.steps"])
    decay, start = (settings.count(_RATE + name, 0) for name in ("lr_decay_steps", "lr_decay_starting_step"))
    end = (start or fields["optimizer.warmup_steps"]) + decay
    if decay and (end != fields["optimizer.steps"] or start not in (0, fields["optimizer.warmup_steps"])):
        settings.lost.append(
            say(
                "the learning rate falls from step {start} to {end:,} there, and over all of the run here",
                start=start,
                end=end,
            )
        )
    settings.ignore(_RATE + "lr_warmup_style")


def _write_rate(job: JobSpec, settings: dict[str, Any]) -> None:
    optimizer = job.optimizer
    settings |= {_RATE + "lr_warmup_style": "linear", _RATE + "lr_warmup_steps": optimizer.warmup_steps}
    settings[_RATE + "min_decay_lr"] = lowest_rate(optimizer.learning_rate, optimizer.min_learning_rate_ratio)
    settings[_RATE + "lr_decay_style"] = optimizer.schedule if optimizer.schedule in _STYLES else None


def _read_optimizer(settings: Settings, fields: Flat) -> None:
    word = settings.text(_ADAM + "name", "adamW").lower()
    names = {"adamw": "adamw", "sgd": "sgd"}
    if word not in names and "optimizer.name" not in settings.overrides:
        settings.faults.append(
            say(
                "{setting} can't be said here; --set {field}=NAME",
                setting=f"{_ADAM}name = {shortened(word, 40)}",
                field="optimizer.name",
            )
        )
    fields["optimizer.name"] = names.get(word, "adamw")
    settings.ignore(_ADAM + "torch_adam_is_fused", "optimizer.torch_adam_is_fused")
    settings.ignore("optimizer.weight_decay_exclude_named_params")


def _write_optimizer(job: JobSpec, settings: dict[str, Any]) -> None:
    settings[_ADAM + "name"] = {"adamw": "adamW"}.get(job.optimizer.name)
    settings[_ADAM + "torch_adam_is_fused"] = True


TABLE: Table = (
    degree("parallelism.dp", "plan.dp", largest.RANKS, always=True),
    degree("parallelism.tp", "plan.tp", largest.RANKS, always=True),
    degree("parallelism.pp", "plan.pp", largest.PIPELINE_RANKS, always=True),
    degree("parallelism.context_parallel_size", "plan.cp", largest.RANKS, always=True),
    Rule(("model.model_config",), _read_model, _write_model),
    Rule(("model.make_vocab_size_divisible_by",), _read_vocab, _write_vocab),
    count("tokens.sequence_length", "model.sequence", 0, always=True),
    degree("tokens.micro_batch_size", "plan.microbatch_size", largest.BATCH, always=True),
    Rule(("tokens.batch_accumulation_per_replica", "parallelism.pp_engine"), _read_batch, _write_batch),
    Rule(("optimizer.zero_stage", "parallelism.tp_mode"), _read_sharding, _write_sharding),
    Rule(("parallelism.recompute_layer",), _read_recompute, _write_recompute),
    Rule(("model.dtype", "optimizer.accumulate_grad_in_fp32"), _read_numbers, _write_numbers),
    count("tokens.train_steps", "optimizer.steps", 1, always=True),
    number(_RATE + "learning_rate", "optimizer.learning_rate", 1e-4, always=True),
    Rule((_RATE + "lr_decay_style",), _read_rate, _write_rate),
    Rule((_ADAM + "name",), _read_optimizer, _write_optimizer),
    number(f"{_ADAM}adam_beta1 optimizer.adam_beta1", "optimizer.beta1", 0.9, always=True),
    number(f"{_ADAM}adam_beta2 optimizer.adam_beta2", "optimizer.beta2", 0.95, always=True),
    number(f"{_ADAM}adam_eps optimizer.adam_eps", "optimizer.epsilon", 1e-8, always=True),
    number("optimizer.weight_decay", "optimizer.weight_decay", 0.0, always=True),
    number("optimizer.clip_grad", "optimizer.clip_grad_norm", 0.0, always=True),
)


def read(texts: Mapping[str, str], asked: Asked) -> ReadResult:
    """Read a configuration, alone or behind the script that starts it. Raises ShellFault."""
    started = started_configuration(texts, asked, SIGNS)
    if len(started.files) != 1:
        count_of_files = len(started.files)
        raise ShellFault(say("{count} files, and a configuration of nanotron is one; name one", count=count_of_files))
    ((name, text),) = started.files.items()
    data = read_data(name, text)
    settings = Settings(flat_keys(data), notes=list(started.notes), overrides=asked.fields)
    fields: Flat = {}
    for row in TABLE:
        read_row(row, settings, fields)
    settings.faults += ranks_faults(fields, asked, started)
    settings.note(priced_as("nanotron"))
    return ReadResult(fields, settings, "nanotron", *started.shape, known_in=("nanotron",))


def settings_of(job: JobSpec) -> dict[str, Any]:
    """A job's settings under nanotron's keys."""
    return write_table(TABLE, job)


def write(job: JobSpec) -> dict[str, str]:
    """The configuration, and the script that starts it, by file name."""
    flat = {
        "general.project": "shardwright",
        "general.run": " ".join(job.name.split()),
        "general.seed": job.run.seed,
        "general.ignore_sanity_checks": True,
        "checkpoints.checkpoint_interval": job.optimizer.steps,
        "checkpoints.checkpoints_path": "checkpoints",
        "tokenizer.tokenizer_name_or_path": "TOKENIZER",
    } | settings_of(job)
    flat = {name: value for name, value in flat.items() if value is not None}
    data = {"dataset": None, "seed": job.run.seed, "num_loading_workers": 1}
    nested = nested_keys(flat) | {"data_stages": [{"name": "all", "start_training_step": 1, "data": data}]}
    nodes, devices_per_node = nodes_of(job)
    lines = [
        "#!/bin/bash",
        f"# {' '.join(job.name.split())}, for nanotron, written by shardwright.",
        "set -euo pipefail",
    ]
    lines += [*RENDEZVOUS, "export CUDA_DEVICE_MAX_CONNECTIONS=1"]
    lines += [f"{torchrun_line(str(nodes), str(devices_per_node))} {program('nanotron')} --config-file nanotron.yaml"]
    return {"nanotron.yaml": yaml_text(nested), "run.sh": "\n".join(lines) + "\n"}


FACTS = System(
    name="nanotron",
    place=100,
    title="nanotron",
    read=read,
    write=write,
    settings=settings_of,
    software="nanotron",
    written={"offload_activations": (False,)},
    signs=SIGNS,
    is_behind_scripts=True,
)
