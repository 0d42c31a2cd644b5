"""Every synchronous schedule, run for real: gradients of one rank, order as planned, activations as predicted."""

from typing import Any

import pytest
import torch

from shardwright.config.job import JobSpec
from shardwright.measure.verdict import Record, compare
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.schedule.action import Kind
from shardwright.schedule.buffer_lifetimes import Buffer, peak, peak_activations
from shardwright.schedule.job_program import job_program
from shardwright.train.build import build
from support.cases import by_one_rank, record, record_after, small_job, train
from support.ranks import leaves_nothing, run_on_mesh
from support.rounding import check_rounding

# Those that run every stage's backwards, and its weight gradients, in the order of the microbatches.
IN_ORDER = ("sequential", "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipev")
SYNCHRONOUS = (*IN_ORDER, "looped-bfs", "dualpipe", "auto")
LOOPED = ("interleaved-1f1b", "looped-bfs", "auto")


def job_for(schedule: str, pp: int, kind: str = "llama", **fields: Any) -> JobSpec:
    # Microbatches enough for what is between warm-up and cool-down.
    num_microbatches = 6 if pp == 2 else 2 * pp
    plan = {"pp": pp, "schedule": schedule, "batch": num_microbatches * fields.get("dp", 1)} | fields
    if schedule in LOOPED:
        plan["virtual_stages"] = 2
    return small_job(kind, **plan)


@leaves_nothing
def run_and_watch(mesh: Mesh, job: JobSpec) -> tuple[Record, list[str], tuple[int, int]]:
    """The record of two steps, and what was done and kept in the last of them."""
    replica = build(job, mesh)
    steps = train(replica, mesh, job, 2)
    # Before the record is taken: it evaluates, and the executor only knows of its last run.
    performed = [str(entry.action) for entry in replica.executor.performed]
    peaks = replica.executor.peak_alive, replica.executor.peak_inputs
    assert all(stage.deferred.num_kept() == 0 for stage in replica.stages.values())
    return record_after(steps, replica, mesh, job), performed, peaks


def check(job: JobSpec, bitwise: bool) -> None:
    one, _, _ = by_one_rank(job, run_and_watch)
    results = run_on_mesh(job, run_and_watch, job)
    verdict = compare([record for record, _, _ in results], one)
    if bitwise:
        assert verdict.bitwise
    check_rounding(verdict, job)
    program = job_program(job)
    alive, inputs = peak_activations(program), peak(program, Buffer.INPUT)
    for rank, (_, performed, peaks) in enumerate(results):
        position = rank // (job.plan.dp * job.plan.tp)
        assert performed == [str(action) for action in program.ranks[position]]
        assert peaks == (alive[position], inputs[position])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_equals_one_rank(schedule: str, pp: int) -> None:
    check(job_for(schedule, pp), bitwise=schedule in IN_ORDER)


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipev", "interleaved-1f1b", "zb-h2"])
def test_tied_embeddings_and_learned_positions(schedule: str) -> None:
    """Where the placement is a V both uses of the table are on rank 0; elsewhere they are on two ranks."""
    check(job_for(schedule, 2, "gpt-tied"), bitwise=True)


def test_tied_embeddings_in_two_directions() -> None:
    check(job_for("dualpipe", 2, "gpt-tied"), bitwise=False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-v", "dualpipev", "dualpipe"])
@pytest.mark.parametrize("fields", [{"tp": 2, "sequence_parallel": True}, {"dp": 2}], ids=["tp2", "dp2"])
def test_with_tensor_and_data_parallel(schedule: str, fields: dict[str, Any]) -> None:
    check(job_for(schedule, 2, **fields), bitwise=False)


def test_extra_warmup() -> None:
    job = job_for("1f1b", 4, extra_warmup=2)
    assert peak_activations(job_program(job)) == [6, 5, 3, 1]
    check(job, bitwise=True)


def test_zero_bubble_schedules_really_split() -> None:
    kinds = {action.kind for row in job_program(job_for("zb-v", 2)).ranks for action in row}
    assert {Kind.INPUT_GRAD, Kind.WEIGHT_GRAD} <= kinds
    pairs = [a for row in job_program(job_for("dualpipev", 4)).ranks for a in row if a.kind is Kind.OVERLAP]
    assert pairs


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_recompute(schedule: str) -> None:
    """Bit for bit what one rank gives that keeps everything, and in no more memory than planned."""
    job = job_for(schedule, 4, recompute="stage")
    program = job_program(job)
    assert program.recomputed or schedule == "sequential"
    check(job, bitwise=schedule in IN_ORDER)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "dualpipev"])
@pytest.mark.parametrize("fields", [{"tp": 2, "sequence_parallel": True}, {"dp": 2}], ids=["tp2", "dp2"])
def test_recompute_with_tensor_and_data_parallel(schedule: str, fields: dict[str, Any]) -> None:
    check(job_for(schedule, 2, recompute="stage", **fields), bitwise=False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
@pytest.mark.parametrize("fields", [{}, {"tp": 2, "sequence_parallel": True}, {"dp": 2}], ids=["pp", "tp2", "dp2"])
def test_recompute_changes_no_bit(schedule: str, fields: dict[str, Any]) -> None:
    """The same ranks with and without it."""
    once, again = (job_for(schedule, 2, recompute=which, **fields) for which in ("none", "stage"))
    left, right = (run_on_mesh(job, record, job, 2) for job in (once, again))
    for own, reference in zip(left, right, strict=True):
        assert own.steps == reference.steps
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(own.boxes, reference.boxes, strict=True))
