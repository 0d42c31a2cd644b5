"""Overlapped pairs: what leaves a rank before both parts are done, and the same program without pairs.

What a part of a pair makes can leave as soon as that part is done, and travel while the other part still computes.
`split_pairs` takes pairs apart: the same work in the same order, one action after the other. What pairs gain is the
difference between the two programs.
"""

from dataclasses import replace

from shardwright.schedule.action import RECV, SEND, Action, Kind
from shardwright.schedule.schedule import Program


def sends_of_parts(row: tuple[Action, ...]) -> dict[Action, Action]:
    """The send of each part of a pair that has one, among the messages right behind the pair."""
    found: dict[Action, Action] = {}
    for index, pair in enumerate(row):
        made_by = {(part.stage, part.microbatch, part.kind is Kind.FORWARD): part for part in pair.parts}
        for action in row[index + 1 :] if made_by else ():
            if action.kind not in SEND | RECV:
                break
            part = made_by.get((action.stage, action.microbatch, action.kind is Kind.SEND_FORWARD))
            if part is not None and action.kind in SEND:
                found[part] = action
    return found


def split_pairs(program: Program) -> Program:
    """A program with each pair as its first part, then its second.

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
