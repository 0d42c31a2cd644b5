"""Tiny random models with several kinds of input, made by transformers, whose decoders of text are read."""

from pathlib import Path
from typing import Any

import torch

_TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
_SEEN: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_QWEN_SEEN = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}


def _places(*sections: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}}


# By the beginning of the names of transformers' classes: options of the configuration.
WRAPPED: dict[str, dict[str, Any]] = {
    "Qwen2VL": {
        "text_config": _TEXT | _places(1, 1, 2),
        "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2},
    },
    "Qwen2_5_VL": {"text_config": _TEXT | _places(1, 1, 2), "vision_config": _QWEN_SEEN},
    "Qwen3VL": {
        "text_config": _TEXT | _places(2, 3, 3) | {"head_dim": 16},
        "vision_config": _QWEN_SEEN | {"deepstack_visual_indexes": [0]},
    },
    "Qwen3VLMoe": {
        "text_config": _TEXT | _places(2, 3, 3) | {
            "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
        },
        "vision_config": _QWEN_SEEN | {"deepstack_visual_indexes": [0]},
    },
    "Gemma3": {
        "text_config": _TEXT | {"head_dim": 16, "sliding_window": 8, "num_hidden_layers": 6},
        "vision_config": _SEEN, "mm_tokens_per_image": 4,
    },
    "Llama4": {
        "text_config": _TEXT | {
            "head_dim": 16, "num_local_experts": 4, "attention_chunk_size": 8, "intermediate_size_mlp": 40,
            "interleave_moe_layer_step": 2, "floor_scale": 4,
        },
        "vision_config": _SEEN | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    },
    "Mistral3": {
        "text_config": _TEXT | {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
        "vision_config": _SEEN | {"model_type": "pixtral", "head_dim": 8}, "tie_word_embeddings": False,
    },
}  # fmt: skip


def save_wrapped(name: str, folder: Path) -> Any:
    """Save a tiny model, with random values in every tensor, and return it."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**WRAPPED[name])
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            near = float(parameter.dim() == 1 and name != "Gemma3")
            parameter.copy_(near + 0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return model
