"""DualPipeV: DualPipe cut in half, with one copy of the parameters. Sea AI Lab 2025 ("Cut-in-half"), and
github.com/deepseek-ai/DualPipe, dualpipev.py.

The second half of DualPipe's ranks mirrors the first. So it is dropped, and every microbatch turns around at the last
rank: stages lie in a V, s and 2p - 1 - s on rank s, and the way back replaces the other direction. The forward of one
chunk and the backward of the other still run as one action. For 2p stages on p ranks the bubble is
(p - 1)(F&B + B - 3W), in a chunk's times (half a rank's), exact if F = I >= W. Every rank keeps 2p + 1 halves alive:
p + 1/2 microbatches of all its layers.
"""

from typing import Any

from shardwright.config.array_math import least, most, where
from shardwright.config.phrase import say
from shardwright.config.schedule_facts import ScheduleFacts
from shardwright.schedule.generators.dualpipe import eight_phases, paired_idle_s
from shardwright.schedule.generators.row_writer import Row
from shardwright.schedule.pipeline_shape import of_size
from shardwright.schedule.schedule import Schedule
from shardwright.sharding.stage_placement import vee


def dualpipev(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipe's eight phases; all ranks are on the way to the turn."""
    rows = []
    for rank in range(num_ranks):
        row = Row([rank, 2 * num_ranks - 1 - rank], [range(num_microbatches)] * 2)
        eight_phases(row, rank, num_ranks, num_microbatches)
        rows.append(row.actions())
    return Schedule("dualpipev", num_microbatches, vee(num_ranks), tuple(rows))


def dualpipev_faults(num_ranks: int, num_microbatches: int) -> list[str]:
    """Why a shape is not admitted."""
    least = 2 * num_ranks
    if num_microbatches >= least:
        return []
    return [
        say(
            "dualpipev needs m >= 2p microbatches: m {m} < 2 x {ranks} = {least}; use {least} or more",
            m=num_microbatches,
            ranks=num_ranks,
            least=least,
        )
    ]


def _idle_s(p: Any, m: Any, v: Any, f: Any, i: Any, w: Any) -> Any:
    turns = (p - 1) / 2
    return paired_idle_s(turns, most(0, 2 * turns - p / 2), f, i, w)


def _waiting(p: Any, rank: Any, m: Any) -> tuple[Any, Any]:
    """The first rank's only wait is in the steady state, when all of its microbatches are there."""
    return where(rank == 0, 2 * p - 1, p - 1 - rank) / 2, (rank + 1) / 2


FACTS = ScheduleFacts(
    name="dualpipev",
    place=120,
    make=of_size(dualpipev),
    faults=of_size(dualpipev_faults),
    admits=lambda p, m: m >= 2 * p,
    stages_per_rank=2,
    placement=lambda num_ranks, stages_per_rank: vee(num_ranks),
    are_alternating=True,
    pairs=True,
    bubble="(p - 1) * (FB + B - 3 * W) / 2",
    when="F == I and W <= I",
    idle_s=_idle_s,
    alive=lambda p, rank, m, v, extra_warmup: least(2 * m, 2 * p + 1) / 2,
    keeps_as_1f1b=True,
    waiting=_waiting,
    num_gathers=lambda p, m, v: least(m, 1.25 + 1.22 * p),
    num_runs=lambda p, m: 1.0 * m,
    search_place=90,
)
