"""Fields about attention: what contradicts itself, what widths follow, and what it costs."""

import math
from typing import Any

import pytest

from shardwright.config.latent import LatentSpec
from shardwright.config.model import ModelSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.yarn import YarnSpec
from shardwright.sharding.stage_parameters import num_parameters

LATENT: dict[str, Any] = {"kv_rank": 12, "q_rank": 10, "nope_dim": 4, "rope_dim": 4, "value_dim": 6}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"latent": {"q_rank": 8}}, "kv_rank 0 means ordinary attention"),
        ({"latent": LATENT | {"rope_dim": 0, "value_dim": 4}}, "model.latent.rope_dim is 0"),
        ({"latent": LATENT | {"rope_dim": 3}}, "model.latent.rope_dim is 3"),
        ({"latent": LATENT | {"value_dim": 9}}, "nope_dim 4 + rope_dim 4 = 8"),
        ({"latent": LATENT, "kv_heads": 4}, "model.kv_heads is 4"),
        ({"latent": LATENT, "head_dim": 16}, "model.head_dim is 16"),
        ({"latent": LATENT, "bias": True}, "model.bias is True"),
        ({"latent": LATENT, "qk_norm": True}, "model.qk_norm is True"),
        ({"latent": LATENT, "positions": "learned"}, 'model.positions is "learned"'),
        ({"yarn": {"factor": 4.0}, "positions": "learned"}, "model.yarn scales rotary positions"),
    ],
)
def test_contradictions_are_told(fields: dict[str, Any], said: str) -> None:
    faults = ModelSpec(**{"heads": 8} | fields).faults()
    assert len(faults) == 1
    assert said in faults[0]


def test_hidden_need_not_split_into_heads_whose_widths_are_given() -> None:
    assert ModelSpec(hidden=100, heads=8, latent=LatentSpec(**LATENT)).faults() == []
    assert ModelSpec(hidden=128, heads=8, kv_heads=8, latent=LatentSpec(**LATENT)).faults() == []


@pytest.mark.parametrize("q_rank", [0, 10])
def test_matrices_of_latent_attention_are_all_its_parameters_but_norms(q_rank: int) -> None:
    model = ModelSpec(hidden=64, heads=8, latent=LatentSpec(**LATENT | {"q_rank": q_rank}), layers=3)
    norms = 3 * (2 * 64 + 12 + q_rank) + 64
    shape = shape_of(model)
    assert num_parameters(model) == shape.matrix_parameters + model.vocab * 64 + norms
    keys, values = 8 * (4 + 4), 8 * 6
    assert shape.flops_per_token() == 6 * shape.matrix_parameters + 6 * 3 * (keys + values) * model.sequence


def test_deepseek_v3_attention_by_hand() -> None:
    """187 million matrix elements a layer: arXiv 2412.19437, section 4.2, multiplied out."""
    latent = LatentSpec(kv_rank=512, q_rank=1536)
    model = ModelSpec(hidden=7168, heads=128, latent=latent)
    down, out = 7168 * (1536 + 512 + 64), 128 * 128 * 7168
    attention = sum(matrix.num_elements for matrix in shape_of(model).attention_matrices)
    assert attention == down + 1536 * 128 * 192 + 512 * 128 * 256 + out == 187_105_280


def test_a_longer_context_cools_the_softmax() -> None:
    """arXiv 2309.00071, section 3.4: the root of 1 / t is 0.1 ln(s) + 1, and 1 where nothing is scaled."""
    assert ModelSpec(hidden=64, heads=4).softmax_scale == 1 / 4
    scaled = ModelSpec(hidden=64, heads=4, yarn=YarnSpec(factor=40.0))
    assert scaled.softmax_scale == pytest.approx((0.1 * math.log(40) + 1) ** 2 / 4)
