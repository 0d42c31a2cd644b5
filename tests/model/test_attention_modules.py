"""Attention of families whose whole models have more that is theirs alone, layer by layer against transformers': the
same weights, the same result and gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.config.checks.check_model import model_faults
from shardwright.config.model import ModelSpec
from shardwright.config.plan import PlanSpec
from shardwright.model.attention import Attention
from shardwright.model.forward_pass import ForwardPass
from shardwright.model.position_tables import PositionTables
from shardwright.parallel.comm.process_groups import MeshNeeds, make_mesh
from shardwright.parallel.tensor.initial_values import materialise
from shardwright.parallel.tensor.linear import LayerSharding
from shardwright.parallel.tensor.parameter import name_parameters, placed_parameters

SHAPE: dict[str, Any] = {"layers": 6, "hidden": 48, "heads": 6, "vocab": 61, "sequence": 13}
YARN = {"kind": "yarn", "factor": 4.0, "trained_sequence": 8, "fast": 2.0, "slow": 0.25}
ROUNDINGS = 512 * 2.0**-24  # as for whole models (test_hugging_face.py)
Call = Callable[[Tensor], Tensor]


@dataclass
class Theirs:
    """A module, and how it is called with [B, S, H]."""

    module: nn.Module
    call: Call


def common(spec: ModelSpec) -> dict[str, Any]:
    return {
        "vocab_size": spec.vocab, "hidden_size": spec.hidden, "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads, "num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_size,
        "max_position_embeddings": spec.sequence, "rms_norm_eps": spec.norm_epsilon, "attn_implementation": "eager",
    }  # fmt: skip


def plain_rope(spec: ModelSpec) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": spec.rotary_base}


def yarn_rope(spec: ModelSpec) -> dict[str, Any]:
    scaling = spec.rotary_scaling
    return plain_rope(spec) | {
        "rope_type": "yarn", "factor": scaling.factor, "original_max_position_embeddings": scaling.trained_sequence,
        "beta_fast": scaling.fast, "beta_slow": scaling.slow, "truncate": scaling.truncate,
    }  # fmt: skip


def mask(spec: ModelSpec, layer: int) -> Tensor:
    """0 where a token sees another and a very small number elsewhere, [1, 1, S, S]."""
    S, window = spec.sequence, spec.window
    rows, columns = torch.arange(S)[:, None], torch.arange(S)
    sees = columns <= rows
    if spec.is_windowed(layer):
        is_near = rows // window.size == columns // window.size if window.chunked else rows - columns < window.size
        sees = sees & is_near
    return torch.zeros(S, S).masked_fill(~sees, torch.finfo(torch.float32).min)[None, None]


def places(spec: ModelSpec) -> Tensor:
    return torch.arange(spec.sequence)[None]


def gemma2(spec: ModelSpec, layer: int) -> Theirs:
    from transformers import Gemma2Config
    from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, Gemma2RotaryEmbedding

    config = Gemma2Config(
        **common(spec), rope_parameters=plain_rope(spec), sliding_window=spec.window.size,
        query_pre_attn_scalar=round(spec.attention_scale**-2), attn_logit_softcapping=spec.attention_softcap,
    )  # fmt: skip
    module, rotary = Gemma2Attention(config, layer), Gemma2RotaryEmbedding(config)
    return Theirs(module, lambda x: module(x, rotary(x, places(spec)), mask(spec, layer))[0])


def gemma3(spec: ModelSpec, layer: int) -> Theirs:
    from transformers import Gemma3TextConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention, Gemma3RotaryEmbedding

    of_all = plain_rope(spec) | {"rope_type": "linear", "factor": spec.rotary_scaling.factor}
    of_windows = {"rope_type": "default", "rope_theta": spec.window.rotary_base}
    config = Gemma3TextConfig(
        **common(spec), rope_parameters={"full_attention": of_all, "sliding_attention": of_windows},
        sliding_window=spec.window.size, query_pre_attn_scalar=round(spec.attention_scale**-2),
        layer_types=["sliding_attention" if spec.is_windowed(n) else "full_attention" for n in range(spec.layers)],
    )  # fmt: skip
    module, rotary = Gemma3Attention(config, layer), Gemma3RotaryEmbedding(config)
    kind = config.layer_types[layer]
    return Theirs(module, lambda x: module(x, rotary(x, places(spec), kind), mask(spec, layer))[0])


def gpt_oss(spec: ModelSpec, layer: int) -> Theirs:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding

    config = GptOssConfig(
        **common(spec), rope_parameters=yarn_rope(spec), sliding_window=spec.window.size, attention_bias=spec.bias
    )
    module, rotary = GptOssAttention(config, layer), GptOssRotaryEmbedding(config)
    return Theirs(module, lambda x: module(x, rotary(x, places(spec)), mask(spec, layer))[0])


def olmo(spec: ModelSpec, layer: int) -> Theirs:
    from transformers import OlmoConfig
    from transformers.models.olmo.modeling_olmo import OlmoAttention, OlmoRotaryEmbedding

    fields = common(spec)
    del fields["rms_norm_eps"]
    config = OlmoConfig(**fields, rope_parameters=plain_rope(spec), clip_qkv=spec.clip_qkv)
    module, rotary = OlmoAttention(config, layer), OlmoRotaryEmbedding(config)
    return Theirs(module, lambda x: module(x, rotary(x, places(spec)), mask(spec, layer))[0])


def olmo3(spec: ModelSpec, layer: int) -> Theirs:
    from transformers import Olmo3Config
    from transformers.models.olmo3.modeling_olmo3 import Olmo3Attention, Olmo3RotaryEmbedding

    # Layers with a window have positions that are not scaled.
    ropes = {"full_attention": yarn_rope(spec), "sliding_attention": plain_rope(spec)}
    config = Olmo3Config(**common(spec), rope_parameters=ropes, sliding_window=spec.window.size)
    module, rotary, kind = Olmo3Attention(config, layer), Olmo3RotaryEmbedding(config), config.layer_types[layer]
    assert (kind == "sliding_attention") == spec.is_windowed(layer)
    return Theirs(module, lambda x: module(x, rotary(x, places(spec), kind), mask(spec, layer))[0])


def bloom(spec: ModelSpec, layer: int) -> Theirs:
    from transformers import BloomConfig
    from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor

    config = BloomConfig(vocab_size=61, hidden_size=spec.hidden, n_layer=spec.layers, n_head=spec.heads)
    module = BloomAttention(config, layer).eval()

    def call(x: Tensor) -> Tensor:
        alibi = build_alibi_tensor(torch.ones(x.shape[:2]), spec.heads, x.dtype)
        return module(x, torch.zeros_like(x), alibi, mask(spec, layer).expand(len(x), -1, -1, -1))[0]

    return Theirs(module, call)


def llama4(spec: ModelSpec, layer: int) -> Theirs:
    from transformers import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextAttention, Llama4TextRotaryEmbedding

    tuning = spec.temperature_tuning
    config = Llama4TextConfig(
        **common(spec), rope_parameters=plain_rope(spec), use_qk_norm=True, attn_temperature_tuning=True,
        attn_scale=tuning.scale, floor_scale=tuning.floor, attention_chunk_size=spec.window.size,
        no_rope_layers=[int(spec.is_turned(n)) for n in range(spec.layers)], pad_token_id=None,
    )  # fmt: skip
    module, rotary = Llama4TextAttention(config, layer), Llama4TextRotaryEmbedding(config)
    return Theirs(module, lambda x: module(x, rotary(x, places(spec)), mask(spec, layer))[0])


GEMMA2 = {"kv_heads": 2, "head_dim": 10, "attention_scale": 0.25, "attention_softcap": 1.5,
          "window": {"size": 5, "full_every": 2}}  # fmt: skip
GEMMA3 = {"kv_heads": 3, "head_dim": 10, "attention_scale": 0.25, "qk_norm": "head", "rotary_base": 1000.0,
          "rotary_scaling": {"kind": "linear", "factor": 8.0},
          "window": {"size": 5, "full_every": 3, "rotary_base": 100.0, "rotary_scaled": False}}  # fmt: skip
GPT_OSS = {"kv_heads": 2, "head_dim": 10, "bias": True, "sinks": True, "rotary_base": 1000.0,
           "rotary_scaling": YARN | {"truncate": False}, "window": {"size": 4, "full_every": 2}}  # fmt: skip
OLMO3 = {"qk_norm": "full", "kv_heads": 2, "rotary_scaling": YARN,
         "window": {"size": 4, "full_every": 4, "rotary_scaled": False}}  # fmt: skip
LLAMA4 = {"kv_heads": 2, "qk_norm": "l2", "no_rotary_every": 4, "temperature_tuning": {"scale": 0.3, "floor": 4},
          "window": {"size": 5, "full_every": 4, "chunked": True}}  # fmt: skip
CASES: dict[str, tuple[Callable[[ModelSpec, int], Theirs], dict[str, Any], int]] = {
    "gemma2-window": (gemma2, GEMMA2, 2),
    "gemma2-full": (gemma2, GEMMA2, 3),
    "gemma3-window": (gemma3, GEMMA3, 1),
    "gemma3-full": (gemma3, GEMMA3, 2),
    "gpt-oss-window": (gpt_oss, GPT_OSS, 0),
    "gpt-oss-full": (gpt_oss, GPT_OSS, 1),
    "olmo": (olmo, {"clip_qkv": 0.8}, 0),
    "olmo3-window": (olmo3, OLMO3, 2),
    "olmo3-full": (olmo3, OLMO3, 3),
    "bloom": (bloom, {"positions": "alibi", "bias": True}, 0),
    "llama4-chunks": (llama4, LLAMA4, 2),
    "llama4-unturned": (llama4, LLAMA4, 3),
}


def our_weights(tensors: dict[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """Their tensors by our names and in our shapes."""
    groups, width = spec.num_kv_heads, spec.head_size
    own = {}
    for part, fused in (("weight", ".weight"), ("bias", "_bias")):
        if f"query_key_value.{part}" in tensors:  # by head: query, key, value
            own[f"qkv{fused}"] = tensors[f"query_key_value.{part}"].unflatten(0, (spec.heads, 3, width))
            own[f"out.{part}"] = tensors[f"dense.{part}"]
        elif f"q_proj.{part}" in tensors:
            heads = [tensors[f"{which}_proj.{part}"].unflatten(0, (groups, -1, width)) for which in "qkv"]
            own[f"qkv{fused}"] = torch.cat(heads, dim=1)
            own[f"out.{part}"] = tensors[f"o_proj.{part}"]
    if spec.qk_norm == "l2":  # pairs lie side by side with them
        order = torch.cat((torch.arange(0, width, 2), torch.arange(1, width, 2)))
        qk, v = own["qkv.weight"].split((spec.heads // groups + 1, 1), dim=1)
        own["qkv.weight"] = torch.cat((qk[:, :, order], v), dim=1)
    if "sinks" in tensors:
        own["sinks"] = tensors["sinks"].view(groups, -1)
    for which in "qk" if spec.qk_norm in ("head", "full") else "":
        weight = tensors[f"{which}_norm.weight"]
        own[f"{which}_norm.weight"] = weight if spec.qk_norm == "head" else weight.view(groups, -1, width)
    return own


@pytest.mark.parametrize("name", CASES)
def test_attention_is_theirs(name: str) -> None:
    torch.manual_seed(3)
    maker, fields, layer = CASES[name]
    spec = ModelSpec(**SHAPE | fields)
    assert model_faults(spec) == []
    reference = maker(spec, layer)
    with torch.no_grad():
        for key, parameter in reference.module.named_parameters():
            parameter.normal_(0.0, 0.3)
            is_norm = key.endswith("norm.weight")
            parameter.add_(1.0 if is_norm and "gemma" not in name else 0.0)
    cpu = torch.device("cpu")
    own = Attention(spec, LayerSharding.of_tp(make_mesh(MeshNeeds(PlanSpec()), 0, cpu, 30).tp), layer)
    name_parameters(own, cpu, torch.float32)
    materialise(own, 0, cpu)
    # Gemma's norms multiply with one more than their weight.
    more = dict.fromkeys(("q_norm.weight", "k_norm.weight"), 1.0) if "gemma3" in name else {}
    weights = our_weights(dict(reference.module.named_parameters()), spec)
    with torch.no_grad():
        for key, parameter in placed_parameters(own).items():
            parameter.copy_(weights[key] + more.get(key, 0.0))
    x_BSH = torch.randn(3, spec.sequence, spec.hidden)
    dy_BSH = torch.randn(3, spec.sequence, spec.hidden)
    x_theirs, x_ours = x_BSH.clone().requires_grad_(), x_BSH.transpose(0, 1).clone().requires_grad_()
    y_theirs = reference.call(x_theirs)
    run = ForwardPass(PositionTables.of(spec, torch.arange(spec.sequence)), None)
    y_ours = own.out(own.attend(own.project(x_ours), run))
    torch.testing.assert_close(y_ours.transpose(0, 1), y_theirs, rtol=1e-5, atol=1e-5)
    y_theirs.backward(dy_BSH)
    y_ours.backward(dy_BSH.transpose(0, 1))
    assert x_theirs.grad is not None and x_ours.grad is not None
    expected = our_weights({key: p.grad for key, p in reference.module.named_parameters()}, spec)
    results = {key: parameter.gradient for key, parameter in placed_parameters(own).items()}
    assert results.keys() == expected.keys()
    pairs = [(results[key], expected[key]) for key in results] + [(x_ours.grad.transpose(0, 1), x_theirs.grad)]
    for (ours_is, theirs_is), key in zip(pairs, (*results, "x"), strict=True):
        assert (ours_is - theirs_is).abs().max() < ROUNDINGS * theirs_is.abs().max(), key
