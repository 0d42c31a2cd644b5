"""Multi-head latent attention by DeepSeek's keys, and families that have it with one MLP in every layer."""

import math

from shardwright.config.hugging_face.config_reader import ConfigReader
from shardwright.config.hugging_face.decoder_fields import Fields, decoder
from shardwright.config.hugging_face.rotary_fields import rotary
from shardwright.config.phrase import say

_LATENT_EPSILON = 1e-6  # of the norms of latents, whatever rms_norm_eps is


def latent_attention(r: ConfigReader) -> Fields:
    """Multi-head latent attention, with rotary positions on a part of each head."""
    fields = decoder(r)
    r.must_be("attention_bias", (False,), say("latents have no biases"))
    r.must_be("rope_interleave", (True, None), say("pairs that turn are neighbours"))
    rope_dim, nope_dim = r.count("qk_rope_head_dim"), r.count("qk_nope_head_dim")
    r.must_be(
        "head_dim", (rope_dim, rope_dim + nope_dim, None), say("positions turn qk_rope_head_dim elements of a head")
    )
    r.ignore("qk_head_dim", "mlp_bias")
    fields = {name: value for name, value in fields.items() if name not in ("head_dim", "kv_heads")}
    fields["latent"] = {
        "kv_rank": r.count("kv_lora_rank"),
        "q_rank": r.optional_count("q_lora_rank"),
        "nope_dim": nope_dim,
        "rope_dim": rope_dim,
        "value_dim": r.count("v_head_dim"),
    }
    if fields["norm_epsilon"] != _LATENT_EPSILON:
        fields["latent"]["norm_epsilon"] = _LATENT_EPSILON
    rotary_fields = rotary(r, rope_dim, scales_scores=True)
    rotary_fields.pop("rotary_dim", None)
    return fields | rotary_fields


def youtu(r: ConfigReader) -> Fields:
    """Youtu-LLM (Tencent 2026): DeepSeek-V3 without experts."""
    r.ignore("embedding_initializer_range")
    usual_std = 2.0 / math.sqrt(5.0 * max(1, r.count("hidden_size")))
    return latent_attention(r) | {"init_std": r.number("initializer_range", usual_std)}
