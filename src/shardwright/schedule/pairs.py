"""A program with its overlapped pairs taken apart: the same work in the same order, one action after the other.

What pairs gain is the difference between the two programs.
"""

from dataclasses import replace

from shardwright.schedule.action import RECV, SEND, Action, Kind
from shardwright.schedule.schedule import Program


def split_pairs(program: Program) -> Program:
    """The same program with each pair as its first part, then its second.

    The first part's output is sent before the second part runs, as in any program without pairs. Messages keep their
    order: so what could not deadlock still can't.
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
            sent = _behind_send(row, index, first)
            rewritten += [first, *row[index:sent], second]
            index = sent
        else:
            rewritten.append(action)
    return tuple(rewritten)


def _behind_send(row: tuple[Action, ...], begin: int, computed: Action) -> int:
    """The index behind the send of what was computed, if that is the first send from `begin` on; else `begin`."""
    for index in range(begin, len(row)):
        kind = row[index].kind
        if kind in SEND:
            is_its = (row[index].stage, row[index].microbatch) == (computed.stage, computed.microbatch)
            return index + 1 if is_its else begin
        if kind not in RECV:
            break
    return begin
