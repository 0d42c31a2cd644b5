"""Recompute as a pass over programs: what it adds, where, and what it saves."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.schedule.action import Kind, parse
from shardwright.schedule.buffer_lifetimes import Buffer, lives, most, peak, peak_activations
from shardwright.schedule.lowering.lower import lower
from shardwright.schedule.message_sizes import Sizes
from shardwright.schedule.program_check import program_faults
from shardwright.schedule.schedule import Program, Schedule
from shardwright.schedule.timing import Costs, play
from shardwright.sharding.stage_placement import in_line
from shardwright.simulate.timeline import make_timeline
from support.cases import shapes
from support.programs import training_program

eighths = st.integers(0, 16).map(lambda n: n / 8)


def replayed_peaks(program: Program) -> list[tuple[int, int]]:
    """Activations and inputs at once, by rank, counted by hand: a pair begins before any of it ends."""
    results = []
    for row in program.ranks:
        again = {(a.stage, a.microbatch) for a in row if a.kind is Kind.RECOMPUTE}
        alive, inputs, most_alive, most_inputs = set(), set(), 0, 0
        for action in row:
            for part in action.computes():
                key = part.stage, part.microbatch
                if part.kind is Kind.FORWARD:
                    (inputs if key in again else alive).add(key)
                elif part.kind is Kind.RECOMPUTE:
                    inputs.remove(key)
                    alive.add(key)
            most_alive, most_inputs = max(most_alive, len(alive)), max(most_inputs, len(inputs))
            for part in action.computes():
                key = part.stage, part.microbatch
                if part.kind is Kind.WEIGHT_GRAD or part.kind is Kind.BACKWARD:
                    alive.remove(key)
        assert not alive and not inputs
        results.append((most_alive, most_inputs))
    return results


@settings(max_examples=60, deadline=None)
@given(shapes(), eighths)
def test_any_program_with_recompute_is_right(shape: tuple[str, int, int, int], latency: float) -> None:
    program = training_program(*shape, recompute="stage")
    assert program_faults(program) == []
    peaks = replayed_peaks(program)
    assert list(zip(peak_activations(program), peak(program, Buffer.INPUT), strict=True)) == peaks
    times = play(program, Costs.uniform(program.num_stages, latency=latency))
    timeline = make_timeline(program, times)
    for row, (alive, inputs) in zip(timeline.ranks, peaks, strict=True):
        assert row.kept[Buffer.ACTIVATIONS].most == alive
        assert row.kept[Buffer.INPUT].most == inputs
        starts = [span.start for span in row.spans if span.action.computes()]
        assert starts == sorted(starts)
        assert row.busy + sum(row.idle_by_cause().values()) == pytest.approx(times.makespan)


@settings(max_examples=40, deadline=None)
@given(shapes())
def test_it_adds_to_a_program_and_changes_nothing_else(shape: tuple[str, int, int, int]) -> None:
    with_it, without = training_program(*shape, recompute="stage"), training_program(*shape)
    rows = tuple(tuple(a for a in row if a.kind is not Kind.RECOMPUTE) for row in with_it.ranks)
    assert replace(with_it, ranks=rows) == without
    for row in with_it.ranks:
        for n, action in enumerate(row):
            if action.kind is Kind.RECOMPUTE:  # its backward is next
                key = action.stage, action.microbatch
                assert key in [(p.stage, p.microbatch) for p in row[n + 1].computes() if p.kind is not Kind.FORWARD]


def test_1f1b_keeps_one_microbatch_and_the_inputs_of_the_others() -> None:
    """Rank r still has p - r microbatches on the way. The last computes nothing again: it would keep no less."""
    program = training_program("1f1b", 4, 8, recompute="stage")
    assert peak_activations(program) == [1, 1, 1, 1]
    assert peak(program, Buffer.INPUT) == [4, 3, 2, 0]
    assert {stage for stage, _ in program.recomputed} == {0, 1, 2}
    assert training_program("1f1b", 2, 2, recompute="stage").text() == (
        "rank 0: 0F0 0SF0>1 0F1 0SF1>1 0RB0<1 0C0 0B0 0RB1<1 0C1 0B1 0R S\n"
        "rank 1: 1RF0<0 1F0 1RF1<0 1B0 1SB0>0 1F1 1B1 1R 1SB1>0 S"
    )


def test_it_runs_while_the_gradient_is_on_its_way() -> None:
    """Gradients reach rank 0 at 6 and 9; it has computed again by 3 and by 9, so the step takes no longer."""
    program = training_program("1f1b", 2, 2, recompute="stage")
    times = play(program, Costs.uniform(2, latency=1.0))
    at = {str(action): times.start[0][n] for n, action in enumerate(program.ranks[0])}
    assert [at[name] for name in ("0C0", "0B0", "0C1", "0B1")] == [2.0, 6.0, 8.0, 9.0]
    assert times.makespan == play(training_program("1f1b", 2, 2), Costs.uniform(2, latency=1.0)).makespan == 11.0


def test_where_no_rank_waits_it_costs_a_forward() -> None:
    """A third more, in a step whose bubble does not grow: gpipe on one rank but for the microbatch in the turn."""
    program = training_program("gpipe", 1, 8, recompute="stage")
    assert len(program.recomputed) == 8
    assert play(program, Costs.uniform(1)).makespan == 8 * 4


def test_split_backwards_and_pairs() -> None:
    """An I is what finds the activations and W what ends them; a C comes before the pair that needs it."""
    program = training_program("zb-h1", 2, 4, recompute="stage")
    assert " ".join(str(a) for a in program.ranks[0] if a.computes()) == (
        "0F0 0F1 0C0 0I0 0W0 0F2 0C1 0I1 0W1 0F3 0C2 0I2 0W2 0C3 0I3 0W3"
    )
    paired = training_program("dualpipev", 2, 6, recompute="stage").ranks[0]
    pairs = [n for n, action in enumerate(paired) if action.kind is Kind.OVERLAP]
    assert pairs and any(paired[n - 1].kind is Kind.RECOMPUTE for n in pairs)


def test_a_schedule_that_holds_it_can_be_lowered() -> None:
    rows = tuple(tuple(parse(token) for token in row.split()) for row in ("0F0 0C0 0B0", "1F0 1C0 1B0"))
    assert program_faults(lower(Schedule("by hand", 1, in_line(2), rows))) == []


def test_bytes_of_what_is_kept() -> None:
    """4 microbatches of 1000 bytes at the input of stage 1; those of stage 0 are token ids, which are there anyway."""
    sizes = Sizes(message=1000, reduce=(0, 0, 0), gather=(0, 0, 0), activations=(7, 8, 9))
    program = replace(training_program("gpipe", 3, 4, recompute="stage"), sizes=sizes)
    rows = make_timeline(program, play(program, Costs.uniform(3))).ranks
    assert [row.kept[Buffer.INPUT].most_bytes for row in rows] == [0, 4000, 4000]
    assert [row.kept[Buffer.ACTIVATIONS].most_bytes for row in rows] == [7, 8, 9]
    assert rows[1].kept[Buffer.MESSAGE].most_bytes == rows[1].kept[Buffer.MESSAGE].most * 1000
    unknown = replace(program, sizes=replace(sizes, activations=()))
    row = make_timeline(unknown, play(unknown, Costs.uniform(3))).ranks[1]
    assert row.kept[Buffer.ACTIVATIONS].most_bytes is None
    assert row.kept[Buffer.INPUT].most_bytes == 4000


def test_most_says_where() -> None:
    program = training_program("1f1b", 2, 4)
    alive = [life for life in lives(program, 0) if life.buffer is Buffer.ACTIVATIONS]
    count, index = most(alive)
    assert (count, str(program.ranks[0][index])) == (2, "0F1")
