"""The cost of a checkpoint is learned from the ends of steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.train.checkpoint.saving_cost import SavingCost


def learned(steps: list[tuple[float, bool]]) -> SavingCost:
    """After steps of so many seconds, with and without something being written."""
    cost, now_s = SavingCost(), 0.0
    cost.step_ends(now_s, was_saving=False)
    for seconds, was_saving in steps:
        now_s += seconds
        cost.step_ends(now_s, was_saving)
    return cost


PLAIN = [(1.0, False)] * 5


@given(
    waits=st.floats(0.0, 5.0),
    slower=st.lists(st.floats(0.0, 3.0), min_size=0, max_size=4),
    others=st.lists(st.floats(0.9, 1.1), min_size=0, max_size=9),
)
def test_it_is_the_wait_and_what_steps_are_slower_by(waits: float, slower: list[float], others: list[float]) -> None:
    saving = [(1.0 + waits, True), *((1.0 + more, True) for more in slower)]
    cost = learned([*PLAIN, *saving, (1.0, False), *((seconds, False) for seconds in others)])
    assert cost.seconds() == pytest.approx(waits + sum(slower), abs=1e-6)


def test_it_is_not_known_before_one_has_been_written() -> None:
    assert not learned(PLAIN[:4]).knows_steps()
    assert learned(PLAIN).knows_steps()
    assert learned(PLAIN).seconds() is None
    assert learned([*PLAIN, (1.5, True)]).seconds() is None
    assert learned([*PLAIN, (1.5, True), (1.0, False)]).seconds() == pytest.approx(0.5)


def test_the_first_steps_and_one_odd_checkpoint_do_not_matter() -> None:
    saves = [(1.5, True), (1.0, False)]
    cost = learned([(9.0, False), (9.0, False), *PLAIN, *saves, (30.0, True), (1.0, False), *saves])
    assert cost.seconds() == pytest.approx(0.5)


def test_a_checkpoint_that_gains_time_costs_nothing() -> None:
    assert learned([*PLAIN, (0.5, True), (1.0, False)]).seconds() == 0.0
