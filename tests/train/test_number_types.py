"""Number types in training: 16 bits and fp8 follow float32, and plans don't change what they compute."""

from typing import Any

import pytest
import torch

from shardwright.config.job import JobSpec
from shardwright.config.precision import PrecisionSpec
from shardwright.measure.verdict import Record
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.schedule.job_program import plan_faults
from shardwright.train.build import build
from shardwright.train.checkpoint.saved_state import SavedState
from support.cases import record, remembered, small_job
from support.cases import train as train_steps
from support.ranks import leaves_nothing, run_on_mesh

SIXTEEN: dict[str, dict[str, Any]] = {
    "bf16": {"compute": "bf16"},
    "bf16-gradients": {"compute": "bf16", "gradients": "compute"},
    "fp16": {"compute": "fp16"},
}
EIGHT: dict[str, dict[str, Any]] = {
    name: {"compute": "bf16", "float8": name} for name in ("delayed", "tensorwise", "rowwise", "blockwise")
}
EIGHT |= {
    f"{name}, weight gradients too": EIGHT[name] | {"float8_weight_gradients": True}
    for name in ("delayed", "rowwise", "blockwise")
}
EVERY = SIXTEEN | EIGHT


def job_in(precision: dict[str, Any], kind: str = "llama", batch: int = 4, **plan: Any) -> JobSpec:
    return small_job(kind, batch=batch, **plan).model_copy(update={"precision": PrecisionSpec(**precision)})


def train(job: JobSpec, steps: int = 10) -> list[Record]:
    return remembered(job, record, steps)


def assert_same_bits(mine: list[Record], expected: list[Record]) -> None:
    whole = {place.name: box for rank in expected for place, box in rank.boxes}
    for rank in mine:
        assert rank.steps == expected[0].steps
        for place, box in rank.boxes:
            assert torch.equal(box, whole[place.name][place.slices]), place.name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", EVERY)
def test_follows_float32(name: str) -> None:
    exact, rounded = train(job_in({}))[0], train(job_in(EVERY[name]))[0]
    for step, other in zip(exact.steps, rounded.steps, strict=True):
        assert other.loss == pytest.approx(step.loss, rel=2e-3 if name in SIXTEEN else 2e-2)
    assert any(step.loss != other.loss for step, other in zip(exact.steps, rounded.steps, strict=True))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", EVERY)
def test_a_pipeline_changes_no_bit(name: str) -> None:
    one = train(job_in(EVERY[name], "gpt-tied", layers=4), 2)
    assert_same_bits(train(job_in(EVERY[name], "gpt-tied", layers=4, pp=2), 2), one)
    assert_same_bits(train(job_in(EVERY[name], "gpt-tied", pp=2, schedule="zb-v"), 2), one)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["bf16", "bf16-gradients", "fp16", "delayed", "rowwise"])
def test_zero_changes_no_bit(name: str) -> None:
    """Of two replicas' sums of one microbatch each."""
    whole = train(job_in(EVERY[name], batch=2, dp=2), 2)
    for zero in (1, 2, 3):
        assert_same_bits(train(job_in(EVERY[name], batch=2, dp=2, zero=zero), 2), whole)


@leaves_nothing
def past_amaxes(mesh: Mesh, job: JobSpec) -> list[dict[str, Any]]:
    """The states of this rank's fp8 layers after two steps, stage by stage."""
    replica = build(job, mesh)
    train_steps(replica, mesh, job, 2)
    return [state.state_dict() for state in replica.float8_states]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plan", [{"pp": 2, "schedule": "dualpipe"}, {"dp": 4, "zero": 3, "zero_ranks": 2}, {"dp": 2}])
def test_every_copy_of_a_layer_remembers_the_same(plan: dict[str, Any]) -> None:
    """Past amaxes are those of all microbatches, whichever copy saw them: as on one rank."""
    fields = {"kind": "gpt", "layers": 4, "batch": 8}
    first, *others = run_on_mesh(job := job_in(EIGHT["delayed"], **fields, **plan), past_amaxes, job)
    (one,) = run_on_mesh(alone := job_in(EIGHT["delayed"], **fields), past_amaxes, alone)
    assert first and all(other == first for other in others)
    for own, expected in zip(first, one, strict=True):
        for name in ("x", "weight", "dy"):  # the first step's have the same weights
            assert own[name]["past"][0] == pytest.approx(expected[name]["past"][0], rel=0.02)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "name",
    ["bf16", "delayed", "tensorwise", "rowwise", "delayed, weight gradients too", "rowwise, weight gradients too"],
)
def test_tensor_parallel_differs_by_rounding_alone(name: str) -> None:
    """Scales are shared over the cut, so what is rounded is the same; sums over tp are rounded to 16 bits."""
    one = train(job_in(EVERY[name]), 2)[0]
    for plan in ({"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"tp": 2, "pp": 2, "schedule": "dualpipev"}):
        cut = train(job_in(EVERY[name], **plan), 2)[0]
        for step, other in zip(one.steps, cut.steps, strict=True):
            assert other.loss == pytest.approx(step.loss, rel=1e-3)


EXPERT_PLANS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "ep": {"dp": 2, "ep": 2},
    "experts cut": {"tp": 2, "sequence_parallel": True, "dp": 2, "ep": 2},
    "computed again": {"recompute": "selective", "recompute_operators": ["up", "activation"]},
    "waiting": {"pp": 2, "schedule": "zb-h1", "zero": 1},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("plan", EXPERT_PLANS)
@pytest.mark.parametrize("name", EIGHT)
def test_experts_follow_float32(name: str, plan: str) -> None:
    """Their products are in fp8 too, which alone tells from a run where only other products are."""
    exact = train(job_in({}, "mixtral", batch=4), 2)[0]
    rounded = train(job_in(EIGHT[name], "mixtral", batch=4, **EXPERT_PLANS[plan]), 2)[0]
    for step, other in zip(exact.steps, rounded.steps, strict=True):
        assert other.loss == pytest.approx(step.loss, rel=2e-2)
    assert any(step.loss != other.loss for step, other in zip(exact.steps, rounded.steps, strict=True))


@leaves_nothing
def expert_amaxes(mesh: Mesh, job: JobSpec) -> dict[str, Any]:
    """The past amaxes of this rank's experts after two steps, by name."""
    replica = build(job, mesh)
    train_steps(replica, mesh, job, 2)
    held = {box.name: box.values.tolist() for box in SavedState(replica, mesh).held()}
    return {name: past for name, past in held.items() if name.startswith("float8") and ".experts." in name}


def test_each_expert_has_its_past_under_its_number() -> None:
    """Of half of the samples on each rank the largest, as of all of them on one."""
    (one,) = run_on_mesh(alone := job_in(EIGHT["delayed"], "mixtral"), expert_amaxes, alone)
    ranks = run_on_mesh(job := job_in(EIGHT["delayed"], "mixtral", dp=2, ep=2, zero=1), expert_amaxes, job)
    assert not set(ranks[0]) & set(ranks[1])
    assert len(one) == 2 * 2 * 4 * 3  # layers, matrices, experts, operands
    result = ranks[0] | ranks[1]
    assert set(result) == set(one)
    for name, (_, first, *_) in one.items():
        if name.endswith("weight"):  # of the first step: the same weights
            assert result[name][1] == first


def test_overflowing_steps_are_left_out_on_all_ranks_alike() -> None:
    huge = {"compute": "fp16", "loss_scale": 2.0**24}
    ranks = train(job_in(huge, dp=2, pp=2))
    steps = ranks[0].steps
    assert all(rank.steps == steps for rank in ranks)
    skipped = [step.skipped for step in steps]
    assert skipped[0] and not skipped[-1]
    assert [step.loss_scale for step in steps[:2]] == [2.0**24, 2.0**23]
    assert skipped == sorted(skipped, reverse=True)  # halved until it fits
    for (place, box), (_, before) in zip(train(job_in(huge), 1)[0].boxes, train(job_in(huge), 0)[0].boxes, strict=True):
        assert torch.equal(box, before), place.name  # the weights stay


def test_the_scale_is_divided_out_of_the_norm() -> None:
    plain, scaled = train(job_in({"compute": "bf16"}), 2), job_in({"compute": "fp16", "loss_scale": 2.0**8})
    assert train(scaled, 2)[0].steps[0].grad_norm == pytest.approx(plain[0].steps[0].grad_norm, rel=1e-2)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_what_needs_a_common_step_is_refused_without_one(schedule: str) -> None:
    """A loss scale and delayed scales are decided at the end of a step, and these schedules have none."""

    def faults(**precision: Any) -> str:
        return " ".join(plan_faults(job_in(precision, pp=2, schedule=schedule)))

    assert "set precision.loss_scale to 0" in faults(compute="fp16")
    assert "use tensorwise, rowwise or blockwise" in faults(compute="bf16", float8="delayed")
    for fine in ({"compute": "bf16"}, {"compute": "fp16", "loss_scale": 0.0}, {"float8": "rowwise"}):
        assert "precision" not in faults(**fine)


def test_sixteen_bit_gradients_can_travel_in_float32() -> None:
    """On four ranks, whose sums in 16 bits would be rounded on the way."""
    precision = {"compute": "bf16", "gradients": "compute", "reduce": "float32"}
    expected = train(job_in(precision, dp=4), 2)
    for zero in (1, 2, 3):
        ranks = train(job_in(precision, dp=4, zero=zero), 2)
        assert ranks[0].steps[-1].loss == pytest.approx(expected[0].steps[-1].loss, rel=1e-3)
    narrow = train(job_in(precision | {"reduce": "gradients"}, dp=4), 2)
    assert narrow[0].steps != expected[0].steps
