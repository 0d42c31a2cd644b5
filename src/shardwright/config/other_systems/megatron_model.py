"""Megatron-LM's flags for the model: its widths, positions, norms, activations, vocabulary."""

import math
from typing import Any

from shardwright.config import largest
from shardwright.config.job import JobSpec
from shardwright.config.other_systems.rows import Rule, Table, count, flag, number, word
from shardwright.config.other_systems.settings import Flat, Settings
from shardwright.config.other_systems.whole_text import whole

# Tokens of vocabularies that a launch script names by their tokenizer alone.
_VOCABULARIES = {
    "gpt2bpetokenizer": (50257, "GPT-2's"), "llama2tokenizer": (32000, "Llama 2's"),
    "deepseek-ai/deepseek-v3": (128815, "DeepSeek-V3's"), "deepseek-ai/deepseek-v2": (100015, "DeepSeek-V2's"),
    "meta-llama/llama-3": (128256, "Llama 3's"), "mistralai/mixtral-8x7b": (32000, "Mixtral's"),
}  # fmt: skip


def _read_vocab(theirs: Settings, ours: Flat) -> None:
    """The padded number of tokens: what is computed with."""
    padded = theirs.count(("padded-vocab-size", "pad-vocab-size-to"), 0)
    tokens, unit = theirs.count("vocab-size", 0), theirs.count("make-vocab-size-divisible-by", 128)
    kind, name = theirs.text("tokenizer-type").lower(), theirs.text("tokenizer-model").lower()
    if padded:
        ours["model.vocab"] = padded
        return
    if tokens and kind == "nulltokenizer":
        tokens += 1
        theirs.note(f"NullTokenizer adds a token to --vocab-size: {tokens:,}")
    elif not tokens and "model.vocab" not in ours:
        told = next((key for key in _VOCABULARIES if key in (kind, name) or name.startswith(key)), "")
        told = told or ("gpt2bpetokenizer" if theirs.has("merge-file") and not kind else "")
        if not told:
            theirs.faults.append(
                "the number of tokens is the tokenizer's, which is not read; give it with --set model.vocab=N, padded "
                f"as Megatron-LM pads it, to a multiple of {unit} x tensor-parallel ranks"
            )
            return
        tokens, whose = _VOCABULARIES[told]
        theirs.note(f"the vocabulary is {whose}, {tokens:,} tokens, by the name of the tokenizer")
    multiple = max(1, unit * ours["plan.tp"])
    ours["model.vocab"] = -(-tokens // multiple) * multiple
    if ours["model.vocab"] != tokens:
        theirs.note(
            f"{tokens:,} tokens are padded to {ours['model.vocab']:,}, a multiple of {unit} x {ours['plan.tp']}"
        )


def _write_vocab(job: JobSpec, theirs: dict[str, Any]) -> None:
    vocab, tp = job.model.vocab, job.plan.tp
    theirs |= {"tokenizer-type": "NullTokenizer", "vocab-size": vocab - 1}
    theirs["make-vocab-size-divisible-by"] = math.gcd(128, vocab // tp) if vocab % tp == 0 else 1


def _read_widths(theirs: Settings, ours: Flat) -> None:
    hidden, heads = ours["model.hidden"], ours["model.heads"]
    groups = theirs.count(("num-query-groups", "num-key-value-heads"), 0)
    grouped = theirs.flag("group-query-attention") or ("num-key-value-heads" in theirs.given)
    ours["model.kv_heads"] = groups if grouped and groups not in (0, heads) else 0
    swiglu = theirs.flag("swiglu") or theirs.has("quick-geglu")
    ours["model.ffn"] = theirs.count("ffn-hidden-size", int(4 * hidden * 2 / 3 / 64) * 64 if swiglu else 4 * hidden)
    channels = theirs.count("kv-channels", 0)
    latent = theirs.flag("multi-latent-attention")
    ours["model.head_dim"] = 0 if latent or (heads and channels * heads == hidden) else channels
    longest = theirs.count("max-position-embeddings", 0)
    ours["model.longest_sequence"] = longest if longest > ours["model.sequence"] else 0
    if latent:
        ours["model.kv_heads"] = 0
        names = (("kv_rank", "kv-lora-rank", 32), ("q_rank", "q-lora-rank", 0), ("nope_dim", "qk-head-dim", 128),
                 ("rope_dim", "qk-pos-emb-head-dim", 64), ("value_dim", "v-head-dim", 128))  # fmt: skip
        ours |= {f"model.latent.{mine}": theirs.count(name, default) for mine, name, default in names}


def _write_widths(job: JobSpec, theirs: dict[str, Any]) -> None:
    model = job.model
    theirs["ffn-hidden-size"] = model.ffn_size
    theirs["max-position-embeddings"] = max(model.longest, model.sequence)
    if model.is_latent:
        latent = model.latent
        theirs |= {"multi-latent-attention": True, "qk-layernorm": True, "kv-lora-rank": latent.kv_rank}
        theirs |= {
            "qk-head-dim": latent.nope_dim,
            "qk-pos-emb-head-dim": latent.rope_dim,
            "v-head-dim": latent.value_dim,
        }
        theirs |= {"q-lora-rank": latent.q_rank} if latent.q_rank else {}
        return
    if model.num_kv_heads != model.heads:
        theirs |= {"group-query-attention": True, "num-query-groups": model.num_kv_heads}
    if model.head_size * model.heads != model.hidden:
        theirs["kv-channels"] = model.head_size


_ACTIVATIONS = {"squared-relu": ("relu2", False), "swiglu": ("silu", True), "geglu": ("gelu", True),
                "openai-gelu": ("gelu-tanh", False)}  # fmt: skip


def _read_activation(theirs: Settings, ours: Flat) -> None:
    fused = not theirs.flag("no-bias-gelu-fusion")
    quick = theirs.flag("quick-geglu")
    clamp = theirs.number("activation-func-clamp-value", 0.0)
    offset = theirs.number("glu-linear-offset", 0.0)
    named = [pair for name, pair in _ACTIVATIONS.items() if theirs.flag(name)]
    biased = not theirs.flag("disable-bias-linear")
    kind, gated = named[0] if named else ("gelu-tanh" if fused and biased else "gelu", False)
    if quick:
        kind, gated = ("clamped-silu" if clamp == 7.0 and offset == 1.0 else "quick-gelu"), True
    elif clamp or offset:
        theirs.faults.append(
            f"{theirs.said('activation-func-clamp-value')} can't be said here; use --quick-geglu with it"
        )
    ours |= {"model.activation": kind, "model.gated_mlp": gated}


def _write_activation(job: JobSpec, theirs: dict[str, Any]) -> None:
    model = job.model
    pair = (model.activation, model.gated_mlp)
    if pair == ("clamped-silu", True):
        theirs |= {"quick-geglu": True, "activation-func-clamp-value": 7.0, "glu-linear-offset": 1.0}
    elif pair == ("quick-gelu", True):
        theirs["quick-geglu"] = True
    elif pair == ("gelu", False):
        theirs["no-bias-gelu-fusion"] = True
    elif pair == ("gelu-tanh", False):
        theirs |= {} if model.bias else {"openai-gelu": True}
    else:
        theirs |= {name: True for name, one in _ACTIVATIONS.items() if one == pair and name != "geglu"}


_POSITIONS = {"learned_absolute": "learned", "rope": "rotary", "rotary": "rotary", "none": "none", "alibi": "alibi",
              "yarn": "rotary", "absolute": "learned"}  # fmt: skip


def _read_positions(theirs: Settings, ours: Flat) -> None:
    kind = theirs.one_of("position-embedding-type", _POSITIONS, "learned_absolute")
    is_yarn = theirs.text("position-embedding-type") == "yarn"
    latent = theirs.flag("multi-latent-attention")
    if theirs.flag("use-rotary-position-embeddings") or latent:
        kind = "rotary"
    ours["model.positions"] = kind
    base, share = theirs.number("rotary-base", 10000.0), theirs.number("rotary-percent", 1.0)
    stretch = theirs.count("rotary-seq-len-interpolation-factor", 1)
    llama = theirs.number("rope-scaling-factor", 8.0) if theirs.flag("use-rope-scaling") else 1.0
    factor = theirs.number("rotary-scaling-factor", 1.0)
    turns = theirs.one_of("rope-type", {"rope": "rope", "yarn": "yarn"}, "yarn" if latent or is_yarn else "rope")
    theirs.ignore("rotary-interleaved", "no-position-embedding", "no-rope-fusion")
    if kind != "rotary":
        return
    ours["model.rotary_base"] = base
    if share != 1.0 and not latent and ours["model.heads"]:
        width = ours["model.head_dim"] or ours["model.hidden"] // ours["model.heads"]
        ours["model.rotary_dim"] = round(width * share)
    scaling: Flat = {}
    if llama != 1.0:
        scaling = {"kind": "llama3", "factor": llama, "trained_sequence": 8192}
    elif stretch > 1:
        scaling = {"kind": "linear", "factor": float(stretch)}
    elif latent and turns == "rope" and factor != 1.0:  # which has no angles of YaRN, but its scale of attention
        theirs.lose("mscale-all-dim", "attention has its scale by the width of heads alone here")
    elif turns == "yarn" and factor != 1.0:
        scaling = {"kind": "yarn", "factor": factor, "mscale": theirs.number("mscale", 1.0),
                   "mscale_all_dim": theirs.number("mscale-all-dim", 0.0)}  # fmt: skip
        scaling["trained_sequence"] = theirs.count("yarn-original-max-position-embeddings", 4096)
        scaling["fast"] = theirs.number("yarn-beta-fast", 32.0)
        scaling["slow"] = theirs.number("yarn-beta-slow", 1.0)
        scaling["truncate"] = not theirs.flag("no-yarn-correction-range-round-to-int")
    theirs.ignore("mscale", "mscale-all-dim")
    ours |= {f"model.rotary_scaling.{name}": value for name, value in scaling.items()}


def _write_positions(job: JobSpec, theirs: dict[str, Any]) -> None:
    model, scaling = job.model, job.model.rotary_scaling
    kinds = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}
    if model.positions not in kinds:
        return
    theirs["position-embedding-type"] = kinds[model.positions]
    if model.positions != "rotary":
        return
    theirs["rotary-base"] = int(model.rotary_base) if float(model.rotary_base).is_integer() else model.rotary_base
    if not model.is_latent and model.rotary_width != model.head_size:
        theirs["rotary-percent"] = model.rotary_width / model.head_size
    if scaling.kind == "llama3":
        theirs |= {"use-rope-scaling": True, "rope-scaling-factor": scaling.factor}
    elif scaling.kind == "linear" and scaling.factor.is_integer():
        theirs["rotary-seq-len-interpolation-factor"] = int(scaling.factor)
    elif scaling.kind == "yarn" and model.is_latent:
        theirs["rotary-scaling-factor"] = scaling.factor
        theirs |= {"mscale": scaling.mscale, "mscale-all-dim": scaling.mscale_all_dim}


def _read_window(theirs: Settings, ours: Flat) -> None:
    text = "".join(theirs.words("window-size")).strip("()").replace(" ", "")
    every = theirs.text("window-attn-skip-freq", "0")
    if not text:
        return
    left, full = whole(text.split(",")[0]), whole(every)
    if left is None or full is None:
        theirs.faults.append(f"{theirs.said('window-size')}, every {every}: it can't be said here; use LEFT,0")
        return
    ours |= {"model.window.size": left + 1, "model.window.full_every": full}


def _write_window(job: JobSpec, theirs: dict[str, Any]) -> None:
    window = job.model.window
    if window.size:
        theirs["window-size"] = f"{window.size - 1},0"
        theirs |= {"window-attn-skip-freq": window.full_every} if window.full_every else {}


def _read_biases(theirs: Settings, ours: Flat) -> None:
    bias = not theirs.flag("disable-bias-linear") and not theirs.flag("multi-latent-attention")
    ours |= {"model.bias": bias, "model.qkv_bias": theirs.flag(("add-qkv-bias", "qkv-bias")) and not bias}


def _write_biases(job: JobSpec, theirs: dict[str, Any]) -> None:
    has_bias = job.model.bias and not (job.model.moe.experts and job.plan.expert_tp_size > 1)  # or it is refused
    theirs |= {} if has_bias else {"disable-bias-linear": True}
    theirs |= {"add-qkv-bias": True} if job.model.qkv_bias else {}


def _read_qk_norm(theirs: Settings, ours: Flat) -> None:
    norm, is_l2 = theirs.flag("qk-layernorm"), theirs.flag("qk-l2-norm")
    latent = theirs.flag("multi-latent-attention")
    ours["model.qk_norm"] = "none" if latent else "l2" if is_l2 else "head" if norm else "none"


def _write_qk_norm(job: JobSpec, theirs: dict[str, Any]) -> None:
    name = {"head": "qk-layernorm", "l2": "qk-l2-norm"}.get(job.model.qk_norm)
    theirs |= {name: True} if name else {}


def _read_dropout(theirs: Settings, ours: Flat) -> None:
    ours["model.dropout"] = theirs.number("hidden-dropout", 0.1)
    dropped = theirs.number("attention-dropout", 0.1)
    if dropped:
        theirs.lost.append(f"--attention-dropout {dropped:g}: probabilities of attention are not dropped here")


def _write_dropout(job: JobSpec, theirs: dict[str, Any]) -> None:
    theirs |= {"attention-dropout": 0.0, "hidden-dropout": job.model.dropout}


def _read_embedding_norm(theirs: Settings, ours: Flat) -> None:
    ours["model.embedding_norm"] = theirs.flag("embed-layernorm")  # of Megatron-DeepSpeed


REQUIRED = ("num-layers", "hidden-size", "num-attention-heads")

SHAPE: Table = (
    count("num-layers encoder-num-layers decoder-num-layers", "model.layers", 0, most=largest.LAYERS),
    count("hidden-size", "model.hidden", 0),
    count("num-attention-heads", "model.heads", 0),
    count("seq-length encoder-seq-length max-position-embeddings", "model.sequence", 0),
)

MODEL: Table = (
    Rule(("num-query-groups", "ffn-hidden-size", "kv-channels"), _read_widths, _write_widths),
    Rule(("swiglu",), _read_activation, _write_activation),
    Rule(("position-embedding-type",), _read_positions, _write_positions),
    word("normalization", "model.norm", {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}, "LayerNorm"),
    number("norm-epsilon layernorm-epsilon", "model.norm_epsilon", 1e-5),
    Rule(("disable-bias-linear", "add-qkv-bias"), _read_biases, _write_biases),
    Rule(("qk-layernorm",), _read_qk_norm, _write_qk_norm),
    flag("untie-embeddings-and-output-weights", "model.tied_embeddings", there=False, missing=True),
    Rule(("hidden-dropout", "attention-dropout"), _read_dropout, _write_dropout),
    number("init-method-std", "model.init_std", 0.02),
    word("softmax-type", "model.sinks", {"vanilla": False, "learnable": True}, "vanilla"),
    Rule(("window-size",), _read_window, _write_window),
    Rule((), _read_embedding_norm),
    Rule(("vocab-size", "make-vocab-size-divisible-by"), _read_vocab, _write_vocab),
)
