"""Models of transformers whose attention or positions set them apart from Llama, for hugging_face.py."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardwright.config.model import ModelSpec


def family(spec: ModelSpec) -> Callable[[ModelSpec, dict[str, Any]], Any] | None:
    """The maker of transformers' model that has the fields of `spec`, given what configurations have in common; None
    for those that hugging_face.py makes itself."""
    if spec.qk_norm == "full":
        return _olmoe
    if spec.no_rotary_every:
        return _smollm3
    if spec.rotary_dim or spec.rotary_scaling.kind == "longrope":
        return _phi3
    if spec.qkv_bias:
        return _qwen2
    return _mistral if spec.window.size else None


def rope_parameters(spec: ModelSpec) -> dict[str, Any]:
    """Rotary positions as transformers' configurations say them."""
    scaling = spec.rotary_scaling
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rotary_base}
    if spec.rotary_dim:
        rope["partial_rotary_factor"] = spec.rotary_dim / spec.head_size
    if scaling.kind == "none":
        return rope
    rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        rope["original_max_position_embeddings"] = scaling.trained_sequence
    match scaling.kind:
        case "yarn":
            rope |= {"beta_fast": scaling.turns_that_stay, "beta_slow": scaling.slow, "truncate": scaling.truncate}
            if scaling.mscale_all_dim:
                rope |= {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
        case "llama3":
            rope |= {"high_freq_factor": scaling.turns_that_stay, "low_freq_factor": scaling.slow}
        case "longrope":
            rope |= {"short_factor": scaling.short_factors, "long_factor": scaling.long_factors}
    if scaling.magnitude:
        rope["attention_factor"] = scaling.magnitude
    return rope


def _qwen2(spec: ModelSpec, common: dict[str, Any]) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    del common["attention_bias"]
    if spec.window.size:
        common |= {"use_sliding_window": True, "sliding_window": spec.window.size}
        common["max_window_layers"] = spec.window.first_full
    return Qwen2ForCausalLM(Qwen2Config(**common))


def _mistral(spec: ModelSpec, common: dict[str, Any]) -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    del common["attention_bias"]
    return MistralForCausalLM(MistralConfig(**common, head_dim=spec.head_size, sliding_window=spec.window.size))


def _smollm3(spec: ModelSpec, common: dict[str, Any]) -> Any:
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    return SmolLM3ForCausalLM(
        SmolLM3Config(**common, **ids, mlp_bias=spec.bias, no_rope_layer_interval=spec.no_rotary_every)
    )


def _phi3(spec: ModelSpec, common: dict[str, Any]) -> Any:
    from transformers import Phi3Config, Phi3ForCausalLM

    del common["attention_bias"]
    trained = spec.rotary_scaling.trained_sequence
    ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    window = {"sliding_window": spec.window.size or None}
    return Phi3ForCausalLM(Phi3Config(**common, **ids, **window, original_max_position_embeddings=trained))


def _olmoe(spec: ModelSpec, common: dict[str, Any]) -> Any:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    moe = spec.moe
    common["intermediate_size"] = moe.ffn_size(spec.ffn_size)
    return OlmoeForCausalLM(
        OlmoeConfig(
            **common, pad_token_id=None, num_experts=moe.experts, num_experts_per_tok=moe.num_chosen,
            norm_topk_prob=moe.normalise, clip_qkv=spec.clip_qkv or None,
        )
    )  # fmt: skip


def unfused(weights: dict[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Tensors by name where query, key and value, and gate and up, are each a tensor of their own, as Llama's are."""
    result = {}
    widths = [heads * spec.head_size for heads in (spec.heads, spec.num_kv_heads, spec.num_kv_heads)]
    for name, tensor in weights.items():
        if "qkv_proj" in name:
            parts = zip("qkv", tensor.split(widths), strict=True)
            result |= {name.replace("qkv_proj", f"{which}_proj"): part for which, part in parts}
        elif "mlp.gate_up_proj" in name:
            parts = zip(("gate", "up"), tensor.chunk(2), strict=True)
            result |= {name.replace("gate_up_proj", f"{which}_proj"): part for which, part in parts}
        else:
            result[name] = tensor
    return result


def head_norms(spec: ModelSpec, which: str, weight: Tensor) -> Tensor:
    """The weight of a norm of queries ("q") or keys in our shape: by head where it is of all heads."""
    if spec.qk_norm != "full":
        return weight
    return weight.view(spec.num_kv_heads, -1 if which == "q" else 1, spec.head_size)
