"""Hunyuan 1 (Tencent 2025): queries and keys have norms behind their positions."""

import math
from typing import Any

from shardwright.config.fault_gathering_reader import is_finite
from shardwright.config.hugging_face.config_reader import ConfigReader
from shardwright.config.hugging_face.decoder_fields import Fields, decoder
from shardwright.config.hugging_face.like_llama import head_width
from shardwright.config.hugging_face.rotary_fields import rotary
from shardwright.config.phrase import say

_LARGEST_LOGARITHM = 700.0  # of a float
# Keys of released files that say nothing of the decoder: ids, other inputs, and parts that are off.
_OTHERS = (
    "class_num",
    "cla_share_factor",
    "dense_list",
    "eod_token_id",
    "im_end_id",
    "im_newline_id",
    "im_start_id",
    "mask_init_id",
    "num_media_embeds",
    "org_vocab_size",
    "pool_type",
    "text_end_id",
    "text_start_id",
)


def hunyuan_dense(r: ConfigReader) -> Fields:
    """Hunyuan 0.5B to 7B: Llama with norms of heads."""
    r.must_be("mlp_bias", (False, None), say("the MLP has no biases"))
    return _decoder(r)


def hunyuan_moe(r: ConfigReader) -> Fields:
    """Hunyuan-A13B: experts, and a shared one of their width, in all layers."""
    r.must_be("mlp_bias", (False, None), say("the experts have no biases"))
    r.must_be("norm_topk_prob", (True, None), say("weights are divided by their sum"))
    r.must_be("use_mixed_mlp_moe", (True, None), say("there is a shared expert"))
    r.must_be("moe_layer_num_skipped", (0, None), say("all layers have experts"))
    r.ignore("moe_drop_tokens", "moe_random_routing_dropped_token", "capacity_factor", "moe_aux_loss")
    fields = _decoder(r)
    width = fields["ffn"]
    for name in ("moe_intermediate_size", "num_shared_expert"):
        usual = 1 if name == "num_shared_expert" else width
        if _same_in_all(r, name, usual) != usual:
            r.fault(
                say(
                    "{name} is not {usual}, and experts and the shared one are as wide as intermediate_size "
                    "{width}; set it so",
                    name=name,
                    usual=usual,
                    width=width,
                )
            )
    moe = {"experts": _same_in_all(r, "num_experts", 1), "top_k": _same_in_all(r, "moe_topk", 1), "ffn": width}
    return fields | {"moe": moe | {"shared_experts": 1}}


def _decoder(r: ConfigReader) -> Fields:
    for name in ("use_qk_norm", "use_rotary_pos_emb"):
        r.must_be(name, (True, None), say("queries and keys have norms, behind rotary positions"))
    for name in ("use_cla", "use_mla"):
        r.must_be(name, (False, None), say("each layer has keys and values of its own"))
    r.must_be("norm_type", ("rms", None), say("norms are RMSNorms"))
    r.ignore(*_OTHERS)
    fields = decoder(r) | {"qk_norm": "head-turned", "attention_bias": r.flag("attention_bias")}
    width = head_width(fields)
    r.must_be("attention_head_dim", (width, None), say("it is the width of a head"))
    _stretch_base(r, width)
    return fields | rotary(r, width)


def _stretch_base(r: ConfigReader, width: int) -> None:
    """Replace rotary positions with a fixed `alpha` by those with a larger base: base x alpha^(D / (D - 2)) for heads
    of width D. Released files call them dynamic."""
    for name in ("rope_parameters", "rope_scaling"):
        section = r.given.get(name)
        if not isinstance(section, dict) or "dynamic" not in (section.get("rope_type"), section.get("type")):
            continue
        alpha: Any = section.get("alpha")
        base: Any = section.get("rope_theta", r.number("rope_theta", 10000.0))
        if width > 2 and all(is_finite(value) and value > 0 for value in (alpha, base)):
            logarithm = math.log(base) + math.log(alpha) * width / (width - 2)
            if logarithm < _LARGEST_LOGARITHM:
                stretched: dict[str, Any] = {"rope_type": "default", "rope_theta": math.exp(logarithm)}
                r.given = r.given | {name: stretched}


def _same_in_all(r: ConfigReader, name: str, usual: int) -> int:
    """A number of all layers: one, or a list of the same for each."""
    if not isinstance(r.given.get(name), list):
        return r.count(name, usual)
    numbers = r.counts(name) or [usual]
    if len(set(numbers)) > 1:
        r.fault(say("{name} differs from layer to layer; set it to one number", name=name))
    return max(0, numbers[0])
