"""Overlapped pairs: the sends that leave before both parts of a pair are done, and a program without pairs.

The product of one part can leave as soon as that part is done, and travel while the other part still computes.
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
        makers = {(part.stage, part.microbatch, part.kind is Kind.FORWARD): part for part in pair.parts}
        for action in row[index + 1 :] if makers else ():
            if action.kind not in SEND | RECV:
                break
            part = makers.get((action.stage, action.microbatch, action.kind is Kind.SEND_FORWARD))
            if part is not None and action.kind in SEND:
                sends[part] = action
    return sends


def split_pairs(program: Program) -> Program:
    """A program with each pair as its first part, then its second.

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


def _end_of_send(row: tuple[Action, ...], begin: int, computed: Action) -> int:
    """The index after the send of a computation's product, if that is the first send from `begin` on; else `begin`."""
    for index in range(begin, len(row)):
        kind = row[index].kind
        if kind in SEND:
            is_of_computed = (row[index].stage, row[index].microbatch) == (computed.stage, computed.microbatch)
            return index + 1 if is_of_computed else begin
        if kind not in RECV:
            break
    return begin
