"""Fields about attention: what contradicts itself, what widths follow, and what it costs."""

import math
from typing import Any

import pytest

from shardwright.config.attention_sections import LatentSpec, WindowSpec
from shardwright.config.checks.check_model import model_faults
from shardwright.config.model import ModelSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.rotary_scaling import RotaryScalingSpec
from shardwright.config.software import software_of
from shardwright.layers.chains import chains
from shardwright.layers.query import PlanGrid
from shardwright.sharding.stage_parameters import num_parameters

LATENT: dict[str, Any] = {"kv_rank": 12, "q_rank": 10, "nope_dim": 4, "rope_dim": 4, "value_dim": 6}


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"latent": {"q_rank": 8}}, "kv_rank 0 means ordinary attention"),
        ({"latent": LATENT | {"rope_dim": 0, "value_dim": 4}}, "model.latent.rope_dim is 0"),
        ({"latent": LATENT | {"rope_dim": 3}}, "model.latent.rope_dim is 3"),
        ({"latent": LATENT | {"value_dim": 9}}, "nope_dim 4 + rope_dim 4 = 8"),
        ({"latent": LATENT, "kv_heads": 4}, "model.kv_heads is 4"),
        ({"latent": LATENT, "head_dim": 16}, "model.head_dim is 16"),
        ({"latent": LATENT, "bias": True}, "model.bias is True"),
        ({"latent": LATENT, "qkv_bias": True}, "model.qkv_bias is True"),
        ({"latent": LATENT, "qk_norm": "head"}, "model.qk_norm is 'head'"),
        ({"latent": LATENT, "rotary_dim": 2}, "model.rotary_dim is 2"),
        ({"latent": LATENT, "no_rotary_every": 2}, "model.no_rotary_every is 2"),
        ({"latent": LATENT, "positions": "learned"}, 'model.positions is "learned"'),
        ({"rotary_scaling": {"kind": "linear"}, "positions": "learned"}, "model.rotary_scaling is of rotary positions"),
        ({"rotary_dim": 4, "positions": "none"}, "model.rotary_dim is of rotary positions"),
        ({"rotary_dim": 5}, "model.rotary_dim is 5"),
        ({"rotary_dim": 18}, "of at most 16"),
        ({"rotary_scaling": {"factor": 4.0}}, 'model.rotary_scaling.factor is not for kind = "none"'),
        ({"rotary_scaling": {"kind": "linear", "slow": 2.0}}, "model.rotary_scaling.slow is not"),
        ({"rotary_scaling": {"kind": "llama3", "slow": 5.0}}, "5 (slow) and 4 (fast)"),
        (
            {"rotary_scaling": {"kind": "longrope", "short_factors": [1.0] * 8, "long_factors": [1.0]}},
            "long_factors has 1 numbers, and 8 pairs",
        ),
        ({"qk_norm": "l2", "positions": "none"}, 'l2" is for what was turned'),
        ({"latent": LATENT, "sinks": True}, "model.sinks is True"),
        ({"latent": LATENT, "window": {"size": 4}}, "model.window is set"),
        ({"window": {"full_every": 2}}, "its size 0 means no windows"),
        ({"window": {"size": 4, "first_full": 4}}, "leaves none of 4 layers a window"),
        ({"window": {"size": 4, "rotary_base": 5.0}, "positions": "alibi"}, "model.window.rotary_base is of rotary"),
        ({"temperature_tuning": {"scale": 0.1}}, "model.no_rotary_every 0 says that none"),
        ({"qkv_bias": True, "bias": True}, "model.bias has those of query, key and value too"),
        ({"qk_norm": "full", "norm": "layernorm"}, "an RMSNorm of all heads"),
    ],
)
def test_contradictions_are_told(fields: dict[str, Any], fault: str) -> None:
    faults = model_faults(ModelSpec(**{"heads": 8} | fields))
    assert len(faults) == 1
    assert fault in faults[0]


def test_hidden_need_not_split_into_heads_whose_widths_are_given() -> None:
    assert model_faults(ModelSpec(hidden=100, heads=8, latent=LatentSpec(**LATENT))) == []
    assert model_faults(ModelSpec(hidden=128, heads=8, kv_heads=8, latent=LatentSpec(**LATENT))) == []


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
    heat = (0.1 * math.log(40) + 1) ** 2
    of_all = RotaryScalingSpec(kind="yarn", factor=40.0, mscale_all_dim=1.0)
    assert ModelSpec(hidden=64, heads=4, rotary_scaling=of_all).softmax_scale == pytest.approx(heat / 4)
    assert of_all.turned_magnitude == 1
    of_turned = RotaryScalingSpec(kind="yarn", factor=40.0)
    assert ModelSpec(hidden=64, heads=4, rotary_scaling=of_turned).softmax_scale == 1 / 4
    assert of_turned.turned_magnitude**2 == pytest.approx(heat)


def test_keys_of_a_window_by_hand() -> None:
    """8 tokens: of a window of 3 they see 1 + 2 + 6 x 3 = 21 keys; as areas, a square of 3 less its half and 5 of 3."""
    window = WindowSpec(size=3)
    pairs = sum(min(position + 1, 3) for position in range(8))
    assert window.keys_seen(8) * 8 / 2 == pytest.approx(3 * 8 - 3**2 / 2)
    assert abs(window.keys_seen(8) * 8 / 2 - pairs) <= 8 / 2
    assert WindowSpec(size=8).keys_seen(8) == WindowSpec(size=9).keys_seen(8) == 8
    chunks = WindowSpec(size=3, chunked=True)
    assert chunks.keys_seen(8) * 8 == 9 + 9 + 4


def test_layers_that_attend_differently_are_kinds_and_cost_differently() -> None:
    """Five layers and one of a further token, of which the third sees all tokens; the second and the fourth turn
    nothing."""
    window = WindowSpec(size=64, full_every=3, first_full=0)
    model = ModelSpec(layers=5, hidden=64, heads=4, sequence=512, window=window, no_rotary_every=2, mtp_layers=1)
    shape = shape_of(model)
    kinds = [shape.kind(number) for number in range(6)]
    windowed, neither = "dense windowed", "dense windowed unturned"
    assert kinds == [windowed, neither, "dense", neither, windowed, windowed]
    assert set(shape.kinds) == set(kinds)
    seen = 512 + 5 * 64 * (2 - 64 / 512)
    assert shape.flops_per_token() == pytest.approx(6 * shape.matrix_parameters + 6 * 2 * 64 * seen)
    assert 3 * sum(shape.stage_flops([2, 3], 7)) == pytest.approx(shape.flops_per_token() * 7 * 512)
    pairs = {
        kind: next(o.scores.pairs for o in chain if o.scores)
        for kind, chain in chains(shape, PlanGrid(tp=2), software_of("shardwright")).items() if kind in kinds
    }  # fmt: skip
    assert pairs["dense"] == 2 * 512 * 512 / 2
    assert pairs[windowed] == pairs[neither] == 2 * (64 * 512 - 64**2 / 2)
    assert [shape.of_kind(kind, 2).kind(1) for kind in shape.kinds] == list(shape.kinds)
