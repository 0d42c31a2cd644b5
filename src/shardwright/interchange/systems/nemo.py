"""NeMo's configuration of a GPT (megatron_gpt_config.yaml, and the launcher's files): settings of Megatron-LM under
NeMo's own keys."""

import re
from collections.abc import Mapping
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.dotted_keys import nested_keys
from shardwright.config.fault_gathering_reader import whole
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say, with_changed_texts
from shardwright.config.yaml_text import yaml_text
from shardwright.interchange.hydra_command import overridden, with_command_line
from shardwright.interchange.imported import Asked, ReadResult
from shardwright.interchange.reading.hydra_defaults import composed
from shardwright.interchange.reading.plain_data import resolved
from shardwright.interchange.reading.script_text import nodes_of
from shardwright.interchange.reading.setting_notes import falls_as_cosine, none_of, priced_as
from shardwright.interchange.reading.settings import Settings
from shardwright.interchange.system import System
from shardwright.interchange.systems import megatron
from shardwright.interchange.systems.adapter_settings import read_adapter
from shardwright.interchange.systems.megatron_plan import WORLD
from shardwright.interchange.systems.nemo_fine_tuning import (
    KEYS_OF_ADAPTERS,
    adapter_flags,
    adapter_keys,
    other_training,
    restored_shape,
    without_unused_adapters,
)
from shardwright.interchange.systems.nemo_signs import SIGNS
from shardwright.interchange.training_programs import told_by_names

# NeMo's keys -> flags of Megatron-LM with the same values.
_SAME = {
    "model.tensor_model_parallel_size": "tensor-model-parallel-size",
    "model.pipeline_model_parallel_size": "pipeline-model-parallel-size",
    "model.context_parallel_size": "context-parallel-size",
    "model.virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "model.expert_model_parallel_size": "expert-model-parallel-size",
    "model.expert_tensor_parallel_size": "expert-tensor-parallel-size",
    "model.cp_comm_type": "cp-comm-type",
    "model.sequence_parallel": "sequence-parallel",
    "model.micro_batch_size": "micro-batch-size",
    "model.global_batch_size": "global-batch-size",
    "model.rampup_batch_size": "rampup-batch-size",
    "model.use_tp_pp_dp_mapping": "use-tp-pp-dp-mapping",
    "model.pipeline_model_parallel_layout": "pipeline-model-parallel-layout",
    "model.activations_checkpoint_granularity": "recompute-granularity",
    "model.activations_checkpoint_method": "recompute-method",
    "model.activations_checkpoint_num_layers": "recompute-num-layers",
    "model.activations_checkpoint_recompute_modules": "recompute-modules",
    "model.num_layers": "num-layers",
    "model.hidden_size": "hidden-size",
    "model.ffn_hidden_size": "ffn-hidden-size",
    "model.num_attention_heads": "num-attention-heads",
    "model.kv_channels": "kv-channels",
    "model.window_size": "window-size",
    "model.encoder_seq_length": "seq-length",
    "model.max_position_embeddings": "max-position-embeddings",
    "model.init_method_std": "init-method-std",
    "model.hidden_dropout": "hidden-dropout",
    "model.attention_dropout": "attention-dropout",
    "model.layernorm_epsilon": "norm-epsilon",
    "model.make_vocab_size_divisible_by": "make-vocab-size-divisible-by",
    "model.position_embedding_type": "position-embedding-type",
    "model.rotary_percentage": "rotary-percent",
    "model.rotary_base": "rotary-base",
    "model.seq_len_interpolation_factor": "rotary-seq-len-interpolation-factor",
    "model.scale_positional_embedding": "use-rope-scaling",
    "model.qkv_bias": "add-qkv-bias",
    "model.qk_layernorm": "qk-layernorm",
    "model.multi_latent_attention": "multi-latent-attention",
    "model.kv_lora_rank": "kv-lora-rank",
    "model.q_lora_rank": "q-lora-rank",
    "model.qk_head_dim": "qk-head-dim",
    "model.qk_pos_emb_head_dim": "qk-pos-emb-head-dim",
    "model.v_head_dim": "v-head-dim",
    "model.num_moe_experts": "num-experts",
    "model.moe_router_topk": "moe-router-topk",
    "model.moe_ffn_hidden_size": "moe-ffn-hidden-size",
    "model.moe_layer_freq": "moe-layer-freq",
    "model.moe_router_load_balancing_type": "moe-router-load-balancing-type",
    "model.moe_aux_loss_coeff": "moe-aux-loss-coeff",
    "model.moe_z_loss_coeff": "moe-z-loss-coeff",
    "model.moe_token_dispatcher_type": "moe-token-dispatcher-type",
    "model.moe_expert_capacity_factor": "moe-expert-capacity-factor",
    "model.moe_token_drop_policy": "moe-token-drop-policy",
    "model.moe_shared_expert_intermediate_size": "moe-shared-expert-intermediate-size",
    "model.moe_router_score_function": "moe-router-score-function",
    "model.moe_router_pre_softmax": "moe-router-pre-softmax",
    "model.moe_router_topk_scaling_factor": "moe-router-topk-scaling-factor",
    "model.moe_router_enable_expert_bias": "moe-router-enable-expert-bias",
    "model.moe_router_bias_update_rate": "moe-router-bias-update-rate",
    "model.moe_router_num_groups": "moe-router-num-groups",
    "model.moe_router_group_topk": "moe-router-group-topk",
    "model.fp8_amax_history_len": "fp8-amax-history-len",
    "model.fp8_recipe": "fp8-recipe",
    "model.tokenizer.type": "tokenizer-type",
    "model.tokenizer.merge_file": "merge-file",
    "model.tokenizer.vocab_size": "vocab-size",
    "model.override_vocab_size": "padded-vocab-size",
    "model.native_amp_init_scale": "initial-loss-scale",
    "model.native_amp_growth_interval": "loss-scale-window",
    "model.optim.lr": "lr",
    "model.optim.weight_decay": "weight-decay",
    "model.optim.eps": "adam-eps",
    "model.optim.sched.min_lr": "min-lr",
    "model.optim.sched.warmup_steps": "lr-warmup-iters",
    "model.optim.overlap_grad_sync": "overlap-grad-reduce",
    "trainer.max_steps": "train-iters",
    "trainer.gradient_clip_val": "clip-grad",
}
# NeMo's defaults that differ from Megatron-LM's.
_DEFAULTS = {"make-vocab-size-divisible-by": 128, "adam-beta2": 0.98, "lr-decay-style": "cosine"}
_ACTIVATIONS = {
    "swiglu": ("swiglu",),
    "fast-swiglu": ("swiglu",),
    "squared-relu": ("squared-relu",),
    "gelu": (),
    "openai_gelu": ("openai-gelu",),
    "geglu": ("geglu",),
    "fast-geglu": ("geglu",),
    "quick-geglu": ("quick-geglu",),
}
_PRECISIONS = ("32", "32-true", "16", "16-mixed", "16-true", "bf16", "bf16-mixed", "bf16-true")
_NORMS = {
    "layernorm": "LayerNorm",
    "layernorm1p": "LayerNorm",
    "low_precision_layernorm": "LayerNorm",
    "rmsnorm": "RMSNorm",
}
_SCHEDULES = {
    "CosineAnnealing": "cosine",
    "WarmupAnnealing": "linear",
    "WarmupPolicy": "constant",
    "InverseSquareRootAnnealing": "inverse-square-root",
}
# The data of fine-tuning -> the settings of the model in whose place they count.
_OF_FINE_TUNING = {
    "model.data.train_ds.micro_batch_size": "model.micro_batch_size",
    "model.data.train_ds.global_batch_size": "model.global_batch_size",
    "model.data.train_ds.max_seq_length": "model.encoder_seq_length",
}
_SHARDED = {"full": "optim_grads_params", "grad": "optim_grads", "hybrid": "optim_grads_params"}


def read(texts: Mapping[str, str], asked: Asked) -> ReadResult:
    """Read a configuration. Raises ShellFault."""
    texts, command_line = with_command_line(texts, asked)
    flat = composed(texts)
    flat = resolved(overridden({name.removeprefix("training."): value for name, value in flat.items()}, command_line))
    flat = {name: None if value == "null" else value for name, value in flat.items()}  # in quotes, too
    flat |= {name: value for name, value in asked.variables.items() if name in flat}
    flat = without_unused_adapters(flat) | ({"trainer.max_steps": None} if flat.get("trainer.max_steps") == -1 else {})
    differing = [name for name, own in _OF_FINE_TUNING.items() if flat.get(name) not in (None, flat.get(own))]
    flat |= {_OF_FINE_TUNING[name]: flat[name] for name in differing}
    sizes = {
        name: whole(str(1 if flat.get(name) is None else flat[name]))
        for name in ("trainer.num_nodes", "trainer.devices")
    }
    nodes, devices_per_node = (size or 1 for size in sizes.values())
    given = _DEFAULTS | _flags_of(flat, nodes) | adapter_flags(flat)
    world = asked.cluster.devices or nodes * devices_per_node
    settings = Settings(given | {WORLD: world}, overrides=asked.fields)
    settings.faults += [fault for fault in (other_training(flat, asked),) if fault]
    if not asked.cluster.devices:
        _ask_for_devices(flat, [name for name, size in sizes.items() if not size], settings)
    if flat.get("trainer.precision") is None:
        settings.note(
            say("nothing says trainer.precision, so it is Lightning's 32-true (--set precision.compute=bf16)")
        )
    _refuse_unknown_words(flat, settings)
    _tell_nearest(flat, settings)
    shape = restored_shape(flat, settings, asked)
    fields = {} if shape == {} else megatron.fields_of(settings, asked, shape)
    if not settings.faults:
        read_adapter(settings, fields, lambda name: name.replace("_", "-"))
    nemo_settings = Settings(flat, needed={_KEYS.get(flag, flag): text for flag, text in settings.needed.items()})
    nemo_settings.notes, nemo_settings.lost, nemo_settings.faults = (
        [_with_keys(line) for line in lines] for lines in (settings.notes, settings.lost, settings.faults)
    )
    nemo_settings.ignore(*_SAME, *_READ, *adapter_keys(flat))
    nemo_settings.lost += told_by_names([str(flat.get("exp_manager.name", ""))])
    if not flat.get("model.cpu_offloading"):  # these count beside it alone
        nemo_settings.ignore(*(name for name in flat if name.startswith("model.cpu_offloading_")))
    for name, why in _UNSUPPORTED.items():
        if flat.get(name):
            nemo_settings.lose(name, why)
        nemo_settings.ignore(name)
    for name in differing:
        nemo_settings.note(
            say(
                "{setting} counts, and not {other}",
                setting=nemo_settings.setting_text(name),
                other=_OF_FINE_TUNING[name],
            )
        )
    nemo_settings.note(priced_as("nemo"))
    launched_nodes = 0 if asked.cluster.devices else nodes
    return ReadResult(fields, nemo_settings, "nemo", launched_nodes, devices_per_node, ("nemo",))


def _ask_for_devices(flat: dict[str, Any], unknown: list[str], settings: Settings) -> None:
    """Ask how many devices there are where a key gives no number, and tell that no key of nodes is one node."""
    settings.faults += [
        say(
            "{setting} does not say how many there are; say it with --devices N",
            setting=f"{name} = {shortened(str(flat[name]), 40)}",
        )
        for name in unknown
    ]
    if flat.get("trainer.num_nodes") is None:
        settings.note(say("nothing says trainer.num_nodes, so it is Lightning's 1 (--devices N)"))


def _refuse_unknown_words(flat: dict[str, Any], settings: Settings) -> None:
    """Add a fault for each word that stands for no Megatron-LM flag, and would be taken for a default."""
    for key, words in (("model.activation", tuple(_ACTIVATIONS)), ("trainer.precision", _PRECISIONS)):
        word = flat.get(key)
        if word is not None and str(word) not in words:
            settings.faults.append(none_of(f"{key} = {shortened(str(word), 40)}", words))


def _tell_nearest(flat: dict[str, Any], settings: Settings) -> None:
    """Tell the schedule and the warm-up that are taken for what is not here; neither changes memory or time."""
    schedule = flat.get("model.optim.sched.name")
    if schedule is not None and str(schedule) not in _SCHEDULES:
        settings.lost.append(falls_as_cosine(f"model.optim.sched.name = {shortened(str(schedule), 40)}"))
    warmup = flat.get("model.optim.sched.warmup_steps")
    if isinstance(warmup, float) and not warmup.is_integer():
        settings.lost.append(
            say(
                "{setting}: {steps} steps here",
                setting=f"model.optim.sched.warmup_steps = {warmup:g}",
                steps=int(warmup),
            )
        )


_UNSUPPORTED = {
    "model.cpu_offloading": say("activations of single layers are not offloaded here"),
    "model.activations_checkpoint_layers_per_pipeline": say("all stages recompute alike here, later ones less there"),
    "model.num_micro_batches_with_partial_activation_checkpoints": say("all microbatches are recomputed alike here"),
}
_KEYS = {flag: key for key, flag in _SAME.items()} | KEYS_OF_ADAPTERS
# Keys without such a flag that are read below.
_READ = (
    "model.normalization", "model.activation", "model.bias", "model.share_embeddings_and_output_weights", "model.fp8",
    "model.fp8_e4m3", "model.fp8_hybrid", "model.fp8_wgrad", "model.fsdp", "model.fsdp_sharding_strategy",
    "model.optim.name", "model.optim.betas", "model.optim.sched.name", "model.optim.sched.constant_steps",
    "trainer.precision", "trainer.num_nodes",
    "trainer.devices", "model.tokenizer.model", "model.optim.momentum",
    "model.num_query_groups", "model.override_vocab_size", "model.tokenizer.library",
)  # fmt: skip


_FLAG = re.compile(r"(?:--|(?<![\w-]))([a-z][a-z0-9]*(?:-[a-z0-9]+)+)")  # with or without the dashes


def _with_keys(text: str) -> str:
    """A text with NeMo's keys in place of Megatron-LM's flags."""
    return with_changed_texts(text, lambda part: _FLAG.sub(lambda match: _KEYS.get(match[1], match[0]), part))


def _flags_of(flat: dict[str, Any], nodes: int) -> dict[str, Any]:
    """Megatron-LM's flags for NeMo's keys; hybrid sharding depends on the number of nodes."""
    flags = {flag: flat[key] for key, flag in _SAME.items() if flat.get(key) is not None and flat[key] is not False}
    flags = {flag: value for flag, value in flags.items() if not (flag in _OPTIONAL and value == 1)}
    model = {key.removeprefix("model."): value for key, value in flat.items() if key.startswith("model.")}
    flags |= {
        "normalization": _NORMS.get(str(model.get("normalization", "layernorm")), str(model.get("normalization")))
    }
    for name in _ACTIVATIONS.get(str(model.get("activation", "gelu")), ()):
        flags[name] = True
    if model.get("bias") is False:
        flags["disable-bias-linear"] = True
    if model.get("share_embeddings_and_output_weights") is False:
        flags["untie-embeddings-and-output-weights"] = True
    if flags.get("num-query-groups") or model.get("num_query_groups"):
        flags |= {"group-query-attention": True, "num-query-groups": model.get("num_query_groups")}
    if flat.get("model.tokenizer.library") in ("huggingface", "sentencepiece"):
        flags |= {"tokenizer-model": model.get("tokenizer.type") or "", "tokenizer-type": "huggingface"}
    if model.get("override_vocab_size"):
        flags["vocab-size"] = model["override_vocab_size"]
    return flags | _number_flags(flat, model) | _training_flags(flat, model, nodes)


def _number_flags(flat: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """Flags of number types."""
    precision = str(flat.get("trainer.precision", "32-true"))
    flags: dict[str, Any] = {"bf16": True} if "bf16" in precision else {"fp16": True} if "16" in precision else {}
    if "fp16" in flags:
        flags["accumulate-allreduce-grads-in-fp32"] = True
    if model.get("fp8") is True:
        flags |= {"fp8-format": "e4m3" if model.get("fp8_e4m3") else "hybrid"}
        flags |= {"no-fp8-wgrad": True} if model.get("fp8_wgrad") is False else {}
    return flags


def _training_flags(flat: dict[str, Any], model: dict[str, Any], nodes: int) -> dict[str, Any]:
    """Flags of the optimizer, of sharding and of the learning rate."""
    flags: dict[str, Any] = {}
    optimizer = str(model.get("optim.name", ""))
    if optimizer in ("distributed_fused_adam", "mcore_distributed_optim"):
        flags["use-distributed-optimizer"] = True
    if optimizer == "sgd":
        flags |= {"optimizer": "sgd", "sgd-momentum": model.get("optim.momentum", 0.9)}
    if model.get("fsdp") is True:
        strategy = str(model.get("fsdp_sharding_strategy", "full"))
        flags |= {"num-distributed-optimizer-instances": nodes} if strategy == "hybrid" and nodes > 1 else {}
        flags |= {"use-megatron-fsdp": True, "data-parallel-sharding-strategy": _SHARDED.get(strategy, strategy)}
    betas = model.get("optim.betas")
    if isinstance(betas, list) and len(betas) == 2:
        flags |= {"adam-beta1": betas[0], "adam-beta2": betas[1]}
    schedule = str(model.get("optim.sched.name", "CosineAnnealing"))
    flags["lr-decay-style"] = _SCHEDULES.get(schedule, "cosine")
    warmup = model.get("optim.sched.warmup_steps")
    if isinstance(warmup, float):
        flags["lr-warmup-iters"] = int(warmup)
    steps, constant = flat.get("trainer.max_steps"), model.get("optim.sched.constant_steps")
    if isinstance(steps, int) and isinstance(constant, int) and 0 < constant < steps:
        flags["lr-decay-iters"] = steps - constant
    return flags


# Flags whose value 1 means that NeMo leaves the setting out.
_OPTIONAL = ("num-virtual-stages-per-pipeline-rank",)


def settings_of(job: JobSpec) -> dict[str, Any]:
    """A job's settings under NeMo's keys."""
    flags = megatron.flags(job)
    flat: dict[str, Any] = {key: flags[flag] for key, flag in _SAME.items() if flag in flags}
    if job.batch.grows:  # Megatron-LM counts the run in samples then, NeMo in steps
        flat |= {"trainer.max_steps": job.optimizer.steps}
        flat |= {"model.optim.sched.warmup_steps": job.optimizer.warmup_steps}
    nodes, devices_per_node = nodes_of(job)
    precision = {"bf16": "bf16", "fp16": "16", "float32": "32"}[job.precision.compute]
    flat |= {"trainer.num_nodes": nodes, "trainer.devices": devices_per_node, "trainer.precision": precision}
    names = {flag[0]: name for name, flag in _ACTIVATIONS.items() if flag and not name.startswith("fast-")}
    flat["model.activation"] = next((names[flag] for flag in names if flag in flags), "gelu")
    flat["model.normalization"] = job.model.norm
    flat["model.bias"] = "disable-bias-linear" not in flags
    flat["model.share_embeddings_and_output_weights"] = "untie-embeddings-and-output-weights" not in flags
    if "num-query-groups" in flags:
        flat["model.num_query_groups"] = flags["num-query-groups"]
    if "fp8-format" in flags:
        flat |= {"model.fp8": True, "model.fp8_hybrid": True, "model.fp8_wgrad": "no-fp8-wgrad" not in flags}
    is_sharded, is_fsdp = "use-distributed-optimizer" in flags, "use-megatron-fsdp" in flags
    flat["model.optim.name"] = "mcore_distributed_optim" if is_sharded else "fused_adam"
    if job.optimizer.name == "sgd":
        flat |= {"model.optim.name": "sgd", "model.optim.momentum": job.optimizer.momentum}
    if is_fsdp:
        strategy = {"optim_grads": "grad", "optim_grads_params": "full"}[flags["data-parallel-sharding-strategy"]]
        if strategy == "full" and flags.get("num-distributed-optimizer-instances") == nodes:
            strategy = "hybrid"
        flat |= {"model.fsdp": True, "model.fsdp_sharding_strategy": strategy}
    flat["model.optim.betas"] = [job.optimizer.beta1, job.optimizer.beta2]
    flat["model.optim.sched.name"] = next(
        (name for name, style in _SCHEDULES.items() if style == flags.get("lr-decay-style")), "CosineAnnealing"
    )
    return flat


def write(job: JobSpec) -> dict[str, str]:
    """The configuration for pretraining, by its file name."""
    flat = settings_of(job)
    flat |= {"model.mcore_gpt": True, "model.megatron_amp_O2": True, "name": "megatron_gpt"}
    flat |= {"model.data.data_prefix": [], "model.data.data_impl": "mock", "model.data.seq_length": job.model.sequence}
    flat["model.tokenizer.library"] = "null"
    if job.precision.compute == "fp16" and not job.precision.loss_scale_growth_steps:
        flat.pop("model.native_amp_init_scale", None)
    heading = f"# {' '.join(job.name.split())}, for NeMo, written by shardwright.\n"
    return {"megatron_gpt_config.yaml": heading + yaml_text(nested_keys(flat))}


FACTS = System(
    name="nemo",
    place=65,
    title="NeMo",
    read=read,
    write=write,
    settings=settings_of,
    software="nemo",
    written=megatron.WRITTEN,
    signs=SIGNS,
    takes=(),
)
