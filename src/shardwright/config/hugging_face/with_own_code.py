"""Families whose released folders bring their own code, because transformers has no class for them.

Each function takes the keys of one family and gives fields of [model]. A key is read as the
released code reads it.
"""

import math

from shardwright.config.hugging_face.config_reader import ConfigReader
from shardwright.config.hugging_face.decoder_fields import ACTIVATIONS, Fields, decoder
from shardwright.config.hugging_face.like_llama import head_width, qwen2
from shardwright.config.hugging_face.rotary_fields import rotary
from shardwright.config.hugging_face.with_experts import routed_experts
from shardwright.config.phrase import say

_BAICHUAN2_VOCAB = 125696


def internlm(r: ConfigReader) -> Fields:
    """InternLM (2023): Llama whose attention has biases."""
    return _like_llama(r) | {"attention_bias": r.flag("bias")}


def internlm2(r: ConfigReader) -> Fields:
    """InternLM 2 and 2.5 (Cai et al. 2024, arXiv 2403.17297): Llama with query, key and value in one matrix."""
    r.must_be("bias", (False,), say("the MLP has no biases"))
    return _like_llama(r)


def baichuan(r: ConfigReader) -> Fields:
    """Baichuan 7B, and 13B, which has ALiBi (Baichuan 2023). Files of the latter do not say max_position_embeddings."""
    if r.count("vocab_size") == _BAICHUAN2_VOCAB:
        r.fault(
            say(
                "vocab_size is {vocab}: Baichuan 2 normalises the rows of its head, which can't be expressed; use a "
                "model of another family",
                vocab=_BAICHUAN2_VOCAB,
            )
        )
    length = r.count("model_max_length", 4096)
    if r.has("max_position_embeddings"):
        return _like_llama(r)
    return decoder(r) | {"positions": "alibi", "sequence": length}


def chatglm(r: ConfigReader) -> Fields:
    """ChatGLM 2 and 3, GLM-4 of 2024 (arXiv 2406.12793): grouped queries, half of each head rotary."""
    for name, needed, reason in (
        ("rmsnorm", True, say("norms are RMSNorms")),
        ("post_layer_norm", True, say("there is a norm before the head")),
        ("original_rope", True, say("half of each head is rotary")),
        ("add_bias_linear", False, say("the MLP has no biases")),
        ("apply_residual_connection_post_layernorm", False, say("the residual stream passes by the norms")),
        ("position_encoding_2d", False, say("ChatGLM of 2022 has two positions of a token")),
    ):
        r.must_be(name, (needed, None), reason, needed)
    r.must_be("pre_seq_len", (None,), say("prefixes of prompts are not trained"))
    r.ignore(
        "apply_query_key_layer_scaling",
        "fp32_residual_connection",
        "quantization_bit",
        "vocab_size",
        "bias_dropout_fusion",
        "prefix_projection",
    )
    r.must_be("num_hidden_layers", (r.count("num_layers"), None), say("num_layers says how many there are"))
    heads, width = r.count("num_attention_heads"), r.count("kv_channels")
    groups = r.count("multi_query_group_num") if r.flag("multi_query_attention") else heads
    return {
        "layers": r.count("num_layers"),
        "hidden": r.count("hidden_size"),
        "heads": heads,
        "kv_heads": groups,
        "head_dim": width,
        "rotary_dim": width // 2,
        "rotary_base": 10000.0 * r.number("rope_ratio", 1.0),
        "ffn": r.count("ffn_hidden_size"),
        "vocab": r.count("padded_vocab_size"),
        "sequence": r.count("seq_length"),
        "norm_epsilon": r.number("layernorm_epsilon"),
        "qkv_bias": r.flag("add_qkv_bias"),
        "dropout": r.number("hidden_dropout"),
        "tied_embeddings": r.flag("tie_word_embeddings"),
    }


def deepseek(r: ConfigReader) -> Fields:
    """DeepSeek-MoE 16B (Dai et al. 2024, arXiv 2401.06066): experts of DeepSeek-V2 behind Llama's attention."""
    r.must_be("scoring_func", ("softmax", None), say("experts are chosen by a softmax"))
    r.must_be("attention_bias", (False,), say("the experts have no biases"))
    return _like_llama(r) | {"moe": routed_experts(r) | {"normalise": r.flag("norm_topk_prob")}}


def qwen(r: ConfigReader) -> Fields:
    """Qwen of 2023 (Bai et al. 2023, arXiv 2309.16609): Qwen 1.5 under other names. Its way with sequences longer
    than those of training is not read."""
    for name, needed, reason in (
        ("no_bias", True, say("only query, key and value have biases")),
        ("rotary_pct", 1.0, say("whole heads are rotary")),
        ("scale_attn_weights", True, say("scores are divided by the root of a head's width")),
    ):
        r.must_be(name, (needed, None), reason)
    r.must_be("emb_dropout_prob", (0, 0.0, None), say("embeddings are not dropped"))
    r.ignore("use_dynamic_ntk", "use_logn_attn", "attn_dropout_prob", "max_position_embeddings")
    return {
        "layers": r.count("num_hidden_layers"),
        "hidden": r.count("hidden_size"),
        "heads": r.count("num_attention_heads"),
        "head_dim": r.count("kv_channels"),
        "ffn": r.count("intermediate_size") // 2,
        "vocab": r.count("vocab_size"),
        "sequence": r.count("seq_length"),
        "qkv_bias": True,
        "norm_epsilon": r.number("layer_norm_epsilon"),
        "rotary_base": r.number("rotary_emb_base"),
        "init_std": r.number("initializer_range", 0.02),
        "tied_embeddings": r.flag("tie_word_embeddings"),
    }


def minicpm(r: ConfigReader) -> Fields:
    """MiniCPM 1 and 2 (Hu et al. 2024, arXiv 2404.06395): embeddings, what joins the residual stream and logits are
    scaled."""
    r.must_be("num_experts", (0, None), say("the MLP has no experts"))
    r.ignore("mup_denominator")
    fields = _like_llama(r)
    return fields | {
        "embedding_scale": r.number("scale_emb"),
        "residual_scale": r.number("scale_depth") / math.sqrt(max(1, fields["layers"])),
        "logit_scale": r.divisor("dim_model_base", 1.0) / max(1, fields["hidden"]),
    }


def orion(r: ConfigReader) -> Fields:
    """Orion 14B (Chen et al. 2024, arXiv 2401.12246): Llama with LayerNorms."""
    return _like_llama(r) | {"norm": "layernorm"}


def exaone(r: ConfigReader) -> Fields:
    """EXAONE 3 and 3.5 (LG AI 2024, arXiv 2408.03541): Llama under other names."""
    r.must_be("embed_dropout", (0, 0.0), say("embeddings are not dropped"))
    heads = r.count("num_attention_heads")
    fields = {
        "layers": r.count("num_layers"),
        "hidden": r.count("hidden_size"),
        "heads": heads,
        "kv_heads": r.optional_count("num_key_value_heads") or heads,
        "ffn": r.count("intermediate_size"),
        "vocab": r.count("vocab_size"),
        "sequence": r.count("max_position_embeddings"),
        "activation": r.word_of("activation_function", ACTIVATIONS, "silu"),
        "norm_epsilon": r.number("layer_norm_epsilon"),
        "init_std": r.number("initializer_range", 0.02),
        "tied_embeddings": r.flag("tie_word_embeddings"),
    }
    if width := r.optional_count("head_dim"):
        fields["head_dim"] = width
    return fields | rotary(r, head_width(fields))


def mimo(r: ConfigReader) -> Fields:
    """MiMo 7B (Xiaomi 2025, arXiv 2505.07608): Qwen 2 with modules of multi-token prediction."""
    r.must_be("attention_bias", (True,), say("query, key and value have biases"))
    r.must_be("use_mrope", (False,), say("positions are those of text"))
    return qwen2(r) | {"mtp_layers": r.count("num_nextn_predict_layers")}


def _like_llama(r: ConfigReader) -> Fields:
    fields = decoder(r)
    return fields | rotary(r, head_width(fields))
