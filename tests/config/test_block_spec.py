"""Fields about blocks: what contradicts itself, and how many parameters follow."""

from typing import Any

import pytest

from shardwright.config.checks.check_model import model_faults
from shardwright.config.model import ModelSpec
from shardwright.sharding.stage_parameters import num_active_parameters, num_parameters

SHAPE: dict[str, Any] = {"layers": 3, "hidden": 32, "heads": 8, "ffn": 40, "vocab": 50, "sequence": 16}


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"parallel_block": "one-norm", "norm_place": "after"}, 'model.norm_place = "after"'),
        ({"parallel_block": "two-norms", "moe": {"experts": 4}}, "model.moe.experts is 4"),
        ({"parallel_block": "two-norms", "latent": {"kv_rank": 12}}, "model.latent is set"),
        ({"activation": "clamped-silu", "gated_mlp": False}, "model.gated_mlp is false"),
        ({"position_offset": 2}, "model.position_offset is 2"),
        ({"norm_bias": False}, "model.norm_bias is false"),
        ({"attention_bias": True, "bias": True}, "model.bias has these too"),
        ({"attention_bias": True, "mlp_bias": True}, "with model.attention_bias it is model.bias"),
        ({"attention_bias": True, "qkv_bias": True}, "model.attention_bias has those of query"),
        ({"mlp_bias": True, "bias": True}, "model.bias has those of the MLP too"),
        ({"mlp_bias": True, "moe": {"experts": 4}}, "experts have biases by model.bias alone"),
        ({"head_bias": True, "tied_embeddings": True}, "the head is the table of embeddings"),
        ({"head_bias": True, "mtp_layers": 1}, "model.mtp_layers use the head too"),
        ({"moe": {"weigh": "input", "router_bias": True}}, "model.moe.router_bias, model.moe.weigh are set"),
    ],
)
def test_contradictions_are_told(fields: dict[str, Any], fault: str) -> None:
    faults = model_faults(ModelSpec(**{"heads": 8} | fields))
    assert len(faults) == 1
    assert fault in faults[0]


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({"norm_weight": False}, -7 * 32),
        ({"norm_place": "after"}, 0),
        ({"norm_place": "around"}, 6 * 32),
        ({"norm_place": "around", "norm": "layernorm"}, (2 * 13 - 7) * 32),
        ({"parallel_block": "one-norm"}, -3 * 32),
        ({"parallel_block": "two-norms"}, 0),
        ({"embedding_norm": True}, 32),
        ({"embedding_scale": 2.0, "residual_scale": 0.5, "logit_scale": 0.1, "logit_softcap": 30.0}, 0),
        ({"positions": "learned", "position_offset": 2}, 18 * 32),
        ({"norm": "layernorm", "norm_bias": False}, 0),
        ({"attention_bias": True}, 3 * (3 * 32 + 32)),
        ({"mlp_bias": True}, 3 * (2 * 40 + 32)),
        ({"head_bias": True}, 50),
    ],
)
def test_parameters_by_hand(fields: dict[str, Any], more: int) -> None:
    assert num_parameters(ModelSpec(**SHAPE | fields)) == num_parameters(ModelSpec(**SHAPE)) + more


def test_biases_of_experts_by_hand() -> None:
    """Of gate and up, and of down, for each expert; two of four are active."""
    plain, biased = ({"moe": {"experts": 4, "ffn": 20, "router_bias": is_biased}} for is_biased in (False, True))
    without, with_biases = ModelSpec(**SHAPE | plain), ModelSpec(**SHAPE | biased | {"bias": True})
    attention, of_expert = 3 * 32 + 32, 2 * 20 + 32
    assert num_parameters(with_biases) - num_parameters(without) == 3 * (attention + 4 * of_expert + 4)
    assert num_active_parameters(with_biases) - num_active_parameters(without) == 3 * (attention + 2 * of_expert + 4)
