"""A batch that grows: its sizes are Megatron's, its faults are told, and a run of it is one rank's under every plan."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.config.base import PlanError
from shardwright.config.batch import BatchSpec, RampSpec
from shardwright.config.job import JobSpec
from shardwright.config.load import load_job, make_job
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.planner.own_plan import estimate, ramp_extra_s
from shardwright.report.explain.update_text import update_sentences
from shardwright.report.prediction_notes import batch_notes
from shardwright.schedule.job_program import plan_faults
from shardwright.train.build import build
from shardwright.train.span import end_of_span, samples_of
from shardwright.train.trainer import train
from shardwright.train.training_run import RunStart
from support.cases import against_one_rank, by_one_rank, record, small_job
from support.ranks import leaves_nothing, run_on_mesh
from support.rounding import check_rounding


@st.composite
def ramps(draw: st.DrawFn) -> BatchSpec:
    start, increment, times = draw(st.integers(1, 20)), draw(st.integers(1, 20)), draw(st.integers(1, 8))
    samples = draw(st.integers(times, 2000))
    full = start + times * increment
    return BatchSpec(global_batch_size=full, ramp=RampSpec(start=start, increment=increment, samples=samples))


def megatrons(batch: BatchSpec, consumed: int) -> int:
    """The size after so many sequences: RampupBatchsizeNumMicroBatchesCalculator of Megatron-LM, in whole numbers."""
    ramp, full = batch.ramp, batch.global_batch_size
    if consumed > ramp.samples:
        return full
    times = (full - ramp.start) // ramp.increment
    return min(full, ramp.start + consumed * times // ramp.samples * ramp.increment)


@given(ramps())
def test_sizes_are_megatrons(batch: BatchSpec) -> None:
    assert batch.faults() == []
    consumed, by_size = 0, dict.fromkeys(batch.sizes(), 0)
    for step in range(batch.num_growing + 2):
        assert batch.samples_before(step) == consumed
        assert batch.size_at(step) == megatrons(batch, consumed)
        by_size[batch.size_at(step)] += 1
        consumed += batch.size_at(step)
    assert batch.steps_by_size(batch.num_growing + 2) == {size: n for size, n in by_size.items() if n}
    assert batch.size_at(batch.num_growing) == batch.global_batch_size
    assert all(batch.size_at(step) % batch.divisor == 0 for step in range(batch.num_growing + 1))
    change = batch.next_change(0)
    assert change is not None and batch.size_at(change) > batch.size_at(change - 1) == batch.size_at(0)


def growing(**fields: Any) -> dict[str, Any]:
    return {"batch": {"global_batch_size": 8, "ramp": {"start": 2, "increment": 2, "samples": 12} | fields}}


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        (growing(start=0), "batch.ramp.increment is 2, and batch.ramp.start 0 says that the batch does not grow"),
        (growing(start=8), "batch.ramp.start 8 is not less than batch.global_batch_size 8"),
        (growing(increment=4), "batch.ramp.increment 4 does not divide what the batch grows by, 8 - 2 = 6; use 3"),
        (growing(increment=0), "use 6"),
        (growing(samples=2), "leaves less than a sequence for each of the 3 sizes"),
        (growing(start=1, increment=1) | {"plan": {"dp": 2}}, "batch.ramp has a batch of 1 on its way from 1 to 8"),
        (
            {"batch": {"global_batch_size": 2**30, "ramp": {"start": 1, "increment": 1, "samples": 2**40}}},
            "may at most 4,096 times",
        ),
    ],
)
def test_what_no_ramp_can_be(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        make_job(fields)


def test_every_size_has_to_go_with_the_schedule() -> None:
    job = make_job(growing() | {"plan": {"pp": 2, "schedule": "dualpipe"}})
    (fault,) = plan_faults(job)
    assert fault.startswith("batch.ramp has a batch of 2, 2 microbatches, on its way to 8: ")


def ramped(kind: str = "llama", **plan: Any) -> JobSpec:
    fields = small_job(kind, batch=8, **plan).model_dump(exclude_unset=True)
    return make_job(fields | growing() | {"optimizer": fields["optimizer"] | {"batch_rule": "sqrt"}})


@pytest.mark.parametrize("plan", [{"dp": 2, "zero": 1}, {"pp": 2}])
def test_steps_are_those_of_one_rank(plan: dict[str, Any]) -> None:
    """Of 2, 2, 4, 6, ... sequences, at rates that follow."""
    job = ramped(**plan)
    assert [job.batch.size_at(step) for step in range(5)] == [2, 2, 4, 6, 8]
    check_rounding(against_one_rank(job, 5), job)
    steps = by_one_rank(job, record, 5).steps
    assert steps[0].learning_rate == pytest.approx(3e-3 / 2 * (2 / 8) ** 0.5)
    assert steps[1].learning_rate == pytest.approx(3e-3 * (2 / 8) ** 0.5)


def test_a_stream_ends_where_the_batch_grows() -> None:
    fields = small_job(pp=2, schedule="gpipe", batch=8).model_dump()
    fields["plan"]["schedule"] = "pipedream"
    fields["optimizer"] |= {"clip_grad_norm": 0.0}
    job = make_job(fields | growing())
    assert plan_faults(job) == []
    ends = run_on_mesh(job, spans, job)[0]
    assert ends == [2, 3, 4, 10]


@leaves_nothing
def spans(mesh: Mesh, job: JobSpec) -> list[int]:
    replica, ends = build(job, mesh), [0]
    while ends[-1] < job.optimizer.steps:
        ends.append(end_of_span(replica, ends[-1]))
    return ends[1:]


def run(mesh: Mesh, job: JobSpec, folder: Path) -> tuple[int, float | None, int]:
    result = train(job, mesh, folder, RunStart())
    return result.steps, result.last_loss, mesh.rank


def test_a_run_goes_on_at_the_right_place(tmp_path: Path) -> None:
    """Stopped after two steps, and gone on with on two ranks: the last loss is that of a run that never stopped."""

    def of(steps: int, **plan: Any) -> JobSpec:
        fields = ramped(**plan).model_dump(exclude_unset=True)
        optimizer = fields["optimizer"] | {"steps": steps, "schedule": "constant"}
        text = {"model": fields["model"] | {"vocab": 256}, "checkpoint": {"every_steps": 1}}
        return make_job(fields | text | {"optimizer": optimizer, "run": {"eval_batches": 1, "log_every": 100}})

    whole = of(5)
    (expected,) = run_on_mesh(whole, run, whole, tmp_path / "whole")
    first, second = of(2), of(5, dp=2, zero=2)
    run_on_mesh(first, run, first, tmp_path / "parts")
    (result, _) = run_on_mesh(second, run, second, tmp_path / "parts")
    assert result[0] == expected[0] == 5
    assert result[1] == pytest.approx(expected[1], rel=1e-5)
    assert samples_of(whole, 0, 5) == 22


def test_what_the_run_takes_is_told_with_it() -> None:
    sets = ["batch.ramp.start=256", "batch.ramp.increment=256", "batch.ramp.samples=100000"]
    plain, job = load_job("llama3-405b-16k", []), load_job("llama3-405b-16k", sets)
    before, result = estimate(plain), estimate(job)
    assert result.step.total == before.step.total  # of the full batch
    extra_s = ramp_extra_s(job, result.step.total)
    assert extra_s > 0
    saved = plain.optimizer.steps - job.tokens_of_run / job.tokens_per_step
    assert result.num_steps_of_run == pytest.approx(plain.optimizer.steps - saved + extra_s / result.step.total)
    answer = list(update_sentences(with_rule(job, "sqrt"), 1.0))
    assert answer[-1].startswith("The batch grows from 256 to 2,048 sequences over the first ")
    assert "follows the root of the batch" in answer[-1] and "35.4 % of its own at first" in answer[-1]
    assert "does not follow the batch." in list(update_sentences(job, 1.0))[-1]


def with_rule(job: JobSpec, rule: str) -> JobSpec:
    return job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"batch_rule": rule})})


def test_what_is_told_of_rates() -> None:
    """Whatever the schedule, and whether the batch grows or not."""
    job = load_job(
        "llama3-405b-16k", ["optimizer.learning_rate=1e-3", "optimizer.steps=300", "optimizer.warmup_steps=20"]
    )
    for schedule, words in (
        ("constant", "rises to 0.001 in 20 steps and stays there."),
        ("cosine", "falls to 0.0001 at the end of 300 steps, as a cosine."),
        ("linear", "falls to 0.0001 at the end of 300 steps, in proportion."),
        ("wsd", "stays there until it falls to 0.0001 at the end of 300 steps, within the last 30."),
        ("inverse-sqrt", "falls with the root of the steps, not below 0.0001."),
    ):
        of = job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"schedule": schedule})})
        assert list(update_sentences(of, 1.0))[-1].endswith(words)
    assert "this does not" in list(update_sentences(with_rule(job, "linear"), 1.0))[-1]
    assert not batch_notes(job)
    grows = load_job("llama3-405b-16k", ["batch.ramp.start=256", "batch.ramp.increment=256", "batch.ramp.samples=9999"])
    assert batch_notes(grows)[0].startswith("the batch grows from 256 to 2,048 sequences over the first ")


def test_a_ramp_that_is_half_said() -> None:
    with pytest.raises(PlanError, match=r"nothing says how: set batch.ramp.increment, which divides 8 - 2 = 6"):
        make_job({"batch": {"global_batch_size": 8, "ramp": {"start": 2}}})
