"""The list of parameters that is derived without torch is the one that the runtime builds."""

from typing import Any

import pytest
import torch

from cases import KINDS, small_job
from shardwright.model.decoder import DecoderStage, stage_span
from shardwright.parallel.collectives import Axis
from shardwright.parallel.ledger import Ledger
from shardwright.parallel.tensor import Cut
from shardwright.spec import catalog
from shardwright.spec.model import ModelSpec
from shardwright.spec.parameters import model_parameters, num_parameters, stage_parameters

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
@pytest.mark.parametrize("kind", KINDS)
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
