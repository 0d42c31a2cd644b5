"""The account of a job with many microbatches is that of one with as few as fill its pipeline."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.memory.job_memories import as_full
from shardwright.memory.job_memory import job_memory
from shardwright.schedule.job_program import plan_faults
from support.cases import EXPERTS, FURTHER, KINDS, small_job


@st.composite
def jobs(draw: st.DrawFn) -> JobSpec:
    """A job with more microbatches than fill its pipeline, under any plan."""
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    pp, dp, zero = draw(st.sampled_from([1, 2, 3, 4, 6])), draw(st.sampled_from([1, 2, 4])), draw(st.integers(0, 3))
    microbatch_size = draw(st.sampled_from([1, 2]))
    plan = {
        "dp": dp, "pp": pp, "zero": zero, "schedule": schedule, "microbatch_size": microbatch_size,
        "virtual_stages": draw(st.sampled_from([2, 3])) if schedule in ("interleaved-1f1b", "looped-bfs") else 1,
        "extra_warmup": draw(st.integers(0, 2)) * (schedule == "1f1b"),
        "recompute": draw(st.sampled_from(["none", "full", "selective"])),
        "reduce_each": draw(st.sampled_from(["auto", "run", "microbatch"])),
        "offload_activations": draw(st.booleans()), "offload_optimizer": draw(st.sampled_from([0.0, 0.5])),
    }  # fmt: skip
    num_microbatches = draw(st.integers(4 * pp + 1, 12 * pp))
    kind = draw(st.sampled_from([*KINDS, *EXPERTS, *FURTHER]))
    try:
        return small_job(kind, batch=dp * microbatch_size * num_microbatches, **plan)
    except PlanError:
        return small_job("llama", batch=48, pp=2)


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_few_microbatches_fill_a_pipeline_as_much(job: JobSpec) -> None:
    if not plan_faults(job):
        assert job_memory(as_full(job)) == job_memory(job)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "dualpipev", "zb-h2"])
def test_few_are_asked_for_where_they_fill_it(schedule: str) -> None:
    job = small_job("llama", batch=512, pp=4, schedule=schedule)
    assert 16 <= as_full(job).num_microbatches < 24


@pytest.mark.parametrize("schedule", ["gpipe", "looped-bfs", "auto", "pipedream"])
def test_all_are_asked_for_where_each_is_kept(schedule: str) -> None:
    job = small_job("llama", batch=512, pp=4, schedule=schedule, virtual_stages=2 if schedule == "looped-bfs" else 1)
    assert as_full(job) is job
