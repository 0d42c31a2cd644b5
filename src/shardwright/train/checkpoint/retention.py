"""Retention of a run's checkpoints, and the order in which a resume tries them. Torch is not needed.

Both depend on the health of a checkpoint (manifest.py, `StateHealth`). A diverging run writes checkpoints that are
newer than the last healthy one: a rule by age alone would remove the healthy one.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from shardwright.config.checkpoint import CheckpointSpec

# A function that returns True if the checkpoint of a step is healthy.
IsHealthy = Callable[[int], bool]


def steps_to_remove(
    steps: Sequence[int], newest: int, spec: CheckpointSpec, is_healthy: IsHealthy, pinned: Collection[int] = ()
) -> list[int]:
    """The steps whose checkpoints may be removed once the checkpoint of the step `newest` exists, oldest first.

    The newest stays, and so do the `keep_last` newest healthy ones; if there are fewer healthy ones, the newest others
    make up the number. So the last healthy one is never removed, and if `keep_last` healthy ones exist, a newest one
    that is not healthy stays in addition to them. Checkpoints of `keep_every`, and `pinned` ones, stay too, and do not
    count. Steps later than `newest` stay: the run resumed from an older checkpoint, and had reasons not to load them.
    """
    candidates = sorted({step for step in steps if step <= newest}, reverse=True)
    healthy = list[int]()
    for step in candidates:  # newest first, and no more than needed: `is_healthy` reads a file
        if len(healthy) < spec.keep_last and is_healthy(step):
            healthy.append(step)
    others = [step for step in candidates if step not in healthy]
    kept = {newest, *healthy, *others[: spec.keep_last - len(healthy)], *pinned}
    return [
        step
        for step in reversed(candidates)
        if step not in kept and not (spec.keep_every and step % spec.keep_every == 0)
    ]


def best_step(losses: Mapping[int, float | None]) -> int | None:
    """The step with the least finite loss, the first if several are equal; None if no loss is finite."""
    finite = [(loss, step) for step, loss in losses.items() if loss is not None and math.isfinite(loss)]
    return min(finite)[1] if finite else None


def healthy_first(steps: Sequence[int], is_healthy: IsHealthy) -> list[int]:
    """The steps in the order in which a resume tries them: the healthy ones, newest first, then the others, newest
    first."""
    newest_first = sorted(steps, reverse=True)
    health = {step: is_healthy(step) for step in newest_first}
    return sorted(newest_first, key=lambda step: not health[step])
