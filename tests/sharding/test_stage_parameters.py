"""The list of parameters that is derived without torch is the one that the runtime builds."""

import itertools
from typing import Any

import pytest
import torch

from shardwright.config import catalog
from shardwright.config.model import ModelSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.moe import MoeSpec
from shardwright.model.decoder import DecoderStage, stage_span
from shardwright.parallel.comm.collectives import Axis
from shardwright.parallel.comm.ledger import Ledger
from shardwright.parallel.tensor.linear import LayerSharding
from shardwright.sharding.stage_parameters import (
    model_parameters,
    num_active_parameters,
    num_parameters,
    stage_parameters,
)
from support.cases import ATTENTIONS, BLOCKS, EXPERT_BLOCKS, EXPERTS, KINDS, RULES, small_job

CPU = torch.device("cpu")
PLANS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "sp4": {"tp": 4, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "uneven": {"pp": 3, "layout": [0, 4, 0], "tp": 2, "sequence_parallel": True},
    "interleaved": {"pp": 2, "schedule": "interleaved-1f1b", "virtual_stages": 2},
    "zb-v": {"pp": 2, "schedule": "zb-v"},
}


def axis(size: int, index: int, name: str = "tp") -> Axis:
    return Axis(name, tuple(range(size)), index, None, Ledger(CPU), None)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", [*KINDS, *ATTENTIONS, *RULES, *BLOCKS, "llama-mtp", "gpt-tied-mtp"])
def test_places_are_those_of_the_runtime(kind: str, plan: str) -> None:
    job = small_job(kind, **PLANS[plan])
    for stage in range(job.plan.num_stages):
        for index in range(job.plan.tp):
            cut = LayerSharding.of_tp(axis(job.plan.tp, index), job.plan.sequence_parallel)
            built = DecoderStage(job.model, stage_span(job.plan, job.model.layers, stage), cut)
            regions = built.prepare(CPU, torch.float32).regions()
            expected = {name: [parameter.place for parameter in held] for name, held in regions.items()}
            result = stage_parameters(job.model, job.plan, stage, index)
            assert result == expected
            assert list(result) == list(expected)


@pytest.mark.parametrize(
    "plan", [{}, {"dp": 4, "ep": 2, "tp": 2}, {"tp": 2, "sequence_parallel": True, "ep": 2, "expert_tp": 1}]
)
@pytest.mark.parametrize("kind", [*EXPERTS, *EXPERT_BLOCKS, "deepseek-mtp"])
def test_places_of_experts(kind: str, plan: dict[str, Any]) -> None:
    job = small_job(kind, **plan)
    for tp_index, ep_index in itertools.product(range(job.plan.tp), range(job.plan.ep)):
        tp = axis(job.plan.tp, tp_index)
        expert_tp = tp if job.plan.expert_tp_size == job.plan.tp else tp.alone("etp")
        cut = LayerSharding(
            tp, axis(1, 0, "cp"), axis(job.plan.ep, ep_index, "ep"), expert_tp, job.plan.sequence_parallel
        )
        built = DecoderStage(job.model, stage_span(job.plan, job.model.layers, 0), cut)
        regions = built.prepare(CPU, torch.float32).regions()
        expected = {name: [parameter.place for parameter in held] for name, held in regions.items()}
        assert stage_parameters(job.model, job.plan, 0, tp_index, ep_index) == expected


def test_active_parameters_by_hand() -> None:
    """Mixtral 8x7B: 46.7 billion, of which 12.9 billion compute a token (arXiv 2401.04088, section 1)."""
    mixtral = ModelSpec(
        layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000, moe=MoeSpec(experts=8, top_k=2)
    )
    assert num_parameters(mixtral) == 46_702_792_704
    assert num_active_parameters(mixtral) == 12_879_925_248
    # Matrices alone: neither the embedding nor 65 norms.
    assert shape_of(mixtral).matrix_parameters == 12_879_925_248 - 32000 * 4096 - 65 * 4096


def test_head_width_that_is_not_hidden_over_heads() -> None:
    spec = ModelSpec(hidden=32, heads=4, head_dim=6, kv_heads=2, ffn=40)
    built = DecoderStage(spec, stage_span(small_job().plan, spec.layers, 0), LayerSharding.of_tp(axis(1, 0)))
    regions = built.prepare(CPU, torch.float32).regions()
    assert stage_parameters(spec, small_job().plan, 0) == {n: [p.place for p in held] for n, held in regions.items()}


PUBLISHED = {
    "gpt2": (124_439_808, 124_439_808),
    "llama3-8b": (8_030_261_248, 8_030_261_248),
    # Of checkpoints, as their safetensors say: all parameters; those that compute a token are ours to count.
    "mixtral-8x7b": (46_702_792_704, 12_879_925_248),
    # The released index counts 58 x 256 biases of experts too, which no gradient moves.
    "deepseek-v3": (671_026_419_200 - 58 * 256, 37_552_282_624),
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704),
    "qwen3-235b-a22b": (235_093_634_560, 22_190_763_520),
}
ROUNDED = {  # billions, in all and for a token, as their papers say
    "mixtral-8x7b": (47, 13), "deepseek-v3": (671, 37), "qwen3-30b-a3b": (30.5, 3.3), "qwen3-235b-a22b": (235, 22),
    "switch-base-128": (7.4, None), "gshard-600b": (600, None),
}  # fmt: skip


def model_alone(name: str) -> ModelSpec:
    """A model of the catalog without what predicts further tokens."""
    return ModelSpec(**catalog.read("models", name) | {"mtp_layers": 0, "mtp_weight": 0.3})


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_their_published_size(name: str) -> None:
    spec = model_alone(name)
    assert (num_parameters(spec), num_active_parameters(spec)) == PUBLISHED[name]
    assert len({place.name for place in model_parameters(spec)}) == len(model_parameters(spec))


@pytest.mark.parametrize("name", ROUNDED)
def test_models_with_experts_have_the_size_of_their_papers(name: str) -> None:
    spec = model_alone(name)
    billions, active = ROUNDED[name]
    # GShard's 600 is rounded: 18 layers x 2048 experts x 2 x 1024 x 8192 are 618 already.
    assert num_parameters(spec) / 1e9 == pytest.approx(billions, rel=0.035 if name == "gshard-600b" else 0.007)
    assert active is None or num_active_parameters(spec) / 1e9 == pytest.approx(active, rel=0.02)


def test_module_of_deepseek_has_its_published_size() -> None:
    """11.5 billion parameters of its own, beside the embedding and the head that it shares with the model (README of
    the released weights): a layer, three norms, and the projection of [7168, 2 x 7168]."""
    spec = ModelSpec(**catalog.read("models", "deepseek-v3"))
    places = {place.name: place.num_elements for place in model_parameters(spec)}
    own = sum(size for name, size in places.items() if name.startswith("mtp."))
    last = sum(size for name, size in places.items() if name.startswith("layers.60."))
    assert own == last + 3 * 7168 + 7168 * 2 * 7168 == num_parameters(spec) - num_parameters(model_alone("deepseek-v3"))
    assert own / 1e9 == pytest.approx(11.5, rel=0.01)


@pytest.mark.parametrize("name", [name for name in catalog.names("models") if name.startswith("tiny-")])
def test_tiny_models_have_about_a_million_parameters(name: str) -> None:
    assert 0.8e6 < num_parameters(ModelSpec(**catalog.read("models", name))) < 1.2e6
