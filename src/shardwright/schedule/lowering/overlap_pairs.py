"""Find the send of each part of an overlapped pair, and rewrite a program without pairs.

The result of one part can leave as soon as that part is done, and travel while the other part still computes.
`split_pairs` takes pairs apart: the same work in the same order, one action after the other. The gain of pairs is the
difference between the two programs.
"""

from dataclasses import replace

from shardwright.schedule.action import RECV, SEND, Action, Kind
from shardwright.schedule.schedule import Program


def sends_of_parts(row: tuple[Action, ...]) -> dict[Action, Action]:
    """Map each part of a pair to its send, if it has one among the messages right after the pair."""
    sends: dict[Action, Action] = {}
    for index, pair in enumerate(row):
        if pair.kind is not Kind.OVERLAP:
            continue
        part_by_result = {(part.stage, part.microbatch, part.kind is Kind.FORWARD): part for part in pair.parts}
        for action in row[index + 1 :]:
            if action.kind not in SEND | RECV:
                break
            part = part_by_result.get((action.stage, action.microbatch, action.kind is Kind.SEND_FORWARD))
            if part is not None and action.kind in SEND:
                sends[part] = action
    return sends


def split_pairs(program: Program) -> Program:
    """Replace each overlapped pair by its two parts, one after the other.

    The first part's output is sent before the second part runs, as in any program without pairs. Messages keep their
    order, so the program still can't deadlock.
    """
    return replace(program, ranks=tuple(_split(row) for row in program.ranks))


def _split(row: tuple[Action, ...]) -> tuple[Action, ...]:
    rewritten: list[Action] = []
    index = 0
    while index < len(row):
        action = row[index]
        index += 1
        if action.kind is Kind.OVERLAP:
            first, second = action.parts
            end = _end_of_send(row, index, first)
            rewritten += [first, *row[index:end], second]
            index = end
        else:
            rewritten.append(action)
    return tuple(rewritten)


def _end_of_send(row: tuple[Action, ...], begin: int, compute_action: Action) -> int:
    """Returns the index after the send of the result of `compute_action` if this send is the first one at or after
    `begin`. Otherwise returns `begin`."""
    for index in range(begin, len(row)):
        action = row[index]
        if action.kind in SEND:
            sends_result = (action.stage, action.microbatch) == (compute_action.stage, compute_action.microbatch)
            return index + 1 if sends_result else begin
        if action.kind not in RECV:
            break
    return begin
