"""When the gradients of a stage are complete, so that their reduction may begin while a backward still runs."""

from collections.abc import Sequence

from shardwright.schedule.action import Action, Kind


def before_reductions(row: Sequence[Action]) -> dict[int, list[int]]:
    """Index of the last action that adds to a stage's gradients before they are reduced, and those stages."""
    latest: dict[int, int] = {}
    found: dict[int, list[int]] = {}
    for index, action in enumerate(row):
        for part in action.computes():
            if part.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
                latest[part.stage] = index
        if action.kind is Kind.REDUCE:
            found.setdefault(latest[action.stage], []).append(action.stage)
    return found
