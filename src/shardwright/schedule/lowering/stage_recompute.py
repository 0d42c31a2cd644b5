"""Compute a forward again instead of keeping its activations. Chen et al. 2016 (arXiv 1604.06174), by whole stages.

Of a microbatch that waits for its gradient a stage keeps its input alone. Right before its backward C runs the
forward again, from that input. What C needs is on the rank, and the receive of the gradient stands before C: so C
runs while the gradient is on its way, and costs a forward only where the rank would have computed something else.
"""

from dataclasses import replace

from shardwright.schedule.action import Action, Kind
from shardwright.schedule.schedule import AnySchedule


def add_recompute(program: AnySchedule) -> AnySchedule:
    """A program with a C before each B or I, or before the pair that it is in.

    There is none where a backward follows its own forward with no computation between, as on the last stage of 1F1B:
    nothing would be kept any shorter.
    """
    return replace(program, ranks=tuple(_with_recompute(row) for row in program.ranks))


def _with_recompute(row: tuple[Action, ...]) -> tuple[Action, ...]:
    rewritten: list[Action] = []
    just_run: set[tuple[int, int]] = set()  # forwards in the computation before
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
