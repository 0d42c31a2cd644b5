"""Megatron-LM's flags for the model: widths, positions, norms, activations, vocabulary."""

import math
from typing import Any

from shardwright.config import largest
from shardwright.config.fault_gathering_reader import whole
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.interchange.reading.setting_notes import taken_length
from shardwright.interchange.reading.settings import Flat, Settings
from shardwright.interchange.rows import Rule, Table, count, flag, never, number, word
from shardwright.interchange.systems.vocabularies import (
    VOCABULARIES,
    other_vocabulary,
    padded_vocabulary,
    vocabulary_of,
)


def _read_vocab(settings: Settings, fields: Flat) -> None:
    """Read the padded size of the vocabulary, which the embedding and the head are computed with."""
    padded = settings.count(("padded-vocab-size", "pad-vocab-size-to"), 0)
    tokens, unit = settings.count("vocab-size", 0), settings.count("make-vocab-size-divisible-by", 128)
    kind, name = settings.text("tokenizer-type").lower(), " ".join(settings.words("tokenizer-model")).lower()
    if padded:
        fields["model.vocab"] = padded
        return
    if tokens and kind == "nulltokenizer":
        tokens += 1
        settings.note(say("NullTokenizer adds a token to {option}: {tokens:,}", option="--vocab-size", tokens=tokens))
    elif not tokens and "model.vocab" not in fields:
        padding = {"unit": unit, "ranks": fields["plan.tp"], "multiple": unit * fields["plan.tp"]}
        vocabulary = vocabulary_of(settings, kind, name)
        if vocabulary and (other := other_vocabulary(vocabulary, settings)):
            settings.faults.append(
                say(
                    "{setting} is not {whose} by its name, and says how many tokens there are; give them with --set "
                    "model.vocab=N, padded as Megatron-LM pads it, to a multiple of {unit} x {ranks} tensor-parallel "
                    "ranks = {multiple}",
                    setting=other,
                    whose=VOCABULARIES[vocabulary][1],
                    **padding,
                )
            )
            settings.ignore("extra-vocab-size")
            return
        if not vocabulary:
            settings.faults.append(
                say(
                    "the number of tokens is the tokenizer's, which is not read; give it with --set model.vocab=N, "
                    "padded as Megatron-LM pads it, to a multiple of {unit} x {ranks} tensor-parallel ranks = "
                    "{multiple}",
                    **padding,
                )
            )
            settings.ignore("extra-vocab-size")
            return
        tokens, whose = VOCABULARIES[vocabulary]
        settings.note(
            say(
                "the vocabulary is {whose}, {tokens:,} tokens, by the name of the tokenizer (--set model.vocab=N "
                "for another)",
                whose=whose,
                tokens=tokens,
            )
        )
    fields["model.vocab"] = padded_vocabulary(settings, fields, tokens, unit)


def note_unpadded(settings: Settings, fields: Flat) -> None:
    """Note that a vocabulary that --set gives is not padded as the flags say, which changes what may be split."""
    unit, tokens = settings.count("make-vocab-size-divisible-by", 128), settings.overridden("model.vocab")
    multiple = max(1, unit * fields["plan.tp"])
    if tokens is None or tokens % multiple == 0:
        return
    settings.note(
        say(
            "model.vocab {tokens:,} is no multiple of {unit} x {ranks} tensor-parallel ranks = {multiple}: Megatron-LM "
            "pads it to {padded:,}, which is the number to say",
            tokens=tokens,
            unit=unit,
            ranks=fields["plan.tp"],
            multiple=multiple,
            padded=-(-tokens // multiple) * multiple,
        )
    )


def _write_vocab(job: JobSpec, settings: dict[str, Any]) -> None:
    vocab, tp = job.model.vocab, job.plan.tp
    settings |= {"tokenizer-type": "NullTokenizer", "vocab-size": vocab - 1}
    settings["make-vocab-size-divisible-by"] = math.gcd(128, vocab // tp) if vocab % tp == 0 else 1


def _read_widths(settings: Settings, fields: Flat) -> None:
    hidden, heads = fields["model.hidden"], fields["model.heads"]
    groups = settings.count(("num-query-groups", "num-key-value-heads"), 0)
    is_grouped = settings.flag("group-query-attention") or ("num-key-value-heads" in settings.given)
    if settings.one_of("attention-head-type", {"multihead": False, "multiquery": True}, "multihead"):
        groups, is_grouped = 1, True
    is_latent = settings.flag("multi-latent-attention")
    if groups not in (0, heads) and not is_grouped and not is_latent:
        settings.lost.append(
            say(
                "{setting}: Megatron-LM reads it beside {option} alone, so each of {heads} heads has its own keys "
                "(--set model.kv_heads={groups} for fewer)",
                setting=settings.setting_text("num-query-groups"),
                option=settings.shown("group-query-attention"),
                heads=heads,
                groups=groups,
            )
        )
    fields["model.kv_heads"] = groups if is_grouped and not is_latent and groups != heads else 0
    is_gated = settings.flag("swiglu") or settings.has("quick-geglu")
    fields["model.ffn"] = settings.count(
        "ffn-hidden-size", int(4 * hidden * 2 / 3 / 64) * 64 if is_gated else 4 * hidden
    )
    channels = settings.count("kv-channels", 0)
    fields["model.head_dim"] = 0 if is_latent or (heads and channels * heads == hidden) else channels
    longest = settings.count("max-position-embeddings", 0)
    fields["model.longest_sequence"] = longest if longest > fields["model.sequence"] else 0


def _write_widths(job: JobSpec, settings: dict[str, Any]) -> None:
    model = job.model
    settings["ffn-hidden-size"] = model.ffn_size
    settings["max-position-embeddings"] = max(model.longest, model.sequence)
    if model.is_latent:
        settings |= {"multi-latent-attention": True, "qk-layernorm": True}
        return
    if model.num_kv_heads != model.heads:
        settings |= {"group-query-attention": True, "num-query-groups": model.num_kv_heads}
    if model.head_size * model.heads != model.hidden:
        settings["kv-channels"] = model.head_size


# Multi-latent attention.
LATENT: Table = tuple(
    row.under(lambda settings, _: settings.flag("multi-latent-attention"), lambda job: job.model.is_latent)
    for row in (
        count("kv-lora-rank", "model.latent.kv_rank", 32, always=True),
        count("qk-head-dim", "model.latent.nope_dim", 128, always=True),
        count("qk-pos-emb-head-dim", "model.latent.rope_dim", 64, always=True),
        count("v-head-dim", "model.latent.value_dim", 128, always=True),
        count("q-lora-rank", "model.latent.q_rank", 0),
    )
)

# Flags -> (activation, gated_mlp).
_ACTIVATIONS = {
    "squared-relu": ("relu2", False),
    "swiglu": ("silu", True),
    "geglu": ("gelu", True),
    "openai-gelu": ("gelu-tanh", False),
    "gelu-tanh": ("gelu-tanh", True),
}
_ACTIVATIONS_OF_FORKS = ("geglu", "gelu-tanh")


def _read_activation(settings: Settings, fields: Flat) -> None:
    is_fused = not settings.flag("no-bias-gelu-fusion")
    is_quick = settings.flag("quick-geglu")
    clamp = settings.number("activation-func-clamp-value", 0.0)
    offset = settings.number("glu-linear-offset", 0.0)
    pairs = [pair for name, pair in _ACTIVATIONS.items() if settings.flag(name)]
    has_bias = not settings.flag("disable-bias-linear")
    kind, gated = pairs[0] if pairs else ("gelu-tanh" if is_fused and has_bias else "gelu", False)
    if settings.has("xielu"):
        kind, gated = "relu2", False
        settings.lose("xielu", say("its two learned numbers a layer are not here; relu2 of the same widths is counted"))
    elif is_quick:
        kind, gated = ("clamped-silu" if clamp == 7.0 and offset == 1.0 else "quick-gelu"), True
    elif clamp or offset:
        settings.faults.append(
            say(
                "{setting} can't be said here; use {option} with it",
                option="--quick-geglu",
                setting=settings.setting_text("activation-func-clamp-value"),
            )
        )
    fields |= {"model.activation": kind, "model.gated_mlp": gated}


def _write_activation(job: JobSpec, settings: dict[str, Any]) -> None:
    model = job.model
    pair = (model.activation, model.gated_mlp)
    if pair == ("clamped-silu", True):
        settings |= {"quick-geglu": True, "activation-func-clamp-value": 7.0, "glu-linear-offset": 1.0}
    elif pair == ("quick-gelu", True):
        settings["quick-geglu"] = True
    elif pair == ("gelu", False):
        settings["no-bias-gelu-fusion"] = True
    elif pair == ("gelu-tanh", False):
        settings |= {} if model.bias else {"openai-gelu": True}
    else:
        own = [name for name, named in _ACTIVATIONS.items() if named == pair and name not in _ACTIVATIONS_OF_FORKS]
        settings |= dict.fromkeys(own, True)


_POSITIONS = {
    "learned_absolute": "learned",
    "rope": "rotary",
    "rotary": "rotary",
    "none": "none",
    "alibi": "alibi",
    "yarn": "rotary",
    "absolute": "learned",
}


def _read_positions(settings: Settings, fields: Flat) -> None:
    kind = settings.one_of("position-embedding-type", _POSITIONS, "learned_absolute")
    is_yarn = settings.text("position-embedding-type") == "yarn"
    is_latent = settings.flag("multi-latent-attention")
    if settings.flag("use-rotary-position-embeddings") or is_latent:
        kind = "rotary"
    fields["model.positions"] = kind
    rotary_base, rotary_share = settings.number("rotary-base", 10000.0), settings.number("rotary-percent", 1.0)
    linear_factor = settings.count("rotary-seq-len-interpolation-factor", 1)
    llama_factor = settings.number("rope-scaling-factor", 8.0) if settings.flag("use-rope-scaling") else 1.0
    factor = settings.number("rotary-scaling-factor", 1.0)
    rope = settings.one_of("rope-type", {"rope": "rope", "yarn": "yarn"}, "yarn" if is_latent or is_yarn else "rope")
    settings.ignore("rotary-interleaved", "no-position-embedding", "no-rope-fusion")
    if kind != "rotary":
        return
    fields["model.rotary_base"] = rotary_base
    if rotary_share != 1.0 and not is_latent and fields["model.heads"]:
        head_dim = fields["model.head_dim"] or fields["model.hidden"] // fields["model.heads"]
        fields["model.rotary_dim"] = round(head_dim * rotary_share)
    scaling: Flat = {}
    if llama_factor != 1.0:
        scaling = {"kind": "llama3", "factor": llama_factor, "trained_sequence": 8192}
    elif linear_factor > 1:
        scaling = {"kind": "linear", "factor": float(linear_factor)}
    elif is_latent and rope == "rope" and factor != 1.0:
        # Megatron-LM takes only the attention scale of YaRN here, not its angles.
        settings.lose("mscale-all-dim", say("attention has its scale by the width of heads alone here"))
    elif rope == "yarn" and factor != 1.0:
        scaling = {
            "kind": "yarn",
            "factor": factor,
            "mscale": settings.number("mscale", 1.0),
            "mscale_all_dim": settings.number("mscale-all-dim", 0.0),
            "trained_sequence": settings.count(
                ("yarn-original-max-position-embeddings", "original-max-position-embeddings"), 4096
            ),
            "fast": settings.number("yarn-beta-fast", 32.0),
            "slow": settings.number("yarn-beta-slow", 1.0),
            "truncate": not settings.flag("no-yarn-correction-range-round-to-int"),
        }
    settings.ignore("mscale", "mscale-all-dim", "original-max-position-embeddings")
    fields |= {f"model.rotary_scaling.{name}": value for name, value in scaling.items()}


def _write_positions(job: JobSpec, settings: dict[str, Any]) -> None:
    model, scaling = job.model, job.model.rotary_scaling
    kinds = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}
    if model.positions not in kinds:
        return
    settings["position-embedding-type"] = kinds[model.positions]
    if model.positions != "rotary":
        return
    settings["rotary-base"] = int(model.rotary_base) if float(model.rotary_base).is_integer() else model.rotary_base
    if not model.is_latent and model.rotary_width != model.head_size:
        settings["rotary-percent"] = model.rotary_width / model.head_size
    if scaling.kind == "llama3":
        settings |= {"use-rope-scaling": True, "rope-scaling-factor": scaling.factor}
    elif scaling.kind == "linear" and scaling.factor.is_integer():
        settings["rotary-seq-len-interpolation-factor"] = int(scaling.factor)
    elif scaling.kind == "yarn" and model.is_latent:
        settings["rotary-scaling-factor"] = scaling.factor
        settings |= {"mscale": scaling.mscale, "mscale-all-dim": scaling.mscale_all_dim}


def _read_window(settings: Settings, fields: Flat) -> None:
    text = "".join(settings.words("window-size")).strip("()").replace(" ", "")
    every = settings.text("window-attn-skip-freq", "0")
    if not text:
        return
    tokens_before, full_every = whole(text.split(",")[0]), whole(every)
    if tokens_before is None or full_every is None:
        settings.faults.append(
            say(
                "{setting}, every {every}: it can't be said here; use LEFT,0",
                setting=settings.setting_text("window-size"),
                every=every,
            )
        )
        return
    fields |= {"model.window.size": tokens_before + 1, "model.window.full_every": full_every}


def _write_window(job: JobSpec, settings: dict[str, Any]) -> None:
    window = job.model.window
    if window.size:
        settings["window-size"] = f"{window.size - 1},0"
        settings |= {"window-attn-skip-freq": window.full_every} if window.full_every else {}


def _read_biases(settings: Settings, fields: Flat) -> None:
    has_bias = not settings.flag("disable-bias-linear") and not settings.flag("multi-latent-attention")
    fields |= {"model.bias": has_bias, "model.qkv_bias": settings.flag(("add-qkv-bias", "qkv-bias")) and not has_bias}


def _write_biases(job: JobSpec, settings: dict[str, Any]) -> None:
    # Megatron-LM refuses biases with experts that are split over ranks.
    has_bias = job.model.bias and not (job.model.moe.experts and job.plan.expert_tp_size > 1)
    settings |= {} if has_bias else {"disable-bias-linear": True}
    settings |= {"add-qkv-bias": True} if job.model.qkv_bias else {}


def _read_qk_norm(settings: Settings, fields: Flat) -> None:
    is_head_norm, is_l2 = settings.flag("qk-layernorm"), settings.flag("qk-l2-norm")
    is_latent = settings.flag("multi-latent-attention")
    fields["model.qk_norm"] = "none" if is_latent else "l2" if is_l2 else "head" if is_head_norm else "none"


def _write_qk_norm(job: JobSpec, settings: dict[str, Any]) -> None:
    name = {"head": "qk-layernorm", "l2": "qk-l2-norm"}.get(job.model.qk_norm)
    settings |= {name: True} if name else {}


def _read_attention_dropout(settings: Settings, fields: Flat) -> None:
    attention_dropout = settings.number("attention-dropout", 0.1)
    if attention_dropout:
        settings.lost.append(
            say(
                "{setting}: probabilities of attention are not dropped here",
                setting=f"--attention-dropout {attention_dropout:g}",
            )
        )


def _write_attention_dropout(job: JobSpec, settings: dict[str, Any]) -> None:
    settings["attention-dropout"] = 0.0


REQUIRED = ("num-layers", "hidden-size", "num-attention-heads")

SHAPE: Table = (
    count("num-layers encoder-num-layers decoder-num-layers", "model.layers", 0, most=largest.LAYERS),
    count("hidden-size", "model.hidden", 0),
    count("num-attention-heads", "model.heads", 0),
    count("seq-length encoder-seq-length max-position-embeddings", "model.sequence", 0),
)


def _read_length(settings: Settings, fields: Flat) -> None:
    tokens = settings.count(("max-length", "seq-length"), 0)
    if tokens:
        fields["model.sequence"] = tokens
    else:
        settings.note(taken_length(fields["model.sequence"]))


# The row that holds for a model that flags do not describe, too.
LENGTH: Table = (Rule(("seq-length",), _read_length),)

MODEL: Table = (
    Rule(("num-query-groups", "ffn-hidden-size", "kv-channels"), _read_widths, _write_widths),
    *LATENT,
    Rule(("swiglu",), _read_activation, _write_activation),
    Rule(("position-embedding-type",), _read_positions, _write_positions),
    word("normalization", "model.norm", {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}, "LayerNorm"),
    number("norm-epsilon layernorm-epsilon", "model.norm_epsilon", 1e-5),
    Rule(("disable-bias-linear", "add-qkv-bias"), _read_biases, _write_biases),
    Rule(("qk-layernorm",), _read_qk_norm, _write_qk_norm),
    flag("untie-embeddings-and-output-weights", "model.tied_embeddings", present=False, absent=True),
    Rule(("attention-dropout",), _read_attention_dropout, _write_attention_dropout),
    number("hidden-dropout", "model.dropout", 0.1, always=True),
    number("init-method-std", "model.init_std", 0.02),
    word("softmax-type", "model.sinks", {"vanilla": False, "learnable": True}, "vanilla"),
    Rule(("window-size",), _read_window, _write_window),
    flag("embed-layernorm", "model.embedding_norm").under(None, never),  # a flag of Megatron-DeepSpeed
    Rule(("vocab-size", "make-vocab-size-divisible-by"), _read_vocab, _write_vocab),
)
