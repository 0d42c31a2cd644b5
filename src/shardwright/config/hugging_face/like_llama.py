"""Families whose decoder is Llama's with a few differences: one MLP in every layer, RMSNorm, rotary positions.

Each function takes the keys of one family and gives fields of [model]. Features of a single family are only in its own
function.
"""

import math
import operator
from collections.abc import Callable

from shardwright.config import largest
from shardwright.config.attention_sections import WindowSpec
from shardwright.config.base import shortened
from shardwright.config.hugging_face.config_reader import ConfigReader
from shardwright.config.hugging_face.decoder_fields import Fields, decoder, linear_biases
from shardwright.config.hugging_face.layer_kinds import window, window_in_all, without_positions
from shardwright.config.hugging_face.rotary_fields import local_rotary, rotary
from shardwright.config.phrase import say

_LONGEST = "max_position_embeddings"


def head_width(fields: Fields) -> int:
    """Width of a head: as the configuration says, or else hidden / heads."""
    return int(fields.get("head_dim") or fields["hidden"] // max(1, fields["heads"]))


def llama(r: ConfigReader) -> Fields:
    """Llama 1 to 3 (Touvron et al. 2023, arXiv 2302.13971; Dubey et al. 2024, arXiv 2407.21783), Yi, SmolLM 1 and 2."""
    fields = decoder(r) | linear_biases(r)
    return fields | rotary(r, head_width(fields))


def mistral(r: ConfigReader) -> Fields:
    """Mistral (Jiang et al. 2023, arXiv 2310.06825): the first releases have windows in all layers."""
    fields = decoder(r)
    windows = window_in_all(r, r.optional_count("sliding_window"), fields["layers"])
    return fields | rotary(r, head_width(fields)) | windows


def ministral(r: ConfigReader) -> Fields:
    """Ministral 8B (Mistral AI 2024): Mistral, some of whose layers attend to all tokens."""
    fields = decoder(r)
    return fields | rotary(r, head_width(fields)) | window(r, r.optional_count("sliding_window"), fields["layers"])


def cwm(r: ConfigReader) -> Fields:
    """Code World Model (Meta 2025, arXiv 2510.02387): Llama 3 with windows in three of four layers."""
    fields = decoder(r) | {"mlp_bias": r.flag("mlp_bias")}
    windows = window(r, r.optional_count("sliding_window"), fields["layers"], lambda layer: layer % 4 == 0)
    return fields | rotary(r, head_width(fields)) | windows


def ministral3(r: ConfigReader) -> Fields:
    """Ministral 3 (Mistral AI 2025): queries grow with their position, once for each original_max_position_embeddings
    tokens."""
    name = "rope_parameters" if r.has("rope_parameters") else "rope_scaling"
    section = ConfigReader(r.section(name) or r.section("rope_parameters"), {})
    scale, floor = section.number("llama_4_scaling_beta"), section.count("original_max_position_embeddings")
    r.faults += section.faults
    # The longest sequence stands in the section once more.
    inner = {key: value for key, value in section.given.items() if key not in ("llama_4_scaling_beta", _LONGEST)}
    r.given = r.given | {name: inner}
    fields = mistral(r)
    if scale:
        grown = {"scale": scale, "floor": max(1, floor), "in_all_layers": True, "first_position": 0}
        fields["temperature_tuning"] = grown
    return fields


def smollm3(r: ConfigReader) -> Fields:
    """SmolLM3: every fourth layer has no positions."""
    fields = decoder(r) | linear_biases(r)
    r.must_be("use_sliding_window", (False,), say("layers without positions would have windows"))
    r.ignore("sliding_window", "layer_types", "max_window_layers")
    return fields | rotary(r, head_width(fields)) | without_positions(r, fields["layers"])


def qwen2(r: ConfigReader) -> Fields:
    """Qwen 1.5, 2 and 2.5 (Yang et al. 2024, arXiv 2407.10671): only query, key and value have biases."""
    fields = decoder(r) | {"qkv_bias": True}
    return fields | rotary(r, head_width(fields)) | qwen_windows(r, fields["layers"])


def qwen3(r: ConfigReader) -> Fields:
    """Qwen 3 (Yang et al. 2025, arXiv 2505.09388): a norm of each head's query and key in place of biases."""
    fields = decoder(r) | {"qk_norm": "head", "bias": False}
    r.must_be("attention_bias", (False,), say("the MLP has no biases"))
    return fields | rotary(r, head_width(fields)) | qwen_windows(r, fields["layers"])


def qwen_windows(r: ConfigReader, layers: int, is_full: Callable[[int, int], bool] = operator.lt) -> Fields:
    """The windows of Qwen's layers if use_sliding_window is true: in all layers except those for which
    `is_full(layer, max_window_layers)` is true."""
    first = r.count("max_window_layers")
    if not r.flag("use_sliding_window"):
        r.ignore("sliding_window", "layer_types")
        return {}
    return window(r, r.count("sliding_window"), layers, lambda layer: is_full(layer, first))


_TANH_FORMS = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")


def gemma(r: ConfigReader) -> Fields:
    """Gemma (Mesnard et al. 2024, arXiv 2403.08295): embeddings times the square root of their width, wide heads."""
    fields = decoder(r) | {"activation": "gelu-tanh", "embedding_scale": math.sqrt(r.count("hidden_size"))}
    # The first releases have hidden_act "gelu", which has always been computed in its tanh form.
    for name, further in (("hidden_act", ("gelu", None)), ("hidden_activation", (None,))):
        r.must_be(name, (*_TANH_FORMS, *further), say("Gemma has the tanh form of GELU"))
    r.must_be("use_bidirectional_attention", (None, False), say("tokens would see later ones"))
    r.must_be("attention_bias", (False,), say("the MLP has no biases"))
    return fields | rotary(r, head_width(fields))


def gemma2(r: ConfigReader, usual_pattern: int = 2) -> Fields:
    """Gemma 2 (Riviere et al. 2024, arXiv 2408.00118): norms on both sides, soft caps, windows in every other layer."""
    fields = gemma(r) | {
        "norm_place": "around",
        "attention_scale": r.divisor("query_pre_attn_scalar", 256.0) ** -0.5,
    }
    for key, field in (("attn_logit_softcapping", "attention_softcap"), ("final_logit_softcapping", "logit_softcap")):
        fields[field] = r.optional_number(key)
    layers = fields["layers"]
    every = max(1, r.count("sliding_window_pattern", usual_pattern))
    r.ignore("_sliding_window_pattern", "cache_implementation")
    return fields | window(r, r.count("sliding_window"), layers, lambda layer: (layer + 1) % every == 0)


def gemma3(r: ConfigReader) -> Fields:
    """Gemma 3 (Kamath et al. 2025, arXiv 2503.19786): norms of heads, five layers with windows to one without."""
    fields = gemma2(r, usual_pattern=6) | {"qk_norm": "head"}
    return with_local_rotary(r, fields, r.number("rope_local_base_freq", 10000.0))


def vaultgemma(r: ConfigReader) -> Fields:
    """VaultGemma (Sinha et al. 2025, arXiv 2510.15001): Gemma 2 with norms before attention and MLP alone."""
    return gemma2(r) | {"norm_place": "before"}


def phi3(r: ConfigReader) -> Fields:
    """Phi 3 and 4 (Abdin et al. 2024, arXiv 2404.14219)."""
    fields = decoder(r) | {"dropout": r.number("resid_pdrop")}
    r.must_be(
        "embd_pdrop", (fields["dropout"],), say("embeddings are dropped as often as what joins the residual stream")
    )
    fields |= window_in_all(r, r.optional_count("sliding_window"), fields["layers"])
    return fields | rotary(r, head_width(fields), in_part=True)


def olmo(r: ConfigReader) -> Fields:
    """OLMo (Groeneveld et al. 2024, arXiv 2402.00838): LayerNorm without weights; queries, keys and values clipped."""
    r.must_be("attention_bias", (False,), say("the MLP has no biases"))
    fields = decoder(r) | {"norm": "layernorm", "norm_weight": False, "norm_epsilon": 1e-5}
    fields["clip_qkv"] = r.optional_number("clip_qkv")
    return fields | rotary(r, head_width(fields))


def olmo2(r: ConfigReader) -> Fields:
    """OLMo 2 (Walsh et al. 2025, arXiv 2501.00656): norms of the outputs of attention and MLP, and of queries and keys
    over all heads."""
    r.must_be("attention_bias", (False,), say("the MLP has no biases"))
    fields = decoder(r) | {"norm_place": "after", "qk_norm": "full"}
    return fields | rotary(r, head_width(fields))


def olmo3(r: ConfigReader) -> Fields:
    """OLMo 3: OLMo 2 with windows in three of four layers; the positions of these layers are not scaled."""
    fields, layers = olmo2(r), r.count("num_hidden_layers")
    fields |= window(r, r.count("sliding_window"), layers, lambda layer: (layer + 1) % 4 == 0)
    return with_local_rotary(r, fields, fields["rotary_base"])


def with_local_rotary(r: ConfigReader, fields: Fields, usual_base: float) -> Fields:
    """The fields, with the rotary positions of layers with windows, which are not scaled."""
    local = local_rotary(r, head_width(fields))
    if "rotary_scaling" in local:
        kind = local["rotary_scaling"]["kind"]
        r.fault(
            say(
                "rope_parameters: sliding_attention has positions that are stretched (rope_type {kind}), and in layers "
                'with windows they can only be as in all others or not stretched; its rope_type should be "default"',
                kind=kind,
            )
        )
    if "window" not in fields:
        return fields
    base = local.get("rotary_base", usual_base)
    return fields | {"window": fields["window"] | {"rotary_base": base, "rotary_scaled": False}}


def internlm3(r: ConfigReader) -> Fields:
    """InternLM 3 (2025): Llama; its biases have other names."""
    r.must_be("qkv_bias", (False, None), say("linear layers have no biases"))
    r.must_be("bias", (False, None), say("linear layers have no biases"))
    return llama(r)


def arcee(r: ConfigReader) -> Fields:
    """Arcee's AFM-4.5B (2025): Llama with an MLP of one matrix in, and relu^2."""
    return llama(r) | {"gated_mlp": False}


def helium(r: ConfigReader) -> Fields:
    """Helium 1 (Kyutai 2025): Llama whose attention and MLP have no biases."""
    r.must_be("attention_bias", (False,), say("the MLP has no biases"))
    r.must_be("mlp_bias", (False,), say("attention has no biases"))
    fields = decoder(r)
    if fields["heads"] * head_width(fields) != fields["hidden"]:
        r.fault(
            say(
                "num_attention_heads {heads} x head_dim {width} = {joined}, and should be hidden_size {hidden}: the "
                "last matrix of attention is square in this family; set head_dim so, or leave it out",
                heads=fields["heads"],
                width=head_width(fields),
                joined=fields["heads"] * head_width(fields),
                hidden=fields["hidden"],
            )
        )
    return fields | rotary(r, head_width(fields))


def ernie(r: ConfigReader) -> Fields:
    """ERNIE 4.5 without experts (Baidu 2025)."""
    fields = decoder(r) | {"bias": r.flag("use_bias")}
    return fields | rotary(r, head_width(fields))


def seed_oss(r: ConfigReader) -> Fields:
    """Seed-OSS (ByteDance 2025): only query, key and value have biases."""
    r.must_be("attention_out_bias", (False,), say("only query, key and value have biases"))
    r.must_be("mlp_bias", (False,), say("only query, key and value have biases"))
    fields = decoder(r) | {"qkv_bias": r.flag("attention_bias"), "dropout": r.number("residual_dropout")}
    return fields | rotary(r, head_width(fields))


def exaone4(r: ConfigReader) -> Fields:
    """EXAONE 4 (LG AI 2025, arXiv 2507.11407): norms of heads and of what attention and MLP give."""
    return exaone4_windows(r) | {"norm_place": "after", "qk_norm": "head"}


def exaone4_windows(r: ConfigReader) -> Fields:
    """A decoder in which, where some layers have windows, layers without one have no positions."""
    fields = decoder(r)
    fields |= rotary(r, head_width(fields))
    size, pattern = r.optional_count("sliding_window"), r.raw("sliding_window_pattern")
    every = len(pattern) if isinstance(pattern, str) else r.count("sliding_window_pattern", 4)
    r.ignore("sliding_window_pattern", "layer_types")
    if isinstance(pattern, str) and pattern != "L" * (every - 1) + "G":
        r.fault(
            say(
                "sliding_window_pattern is {pattern}, and only layers with windows before one that sees all can be "
                'expressed; set it to one like "LLLG"',
                pattern=repr(shortened(pattern)),
            )
        )
    if not size:
        return fields
    return fields | windows_without_positions(r, fields["layers"], size, every)


def windows_without_positions(r: ConfigReader, layers: int, size: int, every: int) -> Fields:
    """Windows of `size` tokens; the last of `every` layers, or as layer_types says, sees all and has no positions."""
    windows = window(r, size, layers, lambda layer: every > 0 and (layer + 1) % every == 0)
    rule = windows.get("window", {})
    if "first_full" in rule or ("window" not in windows and size):
        r.fault(
            say(
                "layers that see all tokens have no positions, and they can only be the last of every so many layers; "
                "set layer_types so"
            )
        )
    return windows | ({"no_rotary_every": rule["full_every"]} if "full_every" in rule else {})


def glm(r: ConfigReader) -> Fields:
    """GLM-4 of 2024 (arXiv 2406.12793): half of each head is rotary; query, key and value have biases."""
    fields = decoder(r) | {"qkv_bias": r.flag("attention_bias", True)}
    return fields | rotary(r, head_width(fields), in_part=True)


def glm4(r: ConfigReader) -> Fields:
    """GLM-4 of April 2025: also norms on both sides of attention and MLP."""
    return glm(r) | {"norm_place": "around"}


def granite(r: ConfigReader) -> Fields:
    """Granite 3 and 4 without state spaces: additions to the residual stream, embeddings and logits are scaled."""
    fields = decoder(r) | linear_biases(r) | granite_scales(r)
    return fields | rotary(r, head_width(fields))


def granite_swa(r: ConfigReader) -> Fields:
    """Granite with windows in three of four layers, and sinks (IBM 2026)."""
    return with_granite_windows(r, granite(r))


def with_granite_windows(r: ConfigReader, fields: Fields) -> Fields:
    """The fields of a Granite, with its sinks and windows, and the rotary base of each kind of layers."""
    layers = fields["layers"]
    fields |= {"sinks": True} | window(r, r.optional_count("sliding_window"), layers, lambda layer: layer % 4 == 0)
    bases = r.numbers("layer_rope_theta")
    if bases is None or layers > largest.LAYERS:
        return fields
    windowed = WindowSpec.model_construct(**fields.get("window", {}))
    kinds = [windowed.is_in(layer) for layer in range(layers)]
    by_kind = {kind: {base for base, other in zip(bases, kinds, strict=False) if other == kind} for kind in kinds}
    if len(bases) != layers or any(len(bases_of) > 1 or bases_of == {0.0} for bases_of in by_kind.values()):
        r.fault(
            say(
                "layer_rope_theta has {bases}, and layers of a kind can only have one base, which is not 0; set it so",
                bases=shortened(str(bases)),
            )
        )
        return fields
    (full,) = by_kind.get(False) or by_kind[True]
    (local,) = by_kind.get(True) or {full}
    if local != full:
        fields["window"]["rotary_base"] = local
    return fields | {"rotary_base": full}


def hyperclovax(r: ConfigReader) -> Fields:
    """HyperCLOVA X SEED (Naver 2025): Granite 3 with norms on both sides of attention and MLP, whose logits are
    multiplied where Granite's are divided."""
    fields = decoder(r) | linear_biases(r) | granite_scales(r)
    width = head_width(fields)
    fields |= {
        "logit_scale": r.number("logits_scaling", 1.0),
        "attention_scale": r.number("attention_multiplier", max(1, width) ** -0.5),
    }
    if r.flag("use_post_norm", True):
        fields["norm_place"] = "around"
    return fields | rotary(r, width)


_MAMBA_KEYS = ("n_heads", "n_groups", "d_state", "d_head", "d_conv", "expand", "chunk_size", "conv_bias", "proj_bias")


def granite_hybrid(r: ConfigReader) -> Fields:
    """Granite 4 whose layers are all attention: Granite 3, with its MLP under the name of shared experts."""
    kinds = r.words("layer_types") or r.words("layers_block_type") or ["mamba"]
    if others := sorted(set(kinds) - {"attention", "full_attention"}):
        r.fault(
            say("layer_types has {kind}, and only attention can be expressed; use another model", kind=repr(others[0]))
        )
    r.must_be("position_embedding_type", ("rope",), say("positions are rotary"))
    r.must_be("num_local_experts", (0,), say("the MLP has no experts"))
    r.must_be("attention_bias", (False,), say("the MLP has no biases"))
    r.must_be("normalization_function", ("rmsnorm", None), say("norms are RMSNorms"))
    r.ignore("init_method", "num_experts_per_tok", "time_step_limit", *(f"mamba_{name}" for name in _MAMBA_KEYS))
    fields = decoder(r) | granite_scales(r) | {"ffn": r.count("shared_intermediate_size")}
    return fields | rotary(r, head_width(fields))


def granite_scales(r: ConfigReader) -> Fields:
    """The four scale factors of Granite."""
    return {
        "embedding_scale": r.number("embedding_multiplier", 1.0),
        "residual_scale": r.number("residual_multiplier", 1.0),
        "attention_scale": r.number("attention_multiplier", 1.0),
        "logit_scale": 1.0 / r.divisor("logits_scaling", 1.0),
    }
