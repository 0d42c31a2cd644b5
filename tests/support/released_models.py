"""A tiny random model of every family that is read, made by transformers and saved as it saves models."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shardwright.config.model import ModelSpec
from shardwright.sharding.hugging_face.layout import layout_of
from shardwright.train.checkpoint.released_weights import paste_part
from support.own_code_models import OwnCodeModel

SEQUENCE = 24
_SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_HEADS = {"head_dim": 16}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_LATENTS = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12,
    "num_key_value_heads": 4,
}  # fmt: skip
_DEEPSEEK = _LATENTS | {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
_GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 96}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0], "original_max_position_embeddings": 16,
}  # fmt: skip
_WINDOWS = {"use_sliding_window": True, "sliding_window": 8}

# By the name of the case: model_type, and keys of its configuration.
RELEASED: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("arcee", _SIZES),
    "biogpt": (
        "biogpt", _SIZES | {"hidden_dropout_prob": 0.0, "activation_dropout": 0.0, "pad_token_id": None},
    ),
    "bloom": ("bloom", {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 96}),
    "cohere": ("cohere", _SIZES | {"pad_token_id": None, "logit_scale": 0.25}),
    "cohere2": ("cohere2", _SIZES | {"pad_token_id": None, "sliding_window": 8}),
    "cwm": ("cwm", _SIZES | _HEADS | {"sliding_window": 8, "num_hidden_layers": 5}),
    "deepseek_v2": (
        "deepseek_v2", _SIZES | _DEEPSEEK | {"rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "deepseek_v2 groups": (
        "deepseek_v2",
        _SIZES | _DEEPSEEK | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
                              "q_lora_rank": None},
    ),
    "deepseek_v3": ("deepseek_v3", _SIZES | _DEEPSEEK | {"n_group": 2, "topk_group": 1, "num_mtp_layers": 0}),
    "dots1": (
        "dots1",
        _SIZES | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_shared_experts": 1,
                  "first_k_dense_replace": 1},
    ),
    "ernie4_5": ("ernie4_5", _SIZES | _HEADS | {"pad_token_id": None}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        _SIZES | {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 20, "pad_token_id": None},
    ),
    "exaone4": ("exaone4", _SIZES | {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "exaone4 windows": ("exaone4", _SIZES | {"sliding_window": 8}),
    "exaone_moe": (
        "exaone_moe",
        _SIZES | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "sliding_window": 8,
                  "pad_token_id": None},
    ),
    "falcon 7b": (
        "falcon",
        {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96, "multi_query": True},
    ),
    "falcon 40b": (
        "falcon",
        {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96, "num_kv_heads": 2,
         "new_decoder_architecture": True},
    ),
    "falcon rw": (
        "falcon",
        {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96, "alibi": True,
         "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "flex_olmo": ("flex_olmo", _SIZES | {"num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": None}),
    "gemma": ("gemma", _SIZES | _HEADS),
    "gemma2": ("gemma2", _SIZES | _HEADS | {"sliding_window": 8, "query_pre_attn_scalar": 20}),
    "gemma3": ("gemma3_text", _SIZES | _HEADS | {"sliding_window": 8, "num_hidden_layers": 6}),
    "glm": ("glm", _SIZES | _HEADS | {"pad_token_id": None}),
    "glm4": ("glm4", _SIZES | _HEADS | {"pad_token_id": None}),
    "glm4_moe": (
        "glm4_moe",
        _SIZES | _HEADS | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
                           "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True,
                           "num_mtp_layers": 0},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", _SIZES | _DEEPSEEK),
    "gpt2": ("gpt2", _GPT | {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "gpt_bigcode": ("gpt_bigcode", _GPT | {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "gpt_bigcode heads": ("gpt_bigcode", _GPT | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "multi_query": False}),
    "gpt_neox": ("gpt_neox", _SIZES),
    "gpt_neox serial": ("gpt_neox", _SIZES | {"use_parallel_residual": False}),
    "gpt_oss": (
        "gpt_oss",
        _SIZES | _HEADS | {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 8,
                           "rope_parameters": _YARN | {"truncate": False}},
    ),
    "gptj": ("gptj", _GPT | {"rotary_dim": 4}),
    "granite": (
        "granite",
        _SIZES | {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
                  "attention_multiplier": 0.2},
    ),
    "granite_swa": (
        "granite_swa",
        _SIZES | {"sliding_window": 8, "num_hidden_layers": 5, "embedding_multiplier": 3.0, "logits_scaling": 2.0,
                  "residual_multiplier": 0.5, "attention_multiplier": 0.2, "pad_token_id": None,
                  "layer_rope_theta": [500.0, 10000.0, 10000.0, 10000.0, 500.0]},
    ),
    "granitemoe_swa": (
        "granitemoe_swa",
        _SIZES | {"num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 40,
                  "sliding_window": 8, "num_hidden_layers": 5, "pad_token_id": None},
    ),
    "granitemoe": ("granitemoe", _SIZES | {"num_local_experts": 6, "num_experts_per_tok": 2, "logits_scaling": 2.0}),
    "granitemoehybrid": (
        "granitemoehybrid",
        _SIZES | {"num_local_experts": 0, "shared_intermediate_size": 48, "layer_types": ["full_attention"] * 4,
                  "position_embedding_type": "rope", "logits_scaling": 2.0, "residual_multiplier": 0.5,
                  "mamba_n_heads": 4, "pad_token_id": None},
    ),
    "granitemoeshared": (
        "granitemoeshared", _SIZES | {"num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 40},
    ),
    "helium": ("helium", _SIZES | {"head_dim": 8} | {"pad_token_id": None}),
    "hunyuan_v1_dense": (
        "hunyuan_v1_dense",
        _SIZES | _HEADS | {"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0,
                                               "rope_theta": 10000.0}},
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", _SIZES | _HEADS | {"num_experts": 6, "moe_topk": 2}),
    "hy_v3": ("hy_v3", _SIZES | _HEADS | _EXPERTS),
    "hyperclovax": (
        "hyperclovax", _SIZES | {"embedding_multiplier": 3.0, "logits_scaling": 0.25, "attention_multiplier": 0.2},
    ),
    "internlm3": ("internlm3", _SIZES | _HEADS | {"pad_token_id": None}),
    "iquestcoder": ("iquestcoder", _SIZES | _HEADS),
    "jais2": ("jais2", _SIZES | {"head_dim": 8, "pad_token_id": None}),
    "llama": ("llama", _SIZES),
    "llama 3.1": ("llama", _SIZES | {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama yarn": ("llama", _SIZES | {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
    "llama biases": ("llama", _SIZES | {"attention_bias": True, "mlp_bias": True}),
    "llama attention biases": ("llama", _SIZES | {"attention_bias": True}),
    "llama mlp biases": ("llama", _SIZES | {"mlp_bias": True}),
    "llama linear": (
        "llama", _SIZES | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "llama4": (
        "llama4_text",
        _SIZES | _HEADS | {"num_local_experts": 4, "attention_chunk_size": 8, "intermediate_size_mlp": 40,
                           "interleave_moe_layer_step": 2, "floor_scale": 4},
    ),
    "mellum": (
        "mellum",
        _SIZES | _HEADS | _EXPERTS | {
            "sliding_window": 8, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "rope_parameters": {"full_attention": _YARN, "sliding_attention": {
                "rope_type": "default", "rope_theta": 500.0}},
        },
    ),
    "minimax_m2": (
        "minimax_m2", _SIZES | _HEADS | {"num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 8},
    ),
    "ministral": (
        "ministral",
        _SIZES | _HEADS | {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    ),
    "ministral3": (
        "ministral3",
        _SIZES | _HEADS | {"rope_parameters": _YARN | {
            "original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}},
    ),
    "mistral": ("mistral", _SIZES | {"sliding_window": 8}),
    "mixtral": ("mixtral", _SIZES | {"num_local_experts": 6}),
    "mpt": ("mpt", {"d_model": 48, "n_heads": 6, "n_layers": 3, "vocab_size": 96, "max_seq_len": 64}),
    "mpt clipped": (
        "mpt",
        {"d_model": 32, "n_heads": 4, "n_layers": 3, "vocab_size": 96, "max_seq_len": 64,
         "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}},
    ),
    "nemotron": ("nemotron", _SIZES | {"pad_token_id": None}),
    "olmo": ("olmo", _SIZES | {"clip_qkv": 0.5, "pad_token_id": None}),
    "olmo2": ("olmo2", _SIZES | {"pad_token_id": None}),
    "olmo3": ("olmo3", _SIZES | {"sliding_window": 8, "pad_token_id": None}),
    "olmoe": ("olmoe", _SIZES | {"num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": None}),
    "opt": (
        "opt",
        {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 48,
         "max_position_embeddings": 64, "dropout": 0.0, "pad_token_id": None},
    ),
    "phi": ("phi", _SIZES),
    "phi3": ("phi3", _SIZES | {"pad_token_id": None}),
    "phi3 long": (
        "phi3",
        _SIZES | {"pad_token_id": None, "original_max_position_embeddings": 16, "rope_parameters": _LONG},
    ),
    "qwen2": ("qwen2", _SIZES),
    "qwen2 windows": ("qwen2", _SIZES | _WINDOWS | {"max_window_layers": 2}),
    "qwen2_moe": ("qwen2_moe", _SIZES | _EXPERTS | {"shared_expert_intermediate_size": 40}),
    "qwen2_moe windows": (
        "qwen2_moe", _SIZES | _EXPERTS | {"shared_expert_intermediate_size": 40, "max_window_layers": 4} | _WINDOWS,
    ),
    "qwen3": ("qwen3", _SIZES | _HEADS),
    "qwen3_moe": ("qwen3_moe", _SIZES | _HEADS | _EXPERTS),
    "qwen3_moe windows": ("qwen3_moe", _SIZES | _HEADS | _EXPERTS | _WINDOWS),
    "seed_oss": ("seed_oss", _SIZES | _HEADS | {"pad_token_id": None, "residual_dropout": 0.0}),
    "smollm3": ("smollm3", _SIZES | {"pad_token_id": None}),
    "solar_open": (
        "solar_open",
        {name: size for name, size in _SIZES.items() if name != "intermediate_size"} | _HEADS | {
            "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_group": 2,
            "rope_parameters": _YARN,
        },
    ),
    "stablelm": ("stablelm", _SIZES | {"use_qkv_bias": True}),
    "stablelm parallel": ("stablelm", _SIZES | {"use_parallel_residual": True}),
    "starcoder2": ("starcoder2", _SIZES),
    "vaultgemma": ("vaultgemma", _SIZES | _HEADS | {"sliding_window": 8, "query_pre_attn_scalar": 20}),
    "youtu": ("youtu", _SIZES | _LATENTS),
}  # fmt: skip

_ALL_HEADS = {"num_key_value_heads": 4}
# Models whose folders bring their own code, beside one of transformers' that computes the same.
OWN_CODE: dict[str, OwnCodeModel] = {
    "baichuan": OwnCodeModel(
        "baichuan", _SIZES | _ALL_HEADS, "llama", _SIZES | _ALL_HEADS, fused="stacked", fused_name="W_pack",
    ),
    "chatglm": OwnCodeModel(
        "chatglm",
        {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "kv_channels": 16, "ffn_hidden_size": 48,
         "multi_query_attention": True, "multi_query_group_num": 2, "padded_vocab_size": 96, "seq_length": 64,
         "add_qkv_bias": True, "rope_ratio": 50},
        "glm",
        _SIZES | _HEADS | {"rms_norm_eps": 1e-5, "rope_parameters": {
            "rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5}},
        renamed=(
            ("model.embed_tokens", "transformer.embedding.word_embeddings"), ("lm_head", "transformer.output_layer"),
            ("model.layers", "transformer.encoder.layers"), ("model.norm", "transformer.encoder.final_layernorm"),
            ("self_attn", "self_attention"), ("o_proj", "dense"), ("gate_up_proj", "dense_h_to_4h"),
            ("down_proj", "dense_4h_to_h"),
        ),
        fused="stacked", fused_name="query_key_value",
    ),
    "deepseek": OwnCodeModel(
        "deepseek",
        _SIZES | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_shared_experts": 2,
                  "first_k_dense_replace": 1, "norm_topk_prob": False},
        "llama", _SIZES, each_expert=True,
    ),
    "exaone": OwnCodeModel(
        "exaone",
        {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
         "intermediate_size": 48, "max_position_embeddings": 64, "layer_norm_epsilon": 1e-6,
         "tie_word_embeddings": False},
        "llama", _SIZES,
        renamed=(
            ("model.embed_tokens", "transformer.wte"), ("model.layers", "transformer.h"),
            ("model.norm", "transformer.ln_f"), ("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2"),
            ("self_attn", "attn.attention"), ("o_proj", "out_proj"), ("gate_proj", "c_fc_0"), ("up_proj", "c_fc_1"),
            ("down_proj", "c_proj"),
        ),
    ),
    "internlm": OwnCodeModel(
        "internlm", _SIZES | {"bias": True}, "llama", _SIZES | {"attention_bias": True},
    ),
    "internlm2": OwnCodeModel(
        "internlm2", _SIZES | {"bias": False}, "llama", _SIZES,
        renamed=(
            ("model.embed_tokens", "model.tok_embeddings"), ("lm_head", "output"), (".self_attn.", ".attention."),
            ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm"), ("o_proj", "wo"),
            ("mlp.gate_proj", "feed_forward.w1"), ("mlp.up_proj", "feed_forward.w3"),
            ("mlp.down_proj", "feed_forward.w2"),
        ),
        fused="grouped", fused_name="wqkv",
    ),
    "mimo": OwnCodeModel(
        "mimo", _SIZES | {"num_nextn_predict_layers": 0, "rope_theta": 10000.0, "rms_norm_eps": 1e-6}, "qwen2", _SIZES,
    ),
    "qwen": OwnCodeModel(
        "qwen",
        {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "kv_channels": 8, "vocab_size": 96,
         "intermediate_size": 96, "seq_length": 64, "no_bias": True, "tie_word_embeddings": False},
        "qwen2", _SIZES | _ALL_HEADS,
        renamed=(
            ("model.embed_tokens", "transformer.wte"), ("model.layers", "transformer.h"),
            ("model.norm", "transformer.ln_f"), ("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2"),
            (".self_attn.", ".attn."), ("o_proj", "c_proj"), ("gate_proj", "w2"), ("up_proj", "w1"),
            ("mlp.down_proj", "mlp.c_proj"),
        ),
        fused="stacked", fused_name="c_attn",
    ),
    "minicpm": OwnCodeModel(
        "minicpm",
        _SIZES | {"scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 16, "tie_word_embeddings": False}, "granite",
        _SIZES | {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.0,
                  "attention_multiplier": 8**-0.5},
    ),
    "orion": OwnCodeModel(
        "orion", _SIZES, "stablelm",
        _SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
    ),
}  # fmt: skip
CASES = (*RELEASED, *OWN_CODE)


def family_of_case(name: str) -> str:
    """The family of a case."""
    return OWN_CODE[name].family if name in OWN_CODE else RELEASED[name][0]


def no_tokens(family: str) -> dict[str, Any]:
    """Keys of a configuration by which no token begins or ends a text, for their ids may be beyond a tiny vocabulary.
    One family needs a number."""
    return {"bos_token_id": 0 if family == "cwm" else None, "eos_token_id": None}


def save_released(name: str, folder: Path, seed: int = 1, layers: int = 0) -> Any:
    """Save a tiny model of a case, with random values in every tensor, and return it; of so many layers, if not 0.

    Biases and norm weights too: at their usual zeros and ones, one that is left out would not be noticed.
    """
    generator = torch.Generator().manual_seed(seed)
    if name in OWN_CODE:
        return _save_own_code(OWN_CODE[name], folder, generator)
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family, keys = RELEASED[name]
    options = no_tokens(family) | keys
    options |= {key: layers for key in ("num_hidden_layers", "n_layer", "n_layers") if key in keys and layers}
    config = CONFIG_MAPPING[family](**options)
    # With "eager" Falcon adds its ALiBi twice.
    way = "sdpa" if getattr(config, "alibi", False) else "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=way)
    _randomise(model, generator, "gemma" not in family)
    model.eval().save_pretrained(folder)
    return model


def _randomise(model: nn.Module, generator: torch.Generator, norms_near_one: bool) -> None:
    with torch.no_grad():
        for tensor_name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if isinstance(tensor, nn.Parameter) or tensor_name.endswith("e_score_correction_bias"):
                is_norm = tensor.dim() == 1 and tensor_name.endswith("weight") and norms_near_one
                tensor.copy_(float(is_norm) + 0.2 * torch.randn(tensor.shape, generator=generator))


def _save_own_code(case: OwnCodeModel, folder: Path, generator: torch.Generator) -> Any:
    model = case.reference().eval()
    _randomise(model, generator, norms_near_one=True)
    folder.mkdir(parents=True)
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.named_parameters()}
    save_file(case.released(tensors), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": case.family, **case.keys}))
    return model


def opened(name: str, folder: Path) -> Any:
    """A saved model of a case, as transformers opens it."""
    if name in OWN_CODE:
        model = OWN_CODE[name].reference()
        files = {key: tensor for path in folder.glob("*.safetensors") for key, tensor in load_file(path).items()}
        missing, unexpected = model.load_state_dict(OWN_CODE[name].own(files), strict=False)
        assert not unexpected and not [key for key in missing if "inv_freq" not in key]
        return model.eval()
    from transformers import AutoModelForCausalLM

    keys = json.loads((folder / "config.json").read_text())
    way = "sdpa" if keys.get("alibi") else "eager"
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=way).eval()


# Names in memory, where files have others.
_RENAMED = {
    "embed_out.": "lm_head.", ".block_sparse_moe.gate.": ".mlp.gate.",
    ".block_sparse_moe.router.layer.": ".block_sparse_moe.router.", ".mlp.router.gate.": ".mlp.gate.",
    ".mlp.shared_mlp.": ".mlp.shared_experts.", ".mlp.moe_statics.": ".mlp.gate.moe_statics.",
    ".mlp.experts.": ".block_sparse_moe.experts.",
}  # fmt: skip


def in_their_layout(
    name: str, model: ModelSpec, tensors: Mapping[str, Tensor], are_gradients: bool = False
) -> dict[str, Tensor]:
    """Full tensors of a model by our names, or their gradients, as the tensors that a case has in memory: by both the
    names there and those in files, where these differ."""
    # In memory transformers has all experts of a layer in two tensors, whatever its files have.
    result = {
        f"model.layers.{own.split('.')[1]}.mlp.experts.{which}": tensors[own].reshape(len(tensors[own]), -1, size)
        for own in tensors if ".moe.experts." in own and not own.endswith("_bias")
        for which, size in [("gate_up_proj" if own.endswith("up") else "down_proj", tensors[own].shape[-1])]
    }  # fmt: skip
    by_file = set[str]()
    for own, pieces in layout_of(family_of_case(name), model).items():
        for piece in pieces:
            into = result[piece.name] if piece.name in by_file else torch.zeros(piece.shape)
            result[piece.name] = into
            by_file.add(piece.name)
            part = tensors[own][tuple(slice(start, stop) for start, stop in piece.region)]
            paste_part(replace(piece, plus=0.0) if are_gradients else piece, part, piece.region, into)
    for named in list(result):
        in_memory = named
        for in_files, other in _RENAMED.items():
            in_memory = in_memory.replace(in_files, other)
        result.setdefault(in_memory, result[named])
    return OWN_CODE[name].own(result) if name in OWN_CODE else result
