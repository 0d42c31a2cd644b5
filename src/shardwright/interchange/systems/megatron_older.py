"""Names of other forks of Megatron-LM for what it says otherwise: BigScience's and epfLLM's gated MLPs, epfLLM's and
Pai-Megatron-Patch's heads of keys, biases and windows, FlagScale's width of an MLP as Llama's code has it, Habana's
norms and MLPs.

By the parsers of arguments of these repositories. epfLLM's layers have no biases unless --use-bias is said.
"""

from collections.abc import Mapping
from typing import Any

from shardwright.config.fault_gathering_reader import whole
from shardwright.config.phrase import say

_RENAMED = {
    "num-attention-heads-kv": "num-query-groups",
    "n-head-kv": "num-query-groups",
    "no-tie-embed-logits": "untie-embeddings-and-output-weights",
    "intermediate-size": "ffn-hidden-size",
    "moe-topk": "moe-router-topk",
    "rope-theta": "rotary-base",
    "pipe-parallel-size": "pipeline-model-parallel-size",
}
_HEADS = ("num-attention-heads-kv", "n-head-kv")
_RMS_NORM = ("use-rms-norm", "apply-layernorm-rms")
_OF_EPFLLM = ("num-attention-heads-kv", "no-tie-embed-logits", "use-rms-norm")
_ROTARY_OF_PAI = {
    "use-llama2-rotary-position-embeddings": "use-rotary-position-embeddings",
    "rotary-scale-factor": "rotary-seq-len-interpolation-factor",  # positions are divided by it
}
_BIASES_OF_PAI = ("disable-bias-linear-fc", "disable-bias-attn-fc")
_GATED = ("swiglu", "geglu")
# Flag of Habana's Megatron-DeepSpeed, its value, Megatron-LM's flag and value; no flag for Megatron-LM's default.
_OF_HABANA = (
    ("no-bias", "true", "disable-bias-linear", True),
    ("layernorm-type", "rmsnorm", "normalization", "RMSNorm"),
    ("layernorm-type", "layernorm", "", None),
    ("activation-func-type", "swiglu", "swiglu", True),
    ("activation-func-type", "gelu", "", None),
)


def with_own_names(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(flags under Megatron-LM's names, names as these forks have them)."""
    flags = dict(given)
    spelled: dict[str, str] = {}
    for own_name, name in _RENAMED.items():
        if own_name in flags and name not in flags:
            flags[name] = flags.pop(own_name)
            spelled[name] = own_name
    if any(name in given for name in _HEADS):
        flags["group-query-attention"] = True
    for own_name in _RMS_NORM:
        if own_name in flags:
            del flags[own_name]
            flags["normalization"] = "RMSNorm"
            spelled["normalization"] = own_name
    if any(name in given for name in _OF_EPFLLM) and not flags.pop("use-bias", False):
        flags["disable-bias-linear"] = True
    _put_words_of_habana(flags, spelled)
    _put_words_of_pai(flags, spelled)
    _put_gated_mlp(flags, spelled)
    _put_width(flags, spelled)
    return flags, spelled


def notes_of_forks(given: Mapping[str, Any]) -> list[str]:
    """A note on the embedding and the head of Llama in Habana's Megatron-DeepSpeed, where no flag is about them."""
    if not _is_llama_of_habana(given):
        return []
    return [
        say(
            "embedding and head are two matrices, as Llama has them, for the fork has no flag for it (--set "
            "model.tied_embeddings=true for one)"
        )
    ]


def _is_llama_of_habana(given: Mapping[str, Any]) -> bool:
    return str(given.get("layernorm-type", "")).lower() == "rmsnorm"


def _put_words_of_habana(flags: dict[str, Any], spelled: dict[str, str]) -> None:
    """--no-bias, --layernorm-type and --activation-func-type, as Habana's Megatron-DeepSpeed has them."""
    if _is_llama_of_habana(flags):
        flags["untie-embeddings-and-output-weights"] = True
    for own_name, word, name, value in _OF_HABANA:
        if str(flags.get(own_name, "")).lower() != word:
            continue
        del flags[own_name]
        if name:
            flags[name] = value
            spelled[name] = own_name


def _put_words_of_pai(flags: dict[str, Any], spelled: dict[str, str]) -> None:
    """--sliding-window, which is Mistral's, the rotary positions of Llama 2 with their factor, and flags for biases of
    single linear maps, which none has with --disable-bias-linear, as Pai-Megatron-Patch has them."""
    for own_name, name in _ROTARY_OF_PAI.items():
        if own_name in flags:
            flags.setdefault(name, flags.pop(own_name))
            spelled[name] = own_name
    window, length = (whole(str(flags.get(name, ""))) for name in ("sliding-window", "seq-length"))
    if window:
        del flags["sliding-window"]
        if not length or length > window:
            flags.setdefault("window-size", f"{window - 1},0")
            spelled["window-size"] = "sliding-window"
    if "disable-bias-linear" in flags:
        for name in _BIASES_OF_PAI:
            flags.pop(name, None)


def _put_gated_mlp(flags: dict[str, Any], spelled: dict[str, str]) -> None:
    """--glu-activation, which leaves the width of the MLP as it is without it: four times that of the model."""
    kind = str(flags.get("glu-activation", ""))
    hidden = whole(str(flags.get("hidden-size", "")))
    if kind in _GATED:
        del flags["glu-activation"]
        flags[kind] = True
        spelled[kind] = "glu-activation"
        if hidden:
            flags.setdefault("ffn-hidden-size", str(4 * hidden))


def _put_width(flags: dict[str, Any], spelled: dict[str, str]) -> None:
    """--multiple-of and --hidden-dim-multiplier: two thirds of four times the width, times the latter, rounded up."""
    unit, hidden = (whole(str(flags.get(name, ""))) for name in ("multiple-of", "hidden-size"))
    if "ffn-hidden-size" in flags or "swiglu" not in flags:
        flags.pop("multiple-of", None)
        flags.pop("hidden-dim-multiplier", None)
        return
    try:
        factor = float(str(flags.get("hidden-dim-multiplier", 1)))
    except ValueError:
        return
    if unit and hidden and 0 < factor < 100:
        width = int(int(4 * hidden * 2 / 3) * factor)
        flags["ffn-hidden-size"] = str(-(-width // unit) * unit)
        spelled["ffn-hidden-size"] = "multiple-of"
        del flags["multiple-of"]
        flags.pop("hidden-dim-multiplier", None)
