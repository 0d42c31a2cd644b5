"""Public jobs of several years and all systems are read with the degrees that their files state, and priced."""

import pytest

from interchange.public_jobs import DEGREES, degrees_of, files_of, import_job, public_jobs
from shardwright.memory.budget import meet_budget
from shardwright.planner.own_plan import estimate
from shardwright.schedule.job_program import plan_faults


def test_there_are_some_of_each_system_and_of_several_years() -> None:
    jobs = public_jobs().values()
    assert len(jobs) >= 12 and public_jobs().keys() == DEGREES.keys()
    assert {job["system"] for job in jobs} == {"megatron", "nemo", "torchtitan", "deepspeed", "accelerate"}
    assert {2021, 2022, 2023, 2024, 2025, 2026} == {job["year"] for job in jobs}
    assert all(len(job["commit"]) == 40 and job["paths"] and job["licence"] for job in jobs)


@pytest.mark.parametrize("name", list(DEGREES))
def test_a_public_job_is_read_with_its_degrees_and_priced(name: str) -> None:
    job = public_jobs()[name]
    result = import_job(job, files_of(job))
    assert degrees_of(result) == DEGREES[name]
    assert result.unknown == ()
    assert not plan_faults(result.job)
    priced = estimate(meet_budget(result.job))
    assert 0.02 < float(priced.step.mfu) < 0.85
    assert float(priced.step.total) > 0.01
