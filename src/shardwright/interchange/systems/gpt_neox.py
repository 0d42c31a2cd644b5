"""GPT-NeoX (EleutherAI): YAML with Megatron-LM's settings of a model under other names, and DeepSpeed's settings.

Several files are one configuration; a name may have hyphens or underscores.
"""

from collections.abc import Mapping
from typing import Any

from shardwright.config import largest
from shardwright.config.base import shortened
from shardwright.config.dotted_keys import flat_keys
from shardwright.config.fault_gathering_reader import is_whole
from shardwright.config.phrase import say
from shardwright.interchange.imported import Asked, ReadResult
from shardwright.interchange.reading.file_signs import FileSigns
from shardwright.interchange.reading.plain_data import read_data
from shardwright.interchange.reading.setting_notes import counted_as_adamw, none_of, priced_as
from shardwright.interchange.reading.settings import Flat, Settings
from shardwright.interchange.rows import Rule, Table, flag, never, read_row
from shardwright.interchange.started_configuration import started_configuration
from shardwright.interchange.system import SourceSystem
from shardwright.interchange.systems import deepspeed
from shardwright.interchange.systems.deepspeed_batch import MICRO, WORLD, read_batch
from shardwright.interchange.systems.megatron_model import MODEL, SHAPE
from shardwright.interchange.systems.megatron_training import OPTIMIZER
from shardwright.interchange.training_programs import program_fault

SIGNS = (
    FileSigns(
        (
            ("pipe-parallel-size", "num-layers"),
            ("pipe_parallel_size", "num_layers"),
            ("pos_emb", "num_layers"),
            ("model-parallel-size", "num-layers"),
            ("model_parallel_size", "num_layers"),
            ("pos-emb", "num-layers"),
            ("checkpoint_num_layers", "zero_optimization"),  # how it trains, as a second file says
            ("checkpoint-num-layers", "zero_optimization"),
            ("vocab-file", "data-path"),  # where files lie, as a second file says
            ("vocab_file", "data_path", "log_dir"),
        ),
        commands=(r"\bdeepy\.py\b",),
    ),
)
# GPT-NeoX's names -> Megatron-LM's flags with the same values.
_SAME = {
    "num_layers": "num-layers",
    "hidden_size": "hidden-size",
    "num_attention_heads": "num-attention-heads",
    "seq_length": "seq-length",
    "max_position_embeddings": "max-position-embeddings",
    "rotary_pct": "rotary-percent",
    "rotary_emb_base": "rotary-base",
    "init_method_std": "init-method-std",
    "hidden_dropout": "hidden-dropout",
    "attention_dropout": "attention-dropout",
    "make_vocab_size_divisible_by": "make-vocab-size-divisible-by",
    "padded_vocab_size": "padded-vocab-size",
    "tokenizer_type": "tokenizer-type",
    "merge_file": "merge-file",
    "train_iters": "train-iters",
    "lr_decay_iters": "lr-decay-iters",
    "lr_decay_style": "lr-decay-style",
    "warmup": "lr-warmup-fraction",
    "weight_decay": "weight-decay",
    "gradient_clipping": "clip-grad",
    "optimizer.params.lr": "lr",
    "optimizer.params.eps": "adam-eps",
    "min_lr": "min-lr",
}
_DEFAULTS: Mapping[str, Any] = {
    "rotary-percent": 1.0,
    "hidden-dropout": 0.0,
    "attention-dropout": 0.0,
    "weight-decay": 0.1,
    "lr-decay-style": "linear",
    "lr-warmup-fraction": 0.01,
    "clip-grad": 1.0,
}
_POSITIONS = {"learned": "learned_absolute", "rotary": "rope", "alibi": "alibi", "none": "none"}
_NORMS = {"layernorm": "LayerNorm", "te_layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "te_rmsnorm": "RMSNorm"}
_ACTIVATIONS = {"gelu": (), "swiglu": ("swiglu",), "geglu": ("geglu",), "relu2": ("squared-relu",)}
_GATED = ("swiglu", "geglu")
# The mlp_type of older releases with three matrices, whose width is a multiple of so many numbers, and no biases.
_LLAMA, _MULTIPLE_OF_LLAMA = "llama", 256
_OPTIMIZERS = {"adam": "adam", "adamw": "adam", "cpu_adam": "adam", "lion": "lion", "sgd": "sgd"}
_TOKENIZER_OF_20B = 50277  # tokens of 20B_tokenizer.json, Pythia's too
_VOCABULARY = ("tokenizer-type", "merge-file")


def _read_degrees(settings: Settings, fields: Flat) -> None:
    fields["plan.tp"] = max(1, settings.count("model_parallel_size", 1, largest.RANKS))
    fields["plan.pp"] = max(1, settings.count("pipe_parallel_size", 0, largest.PIPELINE_RANKS))
    fields |= {"plan.cp": 1, "plan.schedule": "1f1b"}
    fields["plan.sequence_parallel"] = settings.flag("sequence_parallel") and fields["plan.tp"] > 1


def _read_recompute(settings: Settings, fields: Flat) -> None:
    if settings.flag("checkpoint_activations"):
        fields |= {"plan.recompute": "full", "plan.offload_activations": settings.flag("checkpoint_in_cpu")}
    if (layers := settings.count("checkpoint_num_layers", 1)) > 1:
        settings.lost.append(
            say("checkpoint_num_layers = {layers}: layers are computed again one by one here", layers=layers)
        )


def _read_block(settings: Settings, fields: Flat) -> None:
    """Read how attention and MLP stand beside each other, their biases and those of norms, and the window."""
    if settings.flag("gpt_j_residual"):
        fields["model.parallel_block"] = "one-norm" if settings.flag("gpt_j_tied") else "two-norms"
    has_attention_bias, has_mlp_bias = (settings.flag(f"use_bias_in_{part}", True) for part in ("attn_linear", "mlp"))
    has_mlp_bias = has_mlp_bias and settings.text("mlp_type") != _LLAMA
    fields["model.bias"] = has_attention_bias and has_mlp_bias
    fields["model.attention_bias"] = has_attention_bias and not has_mlp_bias
    fields["model.mlp_bias"] = has_mlp_bias and not has_attention_bias
    if settings.flag("use_qk_layernorm"):
        settings.faults.append(
            say("use_qk_layernorm: each head has a norm of its own there, and heads share it here; leave it out")
        )
    if fields["model.norm"] == "layernorm":
        fields["model.norm_bias"] = settings.flag("use_bias_in_norms", True)
    settings.ignore("use_bias_in_norms")
    if (window := settings.count("sliding_window_width", 0)) > 0:
        fields["model.window.size"] = window


def _read_kinds(settings: Settings, _: Flat) -> None:
    """Refuse layers that are no dense attention with an MLP."""
    kinds = {str(kind) for kind in _leaves(settings.raw("attention_config")) if isinstance(kind, str)}
    if others := kinds - {"global", "flash"}:
        settings.faults.append(
            say("attention_config has {kinds}: attention to all is counted here", kinds=", ".join(sorted(others))[:60])
        )
    _read_experts(settings)
    if settings.text("mlp_type", "regular") not in ("regular", _LLAMA):
        settings.faults.append(
            say("{setting} is of older releases; say it by activation", setting=settings.setting_text("mlp_type"))
        )
    is_said = any(name in settings.overrides for name in ("batch.global_batch_size", "plan.microbatch_size"))
    if not (is_said or settings.has("train_batch_size", *MICRO)):
        settings.faults.append(
            say(
                "neither train_batch_size nor train_micro_batch_size_per_gpu is said, and GPT-NeoX needs one; name "
                "the file of the configuration that has it, too"
            )
        )
    of_others = [name for name in ("gd_mode",) if settings.flag(name)]  # two losses, of what to forget and to retain
    of_others += ["train_impl"] if settings.text("train_impl", "normal") != "normal" else []
    settings.faults += [
        say("{setting}: training by next tokens is counted here", setting=settings.setting_text(name))
        for name in of_others
    ]


def _read_experts(settings: Settings) -> None:
    """Refuse experts that --set does not say; what else is said of them counts for nothing where there is one MLP."""
    name = next((name for name in ("moe_num_experts", "num_experts") if settings.has(name)), "")
    if name and settings.count(name, 1) > 1 and "model.moe.experts" not in settings.overrides:
        setting = settings.setting_text(name)
        fault = say("{setting}: it chooses experts by Sinkhorn's balance, which is not here", setting=setting)
        if settings.text("moe_router_type", "sinkhorn") != "sinkhorn" or settings.text("moe_type") == "deepspeed":
            fault = say(
                "{setting}: experts of GPT-NeoX are not read; say them by fields of model.moe: --set "
                "model.moe.experts=N --set model.moe.top_k=N --set model.moe.ffn=N",
                setting=setting,
            )
        settings.faults.append(fault)
    settings.ignore(*(name for name in settings.given if name.startswith(_OF_EXPERTS)))


_OF_EXPERTS = ("moe_", "enable_expert_tensor")
ENGINE: Table = (
    Rule(("model_parallel_size",), _read_degrees),
    Rule(("train_batch_size",), read_batch),
    Rule(("zero_optimization.stage",), deepspeed.read_zero),
    Rule(("fp16.enabled",), deepspeed.read_numbers),
)
_OWN: Table = (
    Rule(("checkpoint_activations",), _read_recompute),
    Rule(("gpt_j_residual",), _read_block),
    Rule(("attention_config",), _read_kinds),
    flag("no_weight_tying", "model.tied_embeddings", present=False, absent=True).under(None, never),
)


def read(texts: Mapping[str, str], asked: Asked) -> ReadResult:
    """Read the files of a configuration. Raises ShellFault."""
    started = started_configuration(texts, asked, SIGNS)
    keys: dict[str, Any] = {}
    for name, text in started.files.items():
        data = read_data(name, text)
        keys |= flat_keys({str(key).replace("-", "_"): value for key, value in data.items()})
    spelled = {flag_name: name for name, flag_name in _SAME.items()}
    settings = Settings(notes=list(started.notes), overrides=asked.fields, spelled=spelled)
    program = next(iter(started.command.arguments), "") if started.command else ""  # that the launcher starts
    settings.faults += [
        fault for fault in (program_fault(program, asked.variables),) if fault and program.endswith(".py")
    ]
    world = asked.cluster.devices or started.ranks
    settings.given = _renamed(keys, settings) | ({WORLD: world} if world else {})
    fields: Flat = {}
    for row in SHAPE:
        read_row(row, settings, fields)
    if keys.get("do_distillation") is True:
        settings.faults.append(say("{setting}: training by next tokens is counted here", setting="do_distillation"))
        settings.ignore(*settings.given)
        return ReadResult(fields, settings, "megatron-deepspeed")
    if not (fields["model.layers"] and fields["model.hidden"] and fields["model.heads"]):
        settings.faults.append(
            say("num_layers, hidden_size and num_attention_heads say what the model is; name their file too")
        )
        settings.ignore(*settings.given)
        return ReadResult(fields, settings, "megatron-deepspeed")
    if "model.vocab" in asked.fields:
        settings.ignore("make-vocab-size-divisible-by", "vocab-size", *_VOCABULARY)
    model = [row for row in MODEL if "model.vocab" not in asked.fields or "vocab-size" not in row.names]
    for row in (*ENGINE, *model, *_OWN, *OPTIMIZER):
        read_row(row, settings, fields)
    settings.ignore(
        WORLD, "norm", "pos_emb", "activation", "bias_gelu_fusion", "optimizer.type", "optimizer.params.betas"
    )
    if settings.flag("use_bnb_optimizer"):  # bitsandbytes' Adam of 8 bits
        settings.lost.append(counted_as_adamw(settings.setting_text("use_bnb_optimizer")))
    settings.note(priced_as("megatron-deepspeed"))
    shape = (0, 0) if asked.cluster.devices else started.shape
    return ReadResult(fields, settings, "megatron-deepspeed", *shape, known_in=("gpt-neox", "deepspeed"))


def _renamed(keys: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Settings under the names that the tables read, over GPT-NeoX's own defaults."""
    given = dict(_DEFAULTS) | {_SAME.get(name, name): value for name, value in keys.items()}
    given |= {"lr": keys["lr"]} if keys.get("lr") is not None and "optimizer.params.lr" not in keys else {}
    given |= _model_flags(keys, settings) | _optimizer_flags(keys, settings)
    precision = keys.get("precision")
    if precision in ("fp16", "bfloat16"):
        given["fp16.enabled" if precision == "fp16" else "bf16.enabled"] = True
    if keys.get("zero_stage") is not None:
        given.setdefault("zero_optimization.stage", keys["zero_stage"])
    if keys.get("gas") is not None:
        given.setdefault("gradient_accumulation_steps", keys["gas"])
    if keys.get("batch_size") is not None:
        given.setdefault("train_micro_batch_size_per_gpu", keys["batch_size"])
    if "20b_tokenizer" in str(keys.get("vocab_file", "")).lower():
        given["vocab-size"] = _TOKENIZER_OF_20B
    used = ("precision", "zero_stage", "batch_size", "gas", "num_kv_heads", "expansion_factor", "intermediate_size")
    return {name: value for name, value in given.items() if name not in used and name != "mlp_multiple_of"}


def _model_flags(keys: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Megatron-LM's flags for words of GPT-NeoX."""
    flags: dict[str, Any] = {}
    for name, words, flag_name, default in (
        ("pos_emb", _POSITIONS, "position-embedding-type", "learned"),
        ("norm", _NORMS, "normalization", "layernorm"),
    ):
        word = str(keys.get(name, default))
        if word not in words:
            settings.faults.append(none_of(f"{name} = {shortened(word, 40)}", words))
        flags[flag_name] = words.get(word, words[default])
    activation = str(keys.get("activation", "gelu"))
    if keys.get("mlp_type") == _LLAMA:
        activation = {"silu": "swiglu", "gelu": "geglu"}.get(activation, activation)
    if activation not in _ACTIVATIONS:
        settings.faults.append(none_of(f"activation = {shortened(activation, 40)}", _ACTIVATIONS))
    flags |= dict.fromkeys(_ACTIVATIONS.get(activation, ()), True)
    flags |= {} if keys.get("bias_gelu_fusion") is True else {"no-bias-gelu-fusion": True}
    flags["ffn-hidden-size"] = _width(keys, is_gated=activation in _GATED)
    hidden = keys.get("hidden_size")
    if keys.get("mlp_type") == _LLAMA and isinstance(hidden, int):
        flags["ffn-hidden-size"] = _MULTIPLE_OF_LLAMA * -(-int(2 * hidden * 4 / 3) // _MULTIPLE_OF_LLAMA)
    if is_whole(keys.get("num_kv_heads")):
        flags |= {"group-query-attention": True, "num-query-groups": keys["num_kv_heads"]}
    is_rms = flags["normalization"] == "RMSNorm"
    flags["norm-epsilon"] = keys.get(*(("rms_norm_epsilon", 1e-8) if is_rms else ("layernorm_epsilon", 1e-5)))
    settings.ignore("rms_norm_epsilon", "layernorm_epsilon")
    return flags


def _width(keys: Mapping[str, Any], is_gated: bool) -> int:
    """The width inside the MLP. A gated one has two thirds of the width that is said, and one half of these for each of
    its two parts; both are rounded up to a multiple."""
    hidden, multiple, width = keys.get("hidden_size"), keys.get("mlp_multiple_of", 1), keys.get("intermediate_size")
    if not isinstance(hidden, int) or not isinstance(multiple, int) or multiple < 1:
        return 0
    if not isinstance(width, int) or not width:
        factor = keys.get("expansion_factor")
        width = int((factor if isinstance(factor, (int, float)) and factor else 4) * hidden)
    if is_gated:
        width = int(width * 2 / 3) // 2
    return multiple * -(-width // multiple)


def _optimizer_flags(keys: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    word = str(keys.get("optimizer.type", "adam")).lower()
    if word not in _OPTIMIZERS and "optimizer.name" not in settings.overrides:
        settings.faults.append(none_of(f"optimizer.type = {shortened(word, 40)}", _OPTIMIZERS, "optimizer.name"))
    flags: dict[str, Any] = {"optimizer": _OPTIMIZERS.get(word, "adam")}
    betas = keys.get("optimizer.params.betas")
    prefix = "lion" if flags["optimizer"] == "lion" else "adam"
    if isinstance(betas, list) and len(betas) == 2:
        flags |= {f"{prefix}-beta1": betas[0], f"{prefix}-beta2": betas[1]}
    return flags


def _leaves(value: Any) -> list[Any]:
    """The items of nested lists."""
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, list) else [value]


FACTS = SourceSystem(name="gpt-neox", place=140, title="GPT-NeoX", read=read, is_behind_scripts=True, signs=SIGNS)
