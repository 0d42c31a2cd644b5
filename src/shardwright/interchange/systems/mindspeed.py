"""MindSpeed-LLM (Ascend), a fork of Megatron-LM: its own flags for experts, stages and sequences, under Megatron-LM's
names. Flags that have no counterpart stay, and are refused or told by their names."""

import re
from collections.abc import Mapping
from typing import Any

from shardwright.config import largest
from shardwright.config.fault_gathering_reader import whole
from shardwright.interchange.systems.megatron_plan import LAYOUT, layout_text

# Flags that no other fork has.
_OWN = (
    "context-parallel-algo",
    "first-k-dense-replace",
    "n-shared-experts",
    "norm-topk-prob",
    "seq-aux",
    "moe-permutation-async-comm",
    "moe-alltoall-overlap-comm",
    "moe-tp-extend-ep",
    "gemm-gradient-accumulation-fusion",
    "num-layer-list",
    "noop-layers",
    "handler-name",
    "recompute-activation-function",
    "swap-optimizer",
    "reuse-fp32-param",
    "is-instruction-dataset",
    "prompt-type",
    "neat-pack",
    "padded-samples",
    "tokenizer-not-use-fast",
    "use-fused-ring-attention-update",
    "use-fused-rotary-pos-emb",
    "use-fused-swiglu",
    "use-fused-rmsnorm",
    "multi-head-latent-attention",
    "routed-scaling-factor",
    "topk-group",
    "lora-fusion",
    "lora-ckpt-filter",
    "post-norm",
    "interleave-sliding-window",
    "input-embeds-norm",
)
_TRADED = "ulysses-degree-in-cp"  # over how many of the ranks heads are traded, with a ring over the rest
_CONTEXT = {"megatron_cp_algo": "p2p", "ulysses_cp_algo": "a2a"}
_BALANCES = {
    "pai_megatron_aux_loss": "aux_loss",
    "group_limited_greedy": "aux_loss",
    "noaux_tc": "none",
    "softmax_topk": "none",
}
# Older names of flags -> Megatron-LM's.
_RENAMED = {
    "moe-intermediate-size": "moe-ffn-hidden-size",
    "multi-head-latent-attention": "multi-latent-attention",
    "qk-nope-head-dim": "qk-head-dim",
    "qk-rope-head-dim": "qk-pos-emb-head-dim",
    "routed-scaling-factor": "moe-router-topk-scaling-factor",
}
_BY_GROUPS = ("group_limited_greedy", "none", "noaux_tc")  # ways to choose experts that look at groups of them
_SPEC = re.compile(
    r".*\.tasks\.models\.spec\.(bailing|deepseek|gemma2|grok|plm|qwen3)_spec"
)  # of layers that flags say, too
_STAGES = ("sft", "pt", "pretrain")
_BY_CHUNK = "num-layers-per-virtual-pipeline-stage"
_SHARED = "moe-shared-expert-intermediate-size"


def is_mindspeed(given: Mapping[str, Any]) -> bool:
    """True if flags are MindSpeed's, or name layers of its own."""
    return any(name in given for name in _OWN) or _has_own_layers(given)


def _has_own_layers(given: Mapping[str, Any]) -> bool:
    """True if `--spec` names layers of MindSpeed that other flags say, too."""
    spec = given.get("spec")
    return _SPEC.fullmatch(str(spec[0] if isinstance(spec, list) and spec else spec)) is not None


def as_megatron(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(flags under Megatron-LM's names, names as MindSpeed has them)."""
    flags = dict(given)
    spelled: dict[str, str] = {}
    for own_name, name in _RENAMED.items():
        if own_name in flags:
            flags.setdefault(name, flags.pop(own_name))
            spelled[name] = own_name
    for own, renamed in (_context(flags), _gemma(flags), _groups(flags), _experts(flags), _stages(flags)):
        for name in own:
            flags.pop(name, None)
        flags |= renamed
        spelled |= {name: own[0] for name in renamed if own}
    if "recompute-activation-function" in flags and not flags.keys() & {"recompute-granularity", "recompute-method"}:
        del flags["recompute-activation-function"]
        flags |= {"recompute-granularity": "selective", "recompute-modules": ["moe_act"]}  # of any MLP
    if "lora-target-modules" in flags:
        flags["mindspeed-lora"] = True
    if _has_own_layers(flags):
        del flags["spec"]
    if flags.get("stage") in _STAGES:  # data of chats or of texts
        del flags["stage"]
    return flags, {name: own for name, own in spelled.items() if own not in flags}


def _context(flags: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The method of context parallelism: names that it replaces, and flags in their place."""
    word = str(flags.get("context-parallel-algo"))
    ranks = str(flags.get("context-parallel-size", "1"))
    if ranks == "1":
        return ("context-parallel-algo", _TRADED), {}
    if word == "hybrid_cp_algo" and str(flags.get(_TRADED)) in ("1", ranks):  # a ring alone, or heads alone
        return ("context-parallel-algo", _TRADED), {"cp-comm-type": "p2p" if str(flags[_TRADED]) == "1" else "a2a"}
    return (("context-parallel-algo",), {"cp-comm-type": _CONTEXT[word]}) if word in _CONTEXT else ((), {})


def _experts(flags: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Layers with experts, the shared ones, how experts are chosen, and over which ranks they are spread."""
    layers, experts = _number(flags, "num-layers"), _number(flags, "num-experts")
    if not experts:
        return ("first-k-dense-replace", "n-shared-experts", "moe-layer-freq", "norm-topk-prob", "seq-aux"), {}
    renamed: dict[str, Any] = {}
    dense = max(0, _number(flags, "first-k-dense-replace", signed=True))
    every = max(1, abs(_number(flags, "moe-layer-freq", 1, signed=True)))
    is_said = "first-k-dense-replace" in flags or flags.get("moe-layer-freq") == "-1"
    if is_said and layers <= largest.LAYERS:
        kept = [layer for layer in range(layers) if layer not in _idle(flags)]
        routed = ("1" if layer >= dense and layer % every == 0 else "0" for layer in kept)
        renamed["moe-layer-freq"] = f"[{','.join(routed)}]"
    width = _number(flags, "moe-ffn-hidden-size") or _number(flags, "ffn-hidden-size")
    if "n-shared-experts" in flags and _SHARED not in flags:
        renamed[_SHARED] = str(_number(flags, "n-shared-experts") * width)
    balance = flags.get("moe-router-load-balancing-type")
    if balance is not None or "seq-aux" in flags:
        word = _BALANCES.get(str(balance or "aux_loss"), str(balance or "aux_loss"))
        renamed["moe-router-load-balancing-type"] = (
            "seq_aux_loss" if "seq-aux" in flags and word == "aux_loss" else word
        )
    if "moe-tp-extend-ep" in flags:
        tensor, spread = (_number(flags, f"{name}-model-parallel-size", 1) for name in ("tensor", "expert"))
        renamed |= {"expert-model-parallel-size": str(tensor * spread), "expert-tensor-parallel-size": "1"}
    replaced = ["first-k-dense-replace", "n-shared-experts", "norm-topk-prob", "seq-aux", "moe-tp-extend-ep"]
    if "shared-expert-gate" in flags:
        replaced.append("shared-expert-gate")
        renamed["moe-shared-expert-gate"] = True
    if "norm-topk-prob" in flags:  # a softmax over all whose chosen part adds up to 1 is one over the chosen
        replaced.append("moe-router-pre-softmax")
    return tuple(replaced), renamed


def _gemma(flags: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Windows in every other layer from the first on, the divisor of scores, and embeddings times the root of the
    width, as Gemma 2 has them."""
    renamed: dict[str, Any] = {}
    if window := _number(flags, "interleave-sliding-window"):
        renamed |= {"window-size": f"{window - 1},0", "window-attn-skip-freq": "2"}
    if divisor := _number(flags, "query-pre-attn-scalar"):
        renamed["softmax-scale"] = str(divisor**-0.5)
    if "input-embeds-norm" in flags:
        renamed["embedding-multiplier-scale"] = str(_number(flags, "hidden-size", 1) ** 0.5)
    return ("interleave-sliding-window", "query-pre-attn-scalar", "input-embeds-norm"), renamed


def _groups(flags: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The groups of experts of which a token takes some: as many as ranks of experts, if nothing says it."""
    names = ("n-group", "topk-group")
    if not any(name in flags for name in names):
        return (), {}
    if str(flags.get("moe-router-load-balancing-type", "aux_loss")) not in _BY_GROUPS or "topk-group" not in flags:
        return names, {}
    groups = _number(flags, "n-group") or _number(flags, "expert-model-parallel-size", 1)
    return names, {"moe-router-num-groups": str(groups), "moe-router-group-topk": flags["topk-group"]}


def _stages(flags: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The layers of each stage: a list of them, or layers that do nothing among stages of the same size."""
    layers, pipeline = _number(flags, "num-layers"), _number(flags, "pipeline-model-parallel-size", 1)
    stages = [whole(word) or 0 for word in str(flags.get("num-layer-list", "")).split(",") if word]
    replaced = ["num-layer-list"]
    if (idle := _idle(flags)) and not stages:
        size = _number(flags, _BY_CHUNK) or (layers // pipeline if pipeline and layers % pipeline == 0 else 0)
        if not size or layers % size or layers > largest.LAYERS:
            return (), {}
        counts = [size - sum(layer in idle for layer in range(begin, begin + size)) for begin in range(0, layers, size)]
        stages, replaced = counts, [*replaced, "noop-layers", _BY_CHUNK]
    if not stages or sum(stages) > largest.LAYERS:
        return (), {}
    layout = {LAYOUT: layout_text(stages, _number(flags, "mtp-num-layers"))} if pipeline > 1 else {}
    return tuple(replaced), {"num-layers": str(sum(stages))} | layout


def _idle(flags: Mapping[str, Any]) -> set[int]:
    """The layers that do nothing; empty if a word is no number."""
    numbers = [whole(word.strip()) for word in str(flags.get("noop-layers", "")).split(",")]
    return {number for number in numbers if number is not None} if None not in numbers else set()


def _number(flags: Mapping[str, Any], name: str, default: int = 0, signed: bool = False) -> int:
    """The whole number of a flag, or a default."""
    text = str(flags.get(name, default))
    number = whole(text.removeprefix("-")) if signed else whole(text)
    return default if number is None else -number if text.startswith("-") else number
