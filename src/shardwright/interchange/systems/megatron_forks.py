"""Forks of Megatron-LM: settings that have other names or defaults there, under Megatron-LM's own.

Megatron-DeepSpeed, by the defaults of its options: experts stand in every second layer, a token has one of them, whose
weight is its probability among all, and experts may be over their capacity in training only. MindSpeed-LLM and names of
other forks are in files of their own.
"""

from collections.abc import Mapping
from typing import Any

from shardwright.interchange.rows import Table, flag, never, number
from shardwright.interchange.systems.megatron_older import with_own_names
from shardwright.interchange.systems.mindspeed import as_megatron, is_mindspeed

# Names of Megatron-DeepSpeed -> Megatron-LM's.
_OF_DEEPSPEED = {
    "moe-expert-parallel-size": "expert-model-parallel-size",
    "moe-train-capacity-factor": "moe-expert-capacity-factor",
    "moe-loss-coeff": "moe-aux-loss-coeff",
    "rotary-position-embeddings-theta": "rotary-base",
}
_DEFAULTS_OF_EXPERTS = {"topk": 1, "expert-interval": 2, "moe-expert-capacity-factor": 1.0, "moe-aux-loss-coeff": 0.1}


def with_defaults_of_fork(given: Mapping[str, Any], launcher: str) -> tuple[dict[str, Any], dict[str, str]]:
    """(settings under Megatron-LM's names, with the defaults of the fork that has them; names as the fork has them).
    `launcher` starts the command."""
    given, renamed = with_own_names(given)
    is_deepspeed = launcher == "deepspeed" or any(name.startswith(("deepspeed", "zero-stage")) for name in given)
    if not is_deepspeed:
        flags, spelled = as_megatron(given) if is_mindspeed(given) else (dict(given), {})
        return flags, renamed | spelled
    settings = {_OF_DEEPSPEED.get(name, name): value for name, value in given.items()}
    spelled = {own: name for name, own in _OF_DEEPSPEED.items() if name in given}
    experts = given.get("num-experts", 1)
    if experts not in ("1", ["1"], 1, True):
        settings = _DEFAULTS_OF_EXPERTS | settings
        if str(settings["topk"]) == "1":
            settings["moe-router-pre-softmax"] = True
        if given.get("disable-moe-token-dropping"):
            del settings["moe-expert-capacity-factor"], settings["disable-moe-token-dropping"]
    return settings, renamed | spelled


# Rows of flags that Megatron-LM lacks: norms around, scales and caps of MindSpeed-LLM, for Grok and Gemma 2.
OF_FORKS: Table = (
    flag("post-norm", "model.norm_place", present="around", absent="before").under(None, never),
    number("softmax-scale", "model.attention_scale", 0.0).under(None, never),
    number("embedding-multiplier-scale", "model.embedding_scale", 1.0).under(None, never),
    number("output-multiplier-scale", "model.logit_scale", 1.0).under(None, never),
    number("output-logit-softcapping", "model.logit_softcap", 0.0).under(None, never),
    number("attn-logit-softcapping", "model.attention_softcap", 0.0).under(None, never),
)
