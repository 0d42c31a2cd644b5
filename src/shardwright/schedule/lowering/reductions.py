"""The last addition to each stage's gradients before a reduction, so that the reduction may begin while it runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright.schedule.action import ADDS, Action, Kind


@dataclass(frozen=True)
class Arming:
    """A stage whose gradients are reduced after the next addition to them.

    `is_last`: nothing is added between this reduction and the update. Gradients that are kept unsharded can be reduced
    only then: the sum overwrites the local gradients, and a second reduction would count it again. `is_split`: the
    addition is a W, and its I has already added its part.
    """

    stage: int
    is_last: bool
    is_split: bool = False


def before_reductions(row: Sequence[Action]) -> dict[int, list[Arming]]:
    """The stages to arm, by the index of the last action that adds to their gradients before they are reduced."""
    armings: dict[int, list[Arming]] = {}
    reductions: dict[int, Arming] = {}  # by stage: the next reduction without an addition yet
    added: set[int] = set()  # stages whose gradients are added to later, before their update
    for index in reversed(range(len(row))):
        action = row[index]
        if action.kind is Kind.STEP:
            added = set() if action.stage < 0 else added - {action.stage}
        elif action.kind is Kind.REDUCE:
            reductions[action.stage] = Arming(action.stage, is_last=action.stage not in added)
        for part in action.computes():
            if part.kind in ADDS:
                added.add(part.stage)
                if part.stage in reductions:
                    arming = replace(reductions.pop(part.stage), is_split=part.kind is Kind.WEIGHT_GRAD)
                    armings.setdefault(index, []).append(arming)
    assert not reductions, "a reduction follows an addition to the gradients of its stage"
    return armings
