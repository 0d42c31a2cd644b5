"""Later families with LayerNorm. Each function takes the keys of one family and gives fields of [model]."""

from shardwright.config.hugging_face.config_reader import ConfigReader
from shardwright.config.hugging_face.decoder_fields import ACTIVATIONS, Fields, linear_biases, shape
from shardwright.config.hugging_face.like_llama import head_width, windows_without_positions
from shardwright.config.hugging_face.rotary_fields import rotary
from shardwright.config.phrase import say

_SIDE_BY_SIDE = {"norm": "layernorm", "gated_mlp": False, "parallel_block": "one-norm", "head_bias": True}


def stablelm(r: ConfigReader) -> Fields:
    """StableLM 3B, 2 1.6B and Zephyr (Bellagente et al. 2024, arXiv 2402.17834): a quarter of each head is rotary."""
    r.must_be("qk_layernorm", (False,), say("norms of heads with weights of their own can't be expressed"), False)
    fields = _gated(r, "layer_norm_eps") | {"qkv_bias": r.flag("use_qkv_bias"), "dropout": r.number("hidden_dropout")}
    if r.flag("use_parallel_residual"):
        fields["parallel_block"] = "one-norm"
    return fields | rotary(r, head_width(fields), share=r.named("partial_rotary_factor", "rope_pct"), in_part=True)


def gptj(r: ConfigReader) -> Fields:
    """GPT-J (Wang and Komatsuzaki 2021): attention and MLP side by side behind one norm; the MLP and logits have
    biases."""
    r.must_be("rotary", (True, None), say("positions are rotary"))
    r.must_be("scale_attn_weights", (True, None), say("scores are divided by the root of a head's width"))
    hidden, heads, dropout = r.count("n_embd"), r.count("n_head"), r.number("resid_pdrop")
    r.must_be("embd_pdrop", (dropout,), say("embeddings are dropped as often as what joins the residual stream"))
    turned = r.count("rotary_dim")
    return _SIDE_BY_SIDE | {
        "layers": r.count("n_layer"),
        "hidden": hidden,
        "heads": heads,
        "ffn": r.optional_count("n_inner") or 4 * hidden,
        "vocab": r.count("vocab_size"),
        "sequence": r.count("n_positions"),
        "dropout": dropout,
        "mlp_bias": True,
        "activation": r.word_of("activation_function", ACTIVATIONS, "gelu_new"),
        "norm_epsilon": r.number("layer_norm_epsilon", 1e-5),
        "init_std": r.number("initializer_range", 0.02),
        "tied_embeddings": r.flag("tie_word_embeddings"),
        "rotary_dim": 0 if turned == hidden // max(1, heads) else turned,
    }


def phi(r: ConfigReader) -> Fields:
    """Phi 1, 1.5 and 2 (Li et al. 2023, arXiv 2309.05463): GPT-J with biases everywhere. Of its two probabilities of
    dropout that of embeddings is taken."""
    r.must_be("qk_layernorm", (False,), say("queries and keys have no norms"), False)
    fields = _gated(r, "layer_norm_eps") | _SIDE_BY_SIDE | {"bias": True, "dropout": r.number("embd_pdrop")}
    if r.given.get("resid_pdrop") in (None, fields["dropout"]):
        r.ignore("resid_pdrop")
    return fields | rotary(r, head_width(fields), in_part=True)


def nemotron(r: ConfigReader) -> Fields:
    """Nemotron 3 and 4, Minitron (Parmar et al. 2024, arXiv 2402.16819): relu^2, half of each head is rotary."""
    fields = _gated(r, r.named("norm_eps", "layer_norm_eps")) | {"gated_mlp": False}
    r.must_be("attention_bias", (False,), say("linear layers have no biases"))
    r.must_be("mlp_bias", (False,), say("linear layers have no biases"))
    share = r.named("partial_rotary_factor", "rotary_percent", "rope_percent")
    return fields | rotary(r, head_width(fields), share=share, in_part=True)


def jais2(r: ConfigReader) -> Fields:
    """Jais 2 (Inception and MBZUAI 2025): Llama with LayerNorms, biases, and an MLP of one matrix in."""
    fields = _gated(r, "layer_norm_eps") | linear_biases(r) | {"gated_mlp": False}
    return fields | rotary(r, head_width(fields))


def cohere(r: ConfigReader) -> Fields:
    """Command R (Cohere 2024): norms without biases, attention and MLP side by side behind one, logits scaled."""
    r.must_be("use_qk_norm", (False, None), say("norms of heads with weights of their own can't be expressed"))
    fields = _command(r)
    return fields | rotary(r, head_width(fields))


def cohere2(r: ConfigReader) -> Fields:
    """Command R7B and A (Cohere 2025, arXiv 2504.00698): windows in three of four layers, the fourth sees all and has
    no positions."""
    fields = _command(r)
    r.must_be("use_qk_norm", (False, None), say("queries and keys have no norms"))
    r.must_be("use_parallel_block", (True, None), say("attention and MLP are side by side"))
    r.must_be("use_embedding_sharing", (True, None), say("the head is the table of embeddings"))
    r.must_be("use_gated_activation", (True, None), say("the MLP is gated"))
    r.must_be("position_embedding_type", ("rope_gptj", None), say("pairs that turn are neighbours"))
    r.must_be("order_of_interleaved_layers", ("local_attn_first", None), say("layers with windows come first"))
    r.must_be("rotary_pct", (1, 1.0, None), say("whole heads are rotary"))
    fields |= rotary(r, head_width(fields))
    every, size = r.count("sliding_window_pattern", 4), r.optional_count("sliding_window")
    r.ignore("_sliding_window_pattern", "layer_switch", "use_parallel_embedding", "rope_theta")
    if not size:
        r.fault(say("sliding_window is null, and layers with positions have windows; set it to their size"))
    return fields | windows_without_positions(r, fields["layers"], size, every)


def _gated(r: ConfigReader, epsilon: str) -> Fields:
    """Shape, MLP and LayerNorms."""
    fields = shape(r) | {
        "norm": "layernorm",
        "ffn": r.count("intermediate_size"),
        "activation": r.word_of("hidden_act", ACTIVATIONS, "silu"),
        "norm_epsilon": r.number(epsilon, 1e-5),
    }
    if width := r.optional_count("head_dim"):
        fields["head_dim"] = width
    return fields


def _command(r: ConfigReader) -> Fields:
    """Fields that both of Cohere's families have."""
    r.must_be("attention_bias", (False,), say("the MLP has no biases"))
    return _gated(r, "layer_norm_eps") | {
        "norm_bias": False,
        "parallel_block": "one-norm",
        "logit_scale": r.divisor("logit_scale", 0.0625),
    }
