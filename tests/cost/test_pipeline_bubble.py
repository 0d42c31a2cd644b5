"""Closed forms of schedules against the programs themselves: what is played, and what ranks keep."""

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from shardwright.config.plan import sums_by_run
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.cost.pipeline_bubble import bubble, in_flight, num_gathers, num_reductions
from shardwright.schedule.action import Kind
from shardwright.schedule.buffer_lifetimes import peak_activations
from shardwright.schedule.lowering.zero3_gathers import add_gathers, reduce_often
from shardwright.schedule.timing import Costs, play
from shardwright.sharding.stage_placement import placement_of
from support.programs import schedule_faults, training_program

# How far off a step may be, as a share of it; formulas that hold are exact.
EXACT = 1e-9
SOLVED = ("auto",)  # whose order follows from costs
WITHIN = {
    name: EXACT
    for name, facts in zip(SCHEDULES, SCHEDULES.values(), strict=True)
    if facts.drains and name not in SOLVED
}
WITHIN |= {"zb-v": 0.02, "v-half": 0.09, "v-min": 0.04}
AMONG_OTHERS = ("zb-h2", "zb-v")


def chunks(name: str, v: int) -> int:
    return SCHEDULES[name].stages_per_rank or v


@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("name", WITHIN)
@given(
    st.integers(3, 6), st.sampled_from([0, 1, 2, 5]), st.sampled_from([2, 3]), st.floats(0.9, 2.2), st.floats(0.6, 1.1)
)
@example(4, 0, 2, 0.9, 1.1)  # backwards whose first half is cheaper than a forward
@example(4, 0, 2, 0.9, 0.95)  # and dearer weight gradients than that, of which a pair is one too few
def test_bubbles_are_those_that_are_played(name: str, p: int, times: int, v: int, i: float, w: float) -> None:
    """From as many microbatches as ranks on."""
    m, v = p * (1 + times), chunks(name, v)
    assume(SCHEDULES[name].idle_s is not None and not schedule_faults(name, p, m, v))
    program = training_program(name, p, m, v)
    share = p / program.num_stages
    costs = Costs.uniform(program.num_stages, share, i * share, w * share)
    if name in AMONG_OTHERS:
        step = play(program, costs, 3).makespan - play(program, costs, 2).makespan
    else:
        step = play(program, costs).makespan
    result = m * (1 + i + w) + bubble(name, p, m, v, 1.0, i, w)
    assert result == pytest.approx(step, rel=WITHIN[name])


@pytest.mark.parametrize("name", WITHIN)
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_ranks_keep_what_their_program_keeps(name: str, p: int) -> None:
    m, v = 4 * p, chunks(name, 3)
    if schedule_faults(name, p, m, v):
        pytest.skip("not a shape of this schedule")
    program = training_program(name, p, m, v)
    of_layers = 2 if name == "dualpipe" else v  # pieces that a rank holds
    expected = [peak / of_layers for peak in peak_activations(program)]
    result = [float(in_flight(name, p, rank, m, v)) for rank in range(p)]
    if name in ("v-half", "v-min"):  # said for all ranks what the fullest keeps
        assert result == [max(result)] * p
        assert max(expected) <= max(result) <= max(expected) + 0.5
    else:
        assert result == expected


@pytest.mark.parametrize("extra", [0, 1, 3])
def test_extra_forwards_are_kept(extra: int) -> None:
    program = training_program("1f1b", 4, 16, extra_warmup=extra)
    result = [float(in_flight("1f1b", 4, rank, 16, 1, extra)) for rank in range(4)]
    assert result == peak_activations(program)


@pytest.mark.parametrize("name", WITHIN)
def test_stages_lie_where_the_program_has_them(name: str) -> None:
    program = training_program(name, 4, 16, chunks(name, 2))
    assert placement_of(name, 4, chunks(name, 2)).holders == program.placement.holders


@pytest.mark.parametrize("name", WITHIN)
@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("each", ["run", "microbatch"])
def test_sharded_gradients_are_reduced_as_often_as_the_program_does(name: str, p: int, each: str) -> None:
    m, v = 8 * p, chunks(name, 3)
    if schedule_faults(name, p, m, v):
        pytest.skip("not a shape of this schedule")
    program = reduce_often(training_program(name, p, m, v), each == "microbatch")
    stages = 2 if name == "dualpipe" else program.num_stages / p
    counted = max(sum(action.kind is Kind.REDUCE for action in row) / stages for row in program.ranks)
    by_run = bool(sums_by_run(name, 1, each))
    rel = 0.15 if SCHEDULES[name].stages_per_rank > 1 else 1e-9
    assert float(num_reductions(name, p, m, by_run)) == pytest.approx(counted, rel=rel)


@pytest.mark.parametrize("name", WITHIN)
@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("rounds", [2, 8])
def test_whole_stages_are_gathered_about_as_often_as_the_program_does(name: str, p: int, rounds: int) -> None:
    m, v = rounds * p, chunks(name, 3)
    if schedule_faults(name, p, m, v):
        pytest.skip("not a shape of this schedule")
    program = add_gathers(training_program(name, p, m, v))
    stages = 2 if name == "dualpipe" else program.num_stages / p
    counted = [sum(action.kind is Kind.GATHER for action in row) / stages for row in program.ranks]
    assert float(num_gathers(name, p, m, v)) == pytest.approx(sum(counted) / p, rel=0.2)
