"""The same model in transformers, as a reference that was written by others.

`reference_model` makes it from a ModelSpec, `our_layout` names and fuses its tensors as we do. The way from their
layout to ours only moves elements, so weights and gradients take the same way.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.config.model import ModelSpec
from shardwright.model.decoder import DecoderStage
from shardwright.parallel.tensor.parameter import placed_parameters
from support.attention_families import family, head_norms, rope_parameters, unfused

CHOICE_BIAS = "e_score_correction_bias"
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu-tanh": "gelu_new"}


def reference_model(spec: ModelSpec, seed: int) -> Any:
    """The model of transformers that has the shape of `spec`, with random values in every parameter.

    Biases and norm weights too: at their usual zeros and ones, one that is left out would not be noticed. The
    deviations keep activations near one, where rounding is small and a wrong formula is not.

    Attention is "eager", a plain softmax of a masked product, and not the fused kernel that we call ourselves.
    """
    makers = {"llama": _llama, "gpt2": _gpt2, "deepseek": _deepseek, "qwen3": _qwen3, "mixtral": _mixtral}
    of_family = family(spec)
    model = of_family(spec, _common(spec)) if of_family else makers[_kind(spec)](spec)
    assert model.config._attn_implementation == model.config._experts_implementation == "eager"
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm_weight = parameter.dim() == 1 and name.endswith("weight")
            mean, std = (1.0, 0.3) if is_norm_weight else (0.0, 0.2)
            parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator))
        for name, bias in model.named_buffers():
            if name.endswith(CHOICE_BIAS):  # enough to change choices
                bias.copy_(0.2 * torch.randn(bias.shape, generator=generator))
    return model.eval()  # no dropout


def copy_weights(stage: DecoderStage, model: nn.Module) -> None:
    """Give an initialised stage the weights of `model`: its layers of them, and its boxes of those."""
    weights = our_layout(dict(model.named_parameters()), stage.spec)
    with torch.no_grad():
        for parameter in placed_parameters(stage).values():
            weight = weights[parameter.place.name]
            assert weight.shape == parameter.place.full_shape, parameter.place.name
            parameter.copy_(weight[parameter.place.slices])
        for name, bias in model.named_buffers():
            if name.endswith(CHOICE_BIAS):
                stage.layers[name.split(".")[2]].moe.router.state.bias_E.copy_(bias)


def our_layout(tensors: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Tensors by the names of `model.named_parameters()`, as full tensors by our names.

    Fails if one of `tensors` has no place with us. A tied table is one tensor, "embedding.weight".
    """
    rest = unfused(dict(tensors), spec)
    own = (_from_gpt2 if _kind(spec) == "gpt2" else _from_llama)(rest.pop, spec)
    assert not rest, f"not taken over: {sorted(rest)}"
    return own


def reference_gradients(model: nn.Module, spec: ModelSpec) -> dict[str, Tensor]:
    """The gradients of `model` as full tensors by our names."""
    return our_layout({name: parameter.grad for name, parameter in model.named_parameters()}, spec)


def our_gradients(stage: DecoderStage) -> dict[str, Tensor]:
    """The gradients of a stage by the name of the tensor; those of the two uses of a tied table are summed."""
    gradients: dict[str, Tensor] = {}
    for parameter in placed_parameters(stage).values():
        name = parameter.place.name
        gradients[name] = gradients[name] + parameter.gradient if name in gradients else parameter.gradient
    return gradients


def _kind(spec: ModelSpec) -> str:
    kind = (spec.positions, spec.norm, spec.gated_mlp)
    if kind == ("learned", "layernorm", False):
        return "gpt2"
    assert kind == ("rotary", "rmsnorm", True), f"transformers has no {kind}"
    if spec.is_latent:
        return "deepseek"
    return "qwen3" if spec.qk_norm == "head" else "mixtral" if spec.moe.experts else "llama"


def _llama(spec: ModelSpec) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds, and most tests do without

    return LlamaForCausalLM(LlamaConfig(**_common(spec), head_dim=spec.head_size, mlp_bias=spec.bias))


def _qwen3(spec: ModelSpec) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    moe, common = spec.moe, _common(spec) | {"head_dim": spec.head_size}
    if not moe.experts:
        return Qwen3ForCausalLM(Qwen3Config(**common))
    assert moe.gate == "softmax" and moe.softmax_over == "all" and moe.shared_experts == 0
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **common,
            num_experts=moe.experts,
            num_experts_per_tok=moe.num_chosen,
            moe_intermediate_size=moe.ffn_size(spec.ffn_size),
            norm_topk_prob=moe.normalise,
            decoder_sparse_step=moe.every,
            mlp_only_layers=list(range(moe.first_dense)),
        )
    )


def _mixtral(spec: ModelSpec) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    moe, common = spec.moe, _common(spec)
    assert moe.gate == "softmax" and moe.softmax_over == "chosen" and moe.shared_experts == moe.first_dense == 0
    common["intermediate_size"] = moe.ffn_size(spec.ffn_size)
    del common["attention_bias"]
    return MixtralForCausalLM(
        MixtralConfig(
            **common, head_dim=spec.head_size, num_local_experts=moe.experts, num_experts_per_tok=moe.num_chosen
        )
    )


def _deepseek(spec: ModelSpec) -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    latent, moe = spec.latent, spec.moe
    assert spec.norm_epsilon == 1e-6, "their norms of the latents know no other"
    routing = {
        "n_routed_experts": moe.experts, "num_experts_per_tok": moe.num_chosen, "n_group": moe.num_groups,
        "topk_group": moe.groups_kept, "moe_intermediate_size": moe.ffn_size(spec.ffn_size),
        "n_shared_experts": moe.shared_experts, "norm_topk_prob": moe.normalise,
        "routed_scaling_factor": moe.routed_scaling,
    }  # fmt: skip
    assert not moe.experts or (moe.gate == "sigmoid" and moe.every == 1 and moe.group_score == "top2")
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **_common(spec),
            **(routing if moe.experts else {}),
            first_k_dense_replace=moe.first_dense if moe.experts else spec.layers,
            q_lora_rank=latent.q_rank or None,
            kv_lora_rank=latent.kv_rank,
            qk_nope_head_dim=latent.nope_dim,
            qk_rope_head_dim=latent.rope_dim,
            v_head_dim=latent.value_dim,
        )
    )


def _common(spec: ModelSpec) -> dict[str, Any]:
    """The keys that the configurations of models like Llama have in common."""
    return {
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.num_kv_heads,
        "hidden_act": ACTIVATIONS[spec.activation],
        "max_position_embeddings": spec.sequence,
        "rms_norm_eps": spec.norm_epsilon,
        "rope_parameters": rope_parameters(spec),
        "attention_bias": spec.bias,
        "tie_word_embeddings": spec.tied_embeddings,
        "use_cache": False,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }


def _gpt2(spec: ModelSpec) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    assert spec.bias and spec.num_kv_heads == spec.heads and spec.head_size * spec.heads == spec.hidden
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=spec.vocab,
            n_positions=spec.sequence,
            n_embd=spec.hidden,
            n_layer=spec.layers,
            n_head=spec.heads,
            n_inner=spec.ffn_size,
            activation_function=ACTIVATIONS[spec.activation],
            layer_norm_epsilon=spec.norm_epsilon,
            tie_word_embeddings=spec.tied_embeddings,
            bos_token_id=None,  # the usual id is past the end of a small vocabulary
            eos_token_id=None,
            use_cache=False,
            attn_implementation="eager",
        )
    )


def _from_llama(take: Callable[[str], Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    own = {"embedding.weight": take("model.embed_tokens.weight"), "norm.weight": take("model.norm.weight")}
    if not spec.tied_embeddings:
        own["head.weight"] = take("lm_head.weight")
    for layer in range(spec.layers):
        block, hub_block = f"layers.{layer}", f"model.layers.{layer}"
        own[f"{block}.attention_norm.weight"] = take(f"{hub_block}.input_layernorm.weight")
        own[f"{block}.mlp_norm.weight"] = take(f"{hub_block}.post_attention_layernorm.weight")
        if spec.is_latent:
            own |= _latents(take, spec, f"{block}.attention", f"{hub_block}.self_attn")
        for which in "qk" if spec.qk_norm in ("head", "full") else "":
            weight = take(f"{hub_block}.self_attn.{which}_norm.weight")
            own[f"{block}.attention.{which}_norm.weight"] = head_norms(spec, which, weight)
        if spec.qkv_bias:
            q, k, v = (take(f"{hub_block}.self_attn.{which}_proj.bias") for which in "qkv")
            own[f"{block}.attention.qkv_bias"] = _fuse_qkv(q, k, v, spec)
        for part, fused in (("weight", ".weight"), ("bias", "_bias")) if spec.bias else (("weight", ".weight"),):
            if not spec.is_latent:
                q, k, v = (take(f"{hub_block}.self_attn.{which}_proj.{part}") for which in "qkv")
                own[f"{block}.attention.qkv{fused}"] = _fuse_qkv(q, k, v, spec)
            own[f"{block}.attention.out.{part}"] = take(f"{hub_block}.self_attn.o_proj.{part}")
            if not spec.moe.has_experts(layer):
                own |= _gated_mlp(take, f"{block}.mlp", f"{hub_block}.mlp", part, fused)
        if spec.moe.has_experts(layer):
            own |= _experts(take, spec, f"{block}.moe", f"{hub_block}.mlp")
    return own


def _gated_mlp(take: Callable[[str], Tensor], our_path: str, hub_path: str, part: str, fused: str) -> dict[str, Tensor]:
    gate, up = (take(f"{hub_path}.{which}_proj.{part}") for which in ("gate", "up"))
    return {
        f"{our_path}.up{fused}": torch.stack((gate, up)),
        f"{our_path}.down.{part}": take(f"{hub_path}.down_proj.{part}"),
    }


def _experts(take: Callable[[str], Tensor], spec: ModelSpec, our_path: str, hub_path: str) -> dict[str, Tensor]:
    """Theirs are [experts, 2 ffn, H], gate before up, and [experts, H, ffn]."""
    own = {
        f"{our_path}.router.weight": take(f"{hub_path}.gate.weight"),
        f"{our_path}.experts.up": take(f"{hub_path}.experts.gate_up_proj").unflatten(1, (2, -1)),
        f"{our_path}.experts.down": take(f"{hub_path}.experts.down_proj"),
    }
    if spec.moe.shared_experts:
        own |= _gated_mlp(take, f"{our_path}.shared", f"{hub_path}.shared_experts", "weight", ".weight")
    return own


def _latents(take: Callable[[str], Tensor], spec: ModelSpec, our_path: str, hub_path: str) -> dict[str, Tensor]:
    """Latent attention without its output product. Both latents come from one matrix with us."""
    down = take(f"{hub_path}.kv_a_proj_with_mqa.weight")
    own = {f"{our_path}.kv_norm.weight": take(f"{hub_path}.kv_a_layernorm.weight")}
    q_up = "q_proj"
    if spec.latent.q_rank:
        down, q_up = torch.cat((take(f"{hub_path}.q_a_proj.weight"), down)), "q_b_proj"
        own[f"{our_path}.q_norm.weight"] = take(f"{hub_path}.q_a_layernorm.weight")
    own[f"{our_path}.down.weight"] = down
    own[f"{our_path}.q_up.weight"] = take(f"{hub_path}.{q_up}.weight").unflatten(0, (spec.heads, -1))
    own[f"{our_path}.kv_up.weight"] = take(f"{hub_path}.kv_b_proj.weight").unflatten(0, (spec.heads, -1))
    return own


def _from_gpt2(take: Callable[[str], Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    own = {"embedding.weight": take("transformer.wte.weight"), "positions.weight": take("transformer.wpe.weight")}
    if not spec.tied_embeddings:
        own["head.weight"] = take("lm_head.weight")
    for part, fused in (("weight", ".weight"), ("bias", "_bias")):
        own[f"norm.{part}"] = take(f"transformer.ln_f.{part}")
        for layer in range(spec.layers):
            block, hub_block = f"layers.{layer}", f"transformer.h.{layer}"
            # Their Conv1D computes x W + b, so that its weight is [in, out]; its bias is a vector, as ours.
            qkv, out, up, down = (
                tensor.t() if part == "weight" else tensor
                for tensor in (
                    take(f"{hub_block}.{which}.{part}")
                    for which in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
                )
            )
            own[f"{block}.attention_norm.{part}"] = take(f"{hub_block}.ln_1.{part}")
            own[f"{block}.attention.qkv{fused}"] = _fuse_qkv(*qkv.chunk(3), spec)
            own[f"{block}.attention.out.{part}"] = out
            own[f"{block}.mlp_norm.{part}"] = take(f"{hub_block}.ln_2.{part}")
            own[f"{block}.mlp.up{fused}"] = up[None]
            own[f"{block}.mlp.down.{part}"] = down
    return own


def _fuse_qkv(q: Tensor, k: Tensor, v: Tensor, spec: ModelSpec) -> Tensor:
    """[heads x D, ...] of queries and [kv_heads x D, ...] of keys and values, to [kv_heads, Q + 2, D, ...].

    Their query head n attends with key/value head n // Q, so neighbours along the first dim share one.
    """
    groups = [x.reshape(spec.num_kv_heads, -1, spec.head_size, *x.shape[1:]) for x in (q, k, v)]
    return torch.cat(groups, dim=1)
