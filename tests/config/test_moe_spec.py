"""Experts as they are described: overrides and files, which layers have them, and every contradiction."""

from pathlib import Path
from typing import Any

import pytest

from shardwright.config.base import PlanError
from shardwright.config.load import load_job, make_job
from shardwright.config.moe import MoeSpec


def test_a_nested_section_is_overridden_field_by_field(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[model]\nlayers = 2\n[model.moe]\nexperts = 4\ngate = 'switch'\n")
    moe = load_job(str(tmp_path / "job.toml"), ["model.moe.experts=8"]).model.moe
    assert (moe.experts, moe.gate, moe.num_chosen) == (8, "switch", 1)


def test_a_wrong_name_gets_a_hint(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"model\.moe\.expert is not a known field; did you mean experts"):
        load_job("quickstart", ["model.moe.expert=8"])


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"experts": 0}, []),
        ({"experts": 4}, [0, 1, 2, 3, 4, 5]),
        ({"experts": 4, "every": 2}, [1, 3, 5]),  # GShard, Switch and Qwen count so
        ({"experts": 4, "first_dense": 3}, [3, 4, 5]),  # DeepSeek-V3
        ({"experts": 4, "first_dense": 1, "every": 2}, [2, 4]),
    ],
)
def test_which_layers_have_experts(fields: dict[str, Any], layers: list[int]) -> None:
    assert MoeSpec(**fields).layers_with_experts(6) == layers


def test_capacity() -> None:
    """ceil(T k / E x factor), and never more than there are tokens."""
    spec = MoeSpec(experts=8, top_k=2, capacity_factor=1.25)
    assert [spec.capacity(tokens) for tokens in (1, 16, 17, 100)] == [1, 5, 6, 32]
    assert MoeSpec(experts=8).capacity(100) is None
    assert MoeSpec(experts=8, top_k=2, gate="expert-choice").capacity(16) == 4


FAULTS: dict[str, dict[str, Any]] = {
    "model.moe.experts is 0": {"experts": 0, "top_k": 2, "aux_loss": "switch"},
    "model.moe.top_k 9 is more than model.moe.experts 8": {"top_k": 9},
    "the switch gate chooses 1": {"gate": "switch", "top_k": 2},
    "the gshard gate chooses 2": {"gate": "gshard", "top_k": 1},
    "model.moe.partners 1 should be at least": {"gate": "correlation", "top_k": 3, "partners": 1},
    "the correlation gate limits choices after the first": {"gate": "correlation", "top_k": 1},
    "model.moe.normalise is False": {"gate": "gshard", "normalise": False},
    "model.moe.softmax_over is chosen": {"gate": "sigmoid", "softmax_over": "chosen"},
    'model.moe.softmax_over = "chosen" makes': {"softmax_over": "chosen", "normalise": False},
    "model.moe.partners is 3": {"partners": 3},
    "model.moe.bias_update is 0.1": {"bias_update": 0.1},
    "model.moe.num_groups is 2": {"gate": "switch", "num_groups": 2},
    "model.moe.groups_kept is 2": {"groups_kept": 2},
    "model.moe.num_groups 3 does not divide 8": {"num_groups": 3},
    "model.moe.groups_kept 5 is more": {"num_groups": 4, "groups_kept": 5},
    "model.moe.groups_kept 1 x 2 experts": {"num_groups": 4, "top_k": 3},
    'model.moe.group_score = "top2" needs two': {"num_groups": 8, "groups_kept": 2},
    "model.moe.shared_ffn is 8": {"shared_ffn": 8},
    "model.moe.shared_gate is True": {"shared_gate": True},
    "model.moe.first_dense 4 and every 1 leave none of 4": {"first_dense": 4},
    "model.moe.aux_scope is global": {"aux_scope": "global"},
    "model.moe.aux_coefficient is 0.1": {"aux_coefficient": 0.1},
    "model.moe.overflow is reroute": {"overflow": "reroute"},
    'model.moe.aux_loss = "switch" evens out': {"gate": "expert-choice", "aux_loss": "switch"},
    "model.moe.overflow is drop-probability": {
        "gate": "expert-choice", "capacity_factor": 2.0, "overflow": "drop-probability",
    },
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_every_contradiction_is_told(fault: str) -> None:
    with pytest.raises(PlanError) as refusal:
        make_job({"model": {"moe": {"experts": 8} | FAULTS[fault]}})
    faults = refusal.value.faults
    assert any(fault in text for text in faults), faults
    assert len(faults) == 1
    assert "; " in faults[0] or ", so that " in faults[0]  # a way out


def test_several_at_once() -> None:
    with pytest.raises(PlanError) as refusal:
        make_job({"model": {"moe": {"experts": 8, "top_k": 9, "shared_ffn": 4, "overflow": "reroute"}}})
    assert len(refusal.value.faults) == 3


PLAN_FAULTS: dict[str, dict[str, Any]] = {
    "plan.ep 2 spreads experts, and model.moe.experts is 0": {"plan": {"dp": 2, "ep": 2}, "model": {}},
    "plan.ep 3 does not divide 8 experts": {"plan": {"dp": 3, "ep": 3}, "batch": {"global_batch_size": 3}},
    "does not divide the width 9 of an expert": {"plan": {"tp": 2}, "model": {"moe": {"experts": 8, "ffn": 9}}},
    "does not divide the width 7 of the shared": {
        "plan": {"tp": 2}, "model": {"moe": {"experts": 8, "shared_experts": 1, "shared_ffn": 7}},
    },
    "precision.float8_weight_gradients is for products in fp8": {"precision": {"float8_weight_gradients": True}},
    "precision.float8_dispatch is for tokens": {"precision": {"float8_dispatch": True}, "model": {}},
    "routers of experts learn from whole steps": {"plan": {"pp": 2, "schedule": "pipedream-2bw"}},
}  # fmt: skip


@pytest.mark.parametrize("fault", PLAN_FAULTS)
def test_experts_and_the_rest_of_a_job(fault: str) -> None:
    with pytest.raises(PlanError) as refusal:
        make_job({"model": {"moe": {"experts": 8}}} | PLAN_FAULTS[fault])
    (text,) = refusal.value.faults
    assert fault in text and "; " in text
