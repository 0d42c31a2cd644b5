"""Families before Llama, with LayerNorm. Each function takes the keys of one family and gives fields of [model]."""

import math

from shardwright.config.hugging_face.config_reader import ConfigReader
from shardwright.config.hugging_face.decoder_fields import ACTIVATIONS, Fields, shape
from shardwright.config.hugging_face.like_llama import head_width
from shardwright.config.hugging_face.rotary_fields import rotary
from shardwright.config.phrase import both, say

_LAYER_NORM = {"norm": "layernorm", "gated_mlp": False}


def gpt2(r: ConfigReader) -> Fields:
    """GPT-2 (Radford et al. 2019)."""
    for name in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        r.must_be(name, (False,), say("GPT-2 as released has it not"), False)
    r.must_be("scale_attn_weights", (True,), say("scores are divided by the root of a head's width"), True)
    hidden = r.count("n_embd")
    r.ignore("n_ctx")
    return _LAYER_NORM | _dropout(r, "resid_pdrop", "embd_pdrop") | {
        "layers": r.count("n_layer"), "hidden": hidden, "heads": r.count("n_head"),
        "ffn": r.optional_count("n_inner") or 4 * hidden, "vocab": r.count("vocab_size"),
        "sequence": r.count("n_positions"), "positions": "learned", "bias": True,
        "activation": r.word_of("activation_function", ACTIVATIONS, "gelu_new"),
        "norm_epsilon": r.number("layer_norm_epsilon", 1e-5), "init_std": r.number("initializer_range", 0.02),
        "tied_embeddings": r.flag("tie_word_embeddings", True),
    }  # fmt: skip


def gpt_bigcode(r: ConfigReader) -> Fields:
    """SantaCoder and StarCoder (Li et al. 2023, arXiv 2305.06161): GPT-2 with one key/value head."""
    r.ignore(
        "attention_softmax_in_fp32",
        "scale_attention_softmax_in_fp32",
        "inference_runner",
        "pad_key_length",
        "pre_allocate_kv_cache",
        "validate_runner_input",
        "max_batch_size",
        "max_sequence_length",
        "num_key_value_heads",
    )
    return gpt2(r) | ({"kv_heads": 1} if r.flag("multi_query", True) else {})


def gpt_neox(r: ConfigReader) -> Fields:
    """GPT-NeoX and Pythia (Black et al. 2022, arXiv 2204.06745): attention and MLP side by side, a quarter of each head
    is rotary."""
    fields = shape(r) | _LAYER_NORM | _dropout(r, "hidden_dropout") | {
        "ffn": r.count("intermediate_size"), "activation": r.word_of("hidden_act", ACTIVATIONS, "gelu"),
        "norm_epsilon": r.number("layer_norm_eps", 1e-5), "bias": True,
    }  # fmt: skip
    fields["kv_heads"] = fields["heads"]
    r.must_be("attention_bias", (True,), say("the MLP has biases"), True)
    if r.flag("use_parallel_residual", True):
        fields["parallel_block"] = "two-norms"
    return fields | rotary(r, head_width(fields), theta="rotary_emb_base", share="rotary_pct", in_part=True)


def opt(r: ConfigReader) -> Fields:
    """OPT (Zhang et al. 2022, arXiv 2205.01068), except OPT-350m, whose norms come after attention and MLP."""
    fields = shape(r) | _LAYER_NORM | _dropout(r, "dropout") | {
        "ffn": r.count("ffn_dim"), "positions": "learned", "position_offset": 2, "bias": r.flag("enable_bias", True),
        "activation": r.word_of("activation_function", ACTIVATIONS, "relu"), "init_std": r.number("init_std", 0.02),
        "tied_embeddings": r.flag("tie_word_embeddings", True),
        "norm_weight": r.flag("layer_norm_elementwise_affine", True),
    }  # fmt: skip
    r.must_be(
        "do_layer_norm_before", (True,), say("OPT-350m norms behind attention and MLP, without a last norm"), True
    )
    r.must_be("_remove_final_layer_norm", (False,), say("there is a norm before the head"), False)
    r.must_be("word_embed_proj_dim", (fields["hidden"], None), say("embeddings are as wide as the residual stream"))
    r.must_be("layerdrop", (0, 0.0), say("layers are not dropped"), 0.0)
    r.ignore("initializer_range", "activation_dropout", "num_key_value_heads")
    return fields | {"kv_heads": fields["heads"]}


def bloom(r: ConfigReader) -> Fields:
    """BLOOM (Le Scao et al. 2022, arXiv 2211.05100): ALiBi, and a norm of the embeddings."""
    hidden = r.count(r.named("n_embed", "hidden_size"))
    layers = r.count(r.named("num_hidden_layers", "n_layer"))
    heads = r.count(r.named("num_attention_heads", "n_head"))
    r.must_be(
        "apply_residual_connection_post_layernorm", (False,), say("the residual stream passes by the norms"), False
    )
    r.ignore("skip_bias_add", "skip_bias_add_qkv", "seq_length", "n_inner", "attention_softmax_in_fp32",
             "bias_dropout_fusion", "masked_softmax_fusion", "n_embed", "hidden_size", "num_attention_heads", "n_head",
             "n_layer")  # fmt: skip
    return _LAYER_NORM | _dropout(r, "hidden_dropout") | {
        "layers": layers, "hidden": hidden, "heads": heads, "ffn": 4 * hidden, "vocab": r.count("vocab_size"),
        "sequence": r.count("seq_length", 2048), "positions": "alibi", "embedding_norm": True, "bias": True,
        "activation": "gelu-tanh", "norm_epsilon": r.number("layer_norm_epsilon", 1e-5),
        "init_std": r.number("initializer_range", 0.02), "tied_embeddings": r.flag("tie_word_embeddings", True),
    }  # fmt: skip


def mpt(r: ConfigReader) -> Fields:
    """MPT (MosaicML 2023): ALiBi, LayerNorms without biases, and no biases elsewhere."""
    attention = ConfigReader(r.section("attn_config"), {})
    attention.must_be("attn_type", ("multihead_attention", None), say("each head has its own key and value"))
    attention.must_be("alibi", (True, None), say("positions are those of ALiBi"))
    attention.must_be("alibi_bias_max", (8, None), say("slopes of ALiBi begin at 2^(-8 / heads)"))
    attention.must_be("prefix_lm", (False, None), say("tokens would see later ones"))
    attention.must_be("qk_ln", (False, None), say("queries and keys have no norms"))
    attention.ignore("attn_impl", "attn_uses_sequence_id")
    hidden = r.count("d_model")
    r.must_be("no_bias", (True,), say("linear layers have no biases"), True)
    r.must_be("expansion_ratio", (4,), say("the MLP is four times as wide as the residual stream"), 4)
    r.must_be("logit_scale", (None, 1.0), say("logits are not scaled"))
    r.ignore(
        "learned_pos_emb",
        "emb_pdrop",
        "embedding_fraction",
        "init_config",
        "init_device",
        "norm_type",
        "tokenizer_name",
        "verbose",
    )
    fields = _LAYER_NORM | {
        "layers": r.count("n_layers"),
        "hidden": hidden,
        "heads": r.count("n_heads"),
        "ffn": 4 * hidden,
        "vocab": r.count("vocab_size"),
        "sequence": r.count("max_seq_len", 2048),
        "positions": "alibi",
        "norm_bias": False,
        "activation": "gelu",
        "norm_epsilon": r.number("layer_norm_epsilon", 1e-5),
        "init_std": r.number("initializer_range", 0.02),
        "tied_embeddings": r.flag("tie_word_embeddings", True),
        "dropout": attention.number("attn_pdrop"),
        "clip_qkv": attention.optional_number("clip_qkv"),
        "attention_scale": attention.optional_number("softmax_scale"),
    }
    r.faults += [say("{subject}: {fault}", subject="attn_config", fault=fault) for fault in attention.all_faults()]
    return fields


def biogpt(r: ConfigReader) -> Fields:
    """BioGPT (Luo et al. 2022, arXiv 2210.10341): OPT whose embeddings are multiplied by the root of their width."""
    fields = (
        shape(r)
        | _LAYER_NORM
        | _dropout(r, "hidden_dropout_prob")
        | {
            "ffn": r.count("intermediate_size"),
            "positions": "learned",
            "position_offset": 2,
            "bias": True,
            "activation": r.word_of("hidden_act", ACTIVATIONS, "gelu"),
            "norm_epsilon": r.number("layer_norm_eps", 1e-12),
            "tied_embeddings": r.flag("tie_word_embeddings", True),
        }
    )
    r.must_be("layerdrop", (0, 0.0), say("layers are not dropped"), 0.0)
    r.ignore("activation_dropout", "num_key_value_heads")
    fields["kv_heads"] = fields["heads"]
    return fields | ({"embedding_scale": math.sqrt(fields["hidden"])} if r.flag("scale_embedding", True) else {})


def falcon(r: ConfigReader) -> Fields:
    """Falcon (Almazrouei et al. 2023, arXiv 2311.16867): attention and MLP side by side; the small ones have one
    key/value head."""
    heads = r.count(r.named("num_attention_heads", "n_head"))
    hidden = r.count(r.named("n_embed", "hidden_size"))
    layers = r.count(r.named("num_hidden_layers", "n_layer"))
    newer, parallel = r.flag("new_decoder_architecture"), r.flag("parallel_attn", True)
    groups = r.optional_count("num_kv_heads") or r.optional_count("n_head_kv") or heads
    r.ignore("n_embed", "hidden_size", "n_head", "n_layer", "num_hidden_layers", "num_attention_heads", "n_head_kv")
    is_multi_query = r.flag("multi_query", True) and not newer
    fields = _LAYER_NORM | _dropout(r, "hidden_dropout") | {
        "layers": layers, "hidden": hidden, "heads": heads,
        "kv_heads": 1 if is_multi_query else groups if newer else heads,
        "ffn": r.optional_count("ffn_hidden_size") or 4 * hidden,
        "vocab": r.count("vocab_size"), "sequence": r.count("max_position_embeddings", 2048),
        "activation": r.word_of("activation", ACTIVATIONS, "gelu"), "bias": r.flag("bias"),
        "norm_epsilon": r.number("layer_norm_epsilon", 1e-5), "init_std": r.number("initializer_range", 0.02),
        "tied_embeddings": r.flag("tie_word_embeddings", True),
    }  # fmt: skip
    norms = r.count("num_ln_in_parallel_attn") if r.has("num_ln_in_parallel_attn") else 2 if newer else 1
    if newer or parallel:
        fields["parallel_block"] = "two-norms" if norms == 2 else "one-norm"
    if r.flag("alibi"):
        r.ignore("rope_parameters", "rope_theta", "rope_scaling")
        return fields | {"positions": "alibi", "alibi_scaled": True}
    return fields | rotary(r, head_width(fields))


def starcoder2(r: ConfigReader) -> Fields:
    """StarCoder 2 (Lozhkov et al. 2024, arXiv 2402.19173)."""
    fields = shape(r) | _LAYER_NORM | _dropout(r, "residual_dropout", "embedding_dropout") | {
        "ffn": r.count("intermediate_size"), "activation": r.word_of("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh"),
        "norm_epsilon": r.number("norm_epsilon", 1e-5), "bias": r.flag("use_bias", True),
    }  # fmt: skip
    r.ignore("layer_types", "mlp_type", "norm_type")
    if size := r.optional_count("sliding_window"):
        fields["window"] = {"size": size}
    return fields | rotary(r, head_width(fields))


def _dropout(r: ConfigReader, *names: str) -> Fields:
    """The single dropout probability of additions to the residual stream and, if they have a key, of embeddings."""
    values = {r.number(name) for name in names}
    if len(values) > 1:
        r.fault(
            say(
                "{names} are not the same, and embeddings are dropped as often as what joins the stream; set both to "
                "one probability, such as 0.0",
                names=both(names),
            )
        )
    return {"dropout": max(values)}
