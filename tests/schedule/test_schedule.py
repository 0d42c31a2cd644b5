"""Schedules as data: right for any size, equal to the formulas, and wrong ones are found and named."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.schedule.action import Action, Kind, parse
from shardwright.schedule.buffer_lifetimes import peak_activations
from shardwright.schedule.lowering.lower import lower
from shardwright.schedule.lowering.overlap_pairs import sends_of_parts, split_pairs
from shardwright.schedule.program_check import program_faults
from shardwright.schedule.schedule import Program, Schedule
from shardwright.schedule.shape_program import forward_of
from shardwright.sharding.stage_placement import in_line, vee
from support.programs import generated, training_program

names = st.sampled_from(["sequential", "gpipe", "1f1b"])
ranks = st.integers(1, 12)
microbatches = st.integers(1, 24)


@settings(max_examples=60, deadline=None)
@given(names, ranks, microbatches)
def test_programs_are_right(name: str, num_ranks: int, num_microbatches: int) -> None:
    program = training_program(name, num_ranks, num_microbatches)
    assert program_faults(program, most_alive=num_microbatches) == []
    assert program_faults(forward_of(training_program(name, num_ranks, num_microbatches))) == []


@settings(max_examples=60, deadline=None)
@given(names, ranks, microbatches)
def test_peak_activations_are_those_of_the_papers(name: str, num_ranks: int, num_microbatches: int) -> None:
    expected = {
        "sequential": [1] * num_ranks,
        "gpipe": [num_microbatches] * num_ranks,
        "1f1b": [min(num_microbatches, num_ranks - rank) for rank in range(num_ranks)],
    }
    assert peak_activations(training_program(name, num_ranks, num_microbatches)) == expected[name]


def test_every_message_is_sent_once() -> None:
    program = training_program("1f1b", 4, 8)
    sends = [a for row in program.ranks for a in row if a.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)]
    assert len(sends) == 2 * 3 * 8  # both ways over three borders, for each microbatch


def test_1f1b_reads_like_the_figure() -> None:
    computes = [" ".join(str(a) for a in row if a.computes()) for row in training_program("1f1b", 2, 3).ranks]
    assert computes == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]


def test_lowered_program_of_two_stages() -> None:
    assert training_program("1f1b", 2, 2).text() == (
        "rank 0: 0F0 0SF0>1 0F1 0SF1>1 0RB0<1 0B0 0RB1<1 0B1 0R S\n"
        "rank 1: 1RF0<0 1F0 1RF1<0 1B0 1SB0>0 1F1 1B1 1R 1SB1>0 S"
    )


action_texts = ["2C5", "2F5", "0B0", "12I34", "3W1", "2SF5>1", "2RF5<0", "1SB0>0", "1RB0<2", "2G", "2L", "2R", "S"]


@pytest.mark.parametrize("text", [*action_texts, "(3F5+3B2)", "(0F1+1I0)"])
def test_text_round_trip(text: str) -> None:
    assert str(parse(text)) == text


@pytest.mark.parametrize("text", ["", "F", "2X5", "2F5>", "(2F5+)", "-1F2"])
def test_what_is_no_action_is_refused(text: str) -> None:
    if text == "F":  # a forward of no stage is an action of the alphabet, and no program's
        assert parse(text).stage == -1
        return
    with pytest.raises(ValueError, match="is not an action"):
        parse(text)


def program_of(*rows: str, num_microbatches: int) -> Program:
    lists = tuple(tuple(parse(token) for token in row.split()) for row in rows)
    return Program("by hand", num_microbatches, in_line(len(rows)), lists)


def test_split_backward_v_placement_and_pairs_can_be_said_and_lowered() -> None:
    """Needs of later schedules: I and W apart, two stages a rank in a V, a forward and a backward as one."""
    rows = ("0F0 0F1 3F0 (3F1+3I0) 3W0 0I0 3B1 0W0 0B1", "1F0 2F0 1F1 2F1 2I0 1I0 2W0 2B1 1W0 1B1")
    lists = tuple(tuple(parse(token) for token in row.split()) for row in rows)
    program = lower(Schedule("by hand", 2, vee(2), lists))
    assert program_faults(program) == []
    assert peak_activations(program) == [4, 4]
    # Stages 1 and 2 share a rank: nothing is sent between them.
    assert not any(a.stage == 1 and a.kind is Kind.SEND_FORWARD for a in program.ranks[1])
    assert [str(a) for a in program.ranks[0] if a.kind is Kind.REDUCE] == ["3R", "0R"]


GATHERED = ("0G 0F0 0SF0>1 0RB0<1 0B0 0L 0R S", "1RF0<0 1G 1F0 1B0 1L 1R 1SB0>0 S")
RIGHT = ("0F0 0SF0>1 0RB0<1 0B0 0R S", "1RF0<0 1F0 1B0 1R 1SB0>0 S")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (("0F0 0SF0>1 0B0 0R S", RIGHT[1]), "0RB0 has not run"),
        ((RIGHT[0], "1F0 1B0 1R 1SB0>0 S"), "1RF0 has not run"),
        (("0F0 0SF0>1 0RB0<1 0B0 0B0 0R S", RIGHT[1]), "B 2, I 0, W 0"),
        (("0F0 0SF0>1 0RB0<1 0R S", RIGHT[1]), "B 0, I 0, W 0"),
        (("0F0 0SF0>1 0RB0<1 0B0 S", RIGHT[1]), "reduce after the last of them"),
        (("0F0 0SF0>1 0RB0<1 0R 0B0 S", RIGHT[1]), "reduce after the last of them"),
        (("0F0 0SF0>1 0RB0<1 0B0 0R", RIGHT[1]), "at no place; reduce after"),
        (("1F0 0F0 0SF0>1 0RB0<1 0B0 0R S", RIGHT[1]), "stage 1 is held by rank 1"),
        (("0F7 0F0 0SF0>1 0RB0<1 0B0 0R S", RIGHT[1]), "1 microbatches"),
        (("0SF0>1 0F0 0RB0<1 0B0 0R S", RIGHT[1]), "0F0 has not run"),
        ((RIGHT[0], "1RF0<0 1F0 1B0 1R S"), "received is stage 1, microbatch 0"),
        (("0C0 0F0 0SF0>1 0RB0<1 0B0 0R S", RIGHT[1]), "rank 0, action 0 (0C0): 0F0 has not run"),
        (("0F0 0SF0>1 0RB0<1 0B0 0C0 0R S", RIGHT[1]), "rank 0, action 3 (0B0): 0C0 has not run"),
        (("0F0 0SF0>1 0C0 0RB0<1 0C0 0B0 0R S", RIGHT[1]), "0C0 runs 2 times; once is right"),
        ((RIGHT[0], "1RF0<0 1F0 0C0 1B0 1R 1SB0>0 S"), "rank 1, action 2 (0C0): stage 0 is held by rank 0"),
        (GATHERED[:1] + RIGHT[1:], "rank 1, action 1 (1F0): the parameters of stage 1 are not gathered; put 1G before"),
        (("0G 0F0 0SF0>1 0L 0RB0<1 0B0 0R S", GATHERED[1]), "rank 0, action 5 (0B0): the parameters of stage 0 are"),
        (("0G 0F0 0SF0>1 0G 0RB0<1 0B0 0L 0R S", GATHERED[1]), "action 3 (0G): action 0 has gathered stage 0; release"),
        (("0G 0F0 0SF0>1 0RB0<1 0B0 0L 0L 0R S", GATHERED[1]), "rank 0, action 6 (0L): stage 0 is not gathered, so"),
        (("0G 0F0 0SF0>1 0RB0<1 0B0 0R S", GATHERED[1]), "rank 0, action 0 (0G): stage 0 is never released; put 0L"),
        (
            ("0G 0F0 0SF0>1 0RB0<1 0B0 0R S 0L", GATHERED[1]),
            "action 6 (S): stage 0 is still gathered; put 0L before it",
        ),
        (("0G 1G 0F0 0SF0>1 0RB0<1 0B0 0L 1L 0R S", GATHERED[1]), "action 1 (1G): the rank does not hold stage 1, it"),
    ],
)
def test_wrong_programs_are_named(rows: tuple[str, str], says: str) -> None:
    assert program_faults(program_of(*RIGHT, num_microbatches=1)) == []
    assert any(says in fault for fault in program_faults(program_of(*rows, num_microbatches=1)))


def test_messages_in_another_order_are_named() -> None:
    program = program_of(
        "0F0 0F1 0SF0>1 0SF1>1 0RB0<1 0B0 0RB1<1 0B1 0R S",
        "1RF1<0 1RF0<0 1F0 1B0 1SB0>0 1F1 1B1 1SB1>0 1R S",
        num_microbatches=2,
    )
    assert any("message 0 of SF" in fault for fault in program_faults(program))


def test_a_deadlock_is_found() -> None:
    """Both ranks send before they receive: fine on paper, stuck as soon as a send waits for its receive."""
    program = program_of(
        "0F0 0SF0>1 0F1 0SF1>1 0RB0<1 0B0 0RB1<1 0B1 0R S",
        "1RF0<0 1F0 1B0 1SB0>0 1RF1<0 1F1 1B1 1SB1>0 1R S",
        num_microbatches=2,
    )
    faults = program_faults(program)
    assert len(faults) == 1
    assert "deadlock: rank 0 waits at 0SF1>1, rank 1 waits at 1SB0>0" in faults[0]


def test_too_many_alive_are_named() -> None:
    faults = program_faults(training_program("gpipe", 2, 8), most_alive=4)
    assert len(faults) == 2
    assert "rank 0 keeps 8 microbatches alive, and 4 are allowed; the most is at action 14 (0F7)" in faults[0]


def test_right_programs_with_gathers_and_recompute() -> None:
    assert program_faults(program_of(*GATHERED, num_microbatches=1)) == []
    again = ("0G 0F0 0SF0>1 0L 0RB0<1 0G 0C0 0B0 0L 0R S", GATHERED[1])
    assert program_faults(program_of(*again, num_microbatches=1)) == []


def test_too_many_received_are_named() -> None:
    """From its receive on a message has a buffer, whether it is there yet or not."""
    rows = (
        "0F0 0SF0>1 0F1 0SF1>1 0RB0<1 0B0 0RB1<1 0B1 0R S",
        "1RF0<0 1RF1<0 1F0 1F1 1B0 1SB0>0 1B1 1SB1>0 1R S",
    )
    program = program_of(*rows, num_microbatches=2)
    assert program_faults(program, most_received=2) == []
    (fault,) = program_faults(program, most_received=1)
    assert fault == (
        "rank 1 keeps 2 received messages that nothing has used, and 1 are allowed; the most is at action 1 (1RF1<0); "
        "receive later, or compute earlier"
    )


def test_impossible_order_is_refused_when_lowered() -> None:
    right = generated("1f1b", 2, 2)
    backward_first = replace(right, ranks=(right.ranks[0][::-1], right.ranks[1]))
    with pytest.raises(ValueError, match=r"rank 0 can't run 0B1 \(its action 0\)"):
        lower(backward_first)


def test_actions_are_small_and_hashable() -> None:
    assert len({Action(Kind.FORWARD, 0, 1), parse("0F1")}) == 1
    assert not hasattr(parse("0F1"), "__dict__")


@pytest.mark.parametrize(("schedule", "num_ranks"), [("dualpipe", 4), ("dualpipev", 2), ("dualpipev", 5)])
@pytest.mark.parametrize(
    "extra", [{}, {"recompute": "stage"}, {"gathers": True}], ids=["plain", "recompute", "gathers"]
)
def test_a_program_without_its_pairs_is_right(schedule: str, num_ranks: int, extra: dict[str, Any]) -> None:
    program = training_program(schedule, num_ranks, 4 * num_ranks, **extra)
    apart = split_pairs(program)
    assert program_faults(program) == program_faults(apart) == []
    for with_pairs, row in zip(program.ranks, apart.ranks, strict=True):
        assert not any(action.kind is Kind.OVERLAP for action in row)
        assert [a for action in with_pairs for a in action.computes()] == [a for a in row if a.computes()]
        assert [a for a in with_pairs if not a.computes()] == [a for a in row if not a.computes()]


def test_the_first_part_of_a_pair_is_sent_before_the_second_runs() -> None:
    row = "(0F3+3B1) 1RF2<0 0SF3>1 3SB1>1 (3F2+0B0) 3R"
    program = Program("by hand", 4, vee(2), (tuple(map(parse, row.split())), ()))
    assert split_pairs(program).text().splitlines()[0] == "rank 0: 0F3 1RF2<0 0SF3>1 3B1 3SB1>1 3F2 0B0 3R"
    sends = {str(part): str(send) for part, send in sends_of_parts(program.ranks[0]).items()}
    assert sends == {"0F3": "0SF3>1", "3B1": "3SB1>1"}
