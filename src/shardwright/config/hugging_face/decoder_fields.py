"""Keys that the configurations of most decoders share, as fields of [model].

The keys are those of Llama's configuration, which most later families use. Each function takes some keys and gives
their fields.
"""

from typing import Any

from shardwright.config.hugging_face.config_reader import ConfigReader
from shardwright.config.phrase import say

Fields = dict[str, Any]

# By the word in config.json for the activation inside an MLP, our word.
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu-tanh", "gelu_fast": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh", "relu": "relu", "relu2": "relu2", "quick_gelu": "quick-gelu",
}  # fmt: skip


def decoder(r: ConfigReader) -> Fields:
    """Layers, widths, heads, vocabulary and norms: everything except positions, biases and experts."""
    fields = shape(r) | {
        "ffn": r.count("intermediate_size"),
        "activation": r.word_of("hidden_act", ACTIVATIONS, "silu"),
        "norm_epsilon": r.number("rms_norm_eps", 1e-6),
    }
    if width := r.optional_count("head_dim"):
        fields["head_dim"] = width
    return fields


def shape(r: ConfigReader) -> Fields:
    """Layers, hidden, heads, and the fields of the ends."""
    heads = r.count("num_attention_heads")
    return {
        "layers": r.count("num_hidden_layers"),
        "hidden": r.count("hidden_size"),
        "heads": heads,
        "kv_heads": r.optional_count("num_key_value_heads") or heads,
        **ends(r),
    }


def ends(r: ConfigReader) -> Fields:
    """The vocabulary, the longest sequence, initial weights, and tied embeddings."""
    return {
        "vocab": r.count("vocab_size"),
        "sequence": r.count("max_position_embeddings", 2048),
        "init_std": r.number("initializer_range", 0.02),
        "tied_embeddings": r.flag("tie_word_embeddings"),
    }


def linear_biases(r: ConfigReader) -> Fields:
    """Biases of attention's four products and of the MLP's."""
    attention, mlp = r.flag("attention_bias"), r.flag("mlp_bias")
    return {"bias": attention and mlp, "attention_bias": attention and not mlp, "mlp_bias": mlp and not attention}


def experts(
    r: ConfigReader, num: str, *, width: str = "moe_intermediate_size", chosen: str = "num_experts_per_tok"
) -> Fields:
    """The number of experts, of experts per token, and their width, as fields of [model.moe]."""
    return {"experts": r.count(num), "top_k": r.count(chosen), "ffn": r.count(width)}


def only_some_layers(r: ConfigReader, layers: int) -> Fields:
    """The layers with experts in Qwen: every decoder_sparse_step-th layer, except the layers in mlp_only_layers."""
    dense = sorted(set(r.counts("mlp_only_layers") or []))
    if dense != list(range(len(dense))):
        r.fault(
            say(
                "mlp_only_layers is {dense}, and only the first layers can be without experts; name 0 to n, or none",
                dense=str(dense),
            )
        )
    every = max(1, r.count("decoder_sparse_step", 1))
    if dense and every > 1 and len(dense) % every:
        r.fault(
            say(
                "mlp_only_layers {dense} and decoder_sparse_step {every} together can't be expressed: layers with "
                "experts are counted from the first that may have some; use a multiple of {every} of them",
                dense=str(dense),
                every=every,
            )
        )
    return {"first_dense": min(len(dense), layers), "every": every}
