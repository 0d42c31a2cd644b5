"""A schedule that is described in this file alone, as one that somebody adds: GPipe, the last microbatch back first.

No forward of the last stage is far from its backward, and a rank's first backward is of what it has computed last.
"""

from typing import Any

from shardwright.config.schedule_facts import SCHEDULES, ScheduleFacts
from shardwright.schedule.action import backward, forward
from shardwright.schedule.pipeline_shape import of_size
from shardwright.schedule.schedule import Schedule
from shardwright.sharding.stage_placement import in_line, looped
from support.ranks import _on_mesh

NAME = "gpipe-last-first"


def last_first(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then the backwards in the opposite order."""
    there, back = range(num_microbatches), reversed(range(num_microbatches))
    order = [(forward, i) for i in there] + [(backward, i) for i in back]
    rows = tuple(tuple(make(rank, i) for make, i in order) for rank in range(num_ranks))
    return Schedule(NAME, num_microbatches, in_line(num_ranks), rows)


FACTS = ScheduleFacts(
    name=NAME,
    place=25,
    make=of_size(last_first),
    placement=looped,
    bubble="(p - 1) * (F + B)",
    idle_s=lambda p, m, v, f, i, w: (p - 1) * (f + i + w),
    fills_and_drains=True,
    alive=lambda p, rank, m, v, extra_warmup: 1.0 * m,
    keeps_as_1f1b=True,
    num_waits=lambda p, m, v, extra_warmup: 2.0 * (p - 1),
    complexity=0,
    search_place=105,
)


def on_mesh_with_it(rank: int, store: str, *args: Any) -> Any:
    """Do on a rank as `run_on_mesh` does, where there is such a schedule."""
    with SCHEDULES.also(FACTS):
        return _on_mesh(rank, store, *args)
