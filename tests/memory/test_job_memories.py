"""The account of a job with many microbatches is that of one with as few as fill its pipeline."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import job_of_fields, load_job
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.cost.calibration import shipped
from shardwright.cost.from_job import run_of
from shardwright.memory import job_memory as accounts
from shardwright.memory.job_memories import as_full, job_accounts, known_accounts, take_over_accounts
from shardwright.memory.job_memory import job_memory
from shardwright.memory.rank_estimate import rank_memory
from shardwright.schedule.job_program import job_order, job_program, plan_faults, steps_to_fill
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


def test_few_are_asked_for_without_a_pipeline() -> None:
    """A step of a thousand microbatches needs no more than one of six, which is played in a fraction of the time."""
    assert as_full(small_job("llama", batch=1024, zero=3, dp=2)).num_microbatches == 6


@pytest.mark.parametrize("schedule", ["gpipe", "looped-bfs", "auto", "pipedream"])
def test_all_are_asked_for_where_each_is_kept(schedule: str) -> None:
    job = small_job("llama", batch=512, pp=4, schedule=schedule, virtual_stages=2 if schedule == "looped-bfs" else 1)
    assert as_full(job) is job


@pytest.mark.parametrize("base", ["compute", "nf4"])
@pytest.mark.parametrize("dp", [1, 8])
def test_frozen_values_on_the_host_have_no_masters(base: str, dp: int) -> None:
    """ZeRO-3 keeps of a base in host memory what it kept on the device, and nothing is added there: no step updates
    it. A search's closed forms say as much as the account, to a seventh."""
    on_device, on_host = (_adapted(base, dp, is_on_host) for is_on_host in (False, True))
    kept, moved = (job_memory(job)[0] for job in (on_device, on_host))
    assert (moved.parameters_bytes, moved.host_bytes) == (0, kept.parameters_bytes)
    assert (moved.optimizer_bytes, moved.gradients_bytes) == (kept.optimizer_bytes, kept.gradients_bytes)
    (predicted,) = rank_memory(run_of(on_host), shipped())
    assert float(predicted.total) == pytest.approx(moved.total_bytes, rel=1 / 7)


def _adapted(base: str, dp: int, is_on_host: bool) -> JobSpec:
    fields = {
        "model": {"name": "llama3-8b", "sequence": 2048, "adapter": {"rank": 16, "base": base}},
        "cluster": {"device": "a100-sxm-80g", "nodes": 1, "devices_per_node": dp},
        "plan": {"dp": dp, "zero": 3, "offload_parameters": is_on_host, "recompute": "full"},
        "batch": {"global_batch_size": 4 * dp},
        "precision": {"compute": "bf16"},
    }
    return job_of_fields(fields, [], "adapted")


def test_who_reads_known_accounts_changes_none() -> None:
    """Only `take_over_accounts` adds to what is kept, and what it adds is not made again."""
    job = small_job("llama", batch=24, pp=2, tp=2)
    assert known_accounts(job) == {}
    known_accounts(job)[0] = None  # type: ignore[index]
    assert known_accounts(job) == {}
    account = job_memory(job)[0]
    take_over_accounts(job, {0: account})
    assert job_accounts(job)[0] is account


@given(jobs())
@settings(max_examples=20, deadline=None)
def test_ranks_that_share_parts_of_their_accounts_need_what_each_needs_alone(job: JobSpec) -> None:
    assume(not plan_faults(job))
    program = job_program(job, steps_to_fill(job))
    alone = [accounts.rank_memory(job.model_copy(), program, rank) for rank in range(job.plan.pp)]
    assert job_memory(job) == alone
    order, last = job_order(job, steps_to_fill(job)), job.plan.pp - 1
    own_program = order.program([last])
    assert own_program.ranks == (*[()] * last, order.program().ranks[last])  # it has its own list alone
    assert accounts.rank_memory(job.model_copy(), own_program, last) == alone[last]


@pytest.mark.parametrize("zero", [0, 1])
def test_the_ranks_in_the_middle_of_a_pipeline_share_a_replay(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    job, calls, replay = load_job("gpt3-175b-1024", (f"plan.zero={zero}",)), list[int](), accounts.replay
    monkeypatch.setattr(accounts, "replay", lambda *which: calls.append(which[2]) or replay(*which))
    assert len(job_accounts(job)) == 16 and len(calls) <= 4
