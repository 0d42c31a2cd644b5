"""The list of parameters that is derived without torch is the one that the runtime builds."""

import itertools
from typing import Any

import pytest
import torch

from cases import ATTENTIONS, EXPERTS, KINDS, small_job
from shardwright.model.decoder import DecoderStage, stage_span
from shardwright.parallel.collectives import Axis
from shardwright.parallel.ledger import Ledger
from shardwright.parallel.tensor import Cut
from shardwright.spec import catalog
from shardwright.spec.flops import matrix_parameters
from shardwright.spec.model import ModelSpec
from shardwright.spec.moe import MoeSpec
from shardwright.spec.parameters import model_parameters, num_active_parameters, num_parameters, stage_parameters

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
@pytest.mark.parametrize("kind", [*KINDS, *ATTENTIONS])
def test_places_are_those_of_the_runtime(kind: str, plan: str) -> None:
    job = small_job(kind, **PLANS[plan])
    for stage in range(job.plan.num_stages):
        for index in range(job.plan.tp):
            cut = Cut.of_tp(axis(job.plan.tp, index), job.plan.sequence_parallel)
            built = DecoderStage(job.model, stage_span(job.plan, job.model.layers, stage), cut)
            regions = built.prepare(CPU, torch.float32).regions()
            expected = {name: [parameter.place for parameter in held] for name, held in regions.items()}
            found = stage_parameters(job.model, job.plan, stage, index)
            assert found == expected
            assert list(found) == list(expected)


@pytest.mark.parametrize(
    "plan", [{}, {"dp": 4, "ep": 2, "tp": 2}, {"tp": 2, "sequence_parallel": True, "ep": 2, "expert_tp": 1}]
)
@pytest.mark.parametrize("kind", EXPERTS)
def test_places_of_experts(kind: str, plan: dict[str, Any]) -> None:
    job = small_job(kind, **plan)
    for tp_index, ep_index in itertools.product(range(job.plan.tp), range(job.plan.ep)):
        tp = axis(job.plan.tp, tp_index)
        expert_tp = tp if job.plan.expert_tp_size == job.plan.tp else tp.alone("etp")
        cut = Cut(tp, axis(1, 0, "cp"), axis(job.plan.ep, ep_index, "ep"), expert_tp, job.plan.sequence_parallel)
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
    assert matrix_parameters(mixtral) == 12_879_925_248 - 32000 * 4096 - 65 * 4096


def test_head_width_that_is_not_hidden_over_heads() -> None:
    spec = ModelSpec(hidden=32, heads=4, head_dim=6, kv_heads=2, ffn=40)
    built = DecoderStage(spec, stage_span(small_job().plan, spec.layers, 0), Cut.of_tp(axis(1, 0)))
    regions = built.prepare(CPU, torch.float32).regions()
    assert stage_parameters(spec, small_job().plan, 0) == {n: [p.place for p in held] for n, held in regions.items()}


@pytest.mark.parametrize(("name", "published"), [("gpt2", 124_439_808), ("llama3-8b", 8_030_261_248)])
def test_models_have_their_published_size(name: str, published: int) -> None:
    spec = ModelSpec(**catalog.read("models", name))
    assert num_parameters(spec) == published
    assert len({place.name for place in model_parameters(spec)}) == len(model_parameters(spec))
