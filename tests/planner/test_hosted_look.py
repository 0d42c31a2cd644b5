"""The look for plans with state in host memory begins with the first limit, and again where that was too low."""

import os

import pytest

from shardwright.planner.advice.advice import Advice
from shardwright.planner.advice.hosted_look import HostedLook
from shardwright.planner.search.results import SearchTally
from support.planned import small_job


def look_with(limits: list[float]) -> HostedLook:
    """A look that notes its limits here, and tells its limit as the number of plans and its process as that priced."""

    def look(most: float) -> Advice:
        limits.append(most)
        return Advice(small_job("dense"), [], SearchTally(num_plans=int(most), num_priced=os.getpid()))

    return HostedLook(look)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_first_limit_is_kept_however_many_processes(num_processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.planner.advice.hosted_look.num_processes", lambda: num_processes)
    limits: list[float] = []
    with look_with(limits) as looking:
        looking.begin(7.0)
        looking.begin(3.0)
        tally = looking.result(5.0).tally
    assert tally.num_plans == 7
    assert (tally.num_priced == os.getpid()) == (num_processes == 1)
    assert limits == ([7.0] if num_processes == 1 else [])  # a copy has notes of its own


def test_a_limit_that_was_too_low_is_looked_for_again() -> None:
    limits: list[float] = []
    with look_with(limits) as looking:
        looking.begin(3.0)
        assert looking.result(5.0).tally.num_plans == 5
    assert limits == [5.0]


def test_a_look_that_did_not_begin_takes_the_limit_of_the_result() -> None:
    limits: list[float] = []
    with look_with(limits) as looking:
        assert looking.result(5.0).tally.num_plans == 5
    assert limits == [5.0]
