"""Retention of a run's checkpoints, and the order in which a run looks for one to resume from. Torch is not needed.

Both know healthy checkpoints from others (manifest.py, `StateHealth`). Those that a diverging run writes are younger
than the last one that is worth something: by age alone they would push it out.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from shardwright.config.checkpoint import CheckpointSpec

# Whether the checkpoint of a step is healthy.
IsHealthy = Callable[[int], bool]


def steps_to_remove(
    steps: Sequence[int], newest: int, spec: CheckpointSpec, is_healthy: IsHealthy, pinned: Collection[int] = ()
) -> list[int]:
    """The steps whose checkpoints need not stay beside the one of the step `newest`, oldest first.

    The newest stays, and so do the `keep_last` newest healthy ones; where there are fewer, the newest of the others
    fill up that number. So the last healthy one is never removed, and a newest one that is not healthy comes on top
    where `keep_last` healthy ones are there. Those of `keep_every`, and those that somebody has `pinned`, stay as well
    and do not count. Steps later than `newest` are left alone: a run that went on from an older checkpoint had reasons
    not to take them.
    """
    before = sorted({step for step in steps if step <= newest}, reverse=True)
    healthy = list[int]()
    for step in before:  # asked newest first, and no more than needed: each answer is a file that is read
        if len(healthy) < spec.keep_last and is_healthy(step):
            healthy.append(step)
    others = [step for step in before if step not in healthy]
    stay = {newest, *healthy, *others[: spec.keep_last - len(healthy)], *pinned}
    return [
        step for step in reversed(before) if step not in stay and not (spec.keep_every and step % spec.keep_every == 0)
    ]


def best_step(losses: Mapping[int, float | None]) -> int | None:
    """The step with the least loss, of those that have a number; the first of several. None where none has."""
    numbers = [(loss, step) for step, loss in losses.items() if loss is not None and math.isfinite(loss)]
    return min(numbers)[1] if numbers else None


def healthy_first(steps: Sequence[int], is_healthy: IsHealthy) -> list[int]:
    """The steps in the order in which a run looks for one to go on from: the newest healthy one, those before it, and
    then the rest, newest first."""
    newest_first = sorted(steps, reverse=True)
    known = {step: is_healthy(step) for step in newest_first}
    return sorted(newest_first, key=lambda step: not known[step])
