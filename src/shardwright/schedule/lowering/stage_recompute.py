"""Recompute of whole stages instead of keeping activations. Chen et al. 2016 (arXiv 1604.06174).

A stage keeps only the input of a microbatch that waits for its gradient. Right before the backward, C runs the forward
again from that input. C needs nothing from other ranks, and the receive of the gradient comes before C in the list. So
C runs while the gradient travels, and it costs time only if the rank would otherwise have computed something else.
"""

from dataclasses import replace

from shardwright.schedule.action import Action, Kind
from shardwright.schedule.schedule import AnySchedule


def add_recompute(program: AnySchedule) -> AnySchedule:
    """A program with a C before each B or I, or before the pair that has the B or I.

    No C is added if a backward follows its own forward with no computation between, as on the last stage of 1F1B: it
    would not shorten the life of any activation.
    """
    return replace(program, ranks=tuple(_with_recompute(row) for row in program.ranks))


def _with_recompute(row: tuple[Action, ...]) -> tuple[Action, ...]:
    rewritten: list[Action] = []
    just_run: set[tuple[int, int]] = set()  # (stage, microbatch) of the forwards in the previous computation
    for action in row:
        parts = action.computes()
        for part in parts:
            key = part.stage, part.microbatch
            if part.kind in (Kind.BACKWARD, Kind.INPUT_GRAD) and key not in just_run:
                rewritten.append(Action(Kind.RECOMPUTE, *key))
        rewritten.append(action)
        if parts:
            just_run = {(part.stage, part.microbatch) for part in parts if part.kind is Kind.FORWARD}
    return tuple(rewritten)
