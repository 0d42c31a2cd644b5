"""DualPipeV: DualPipe cut in half, with one copy of the parameters. Sea AI Lab 2025 ("Cut-in-half"), and
github.com/deepseek-ai/DualPipe, dualpipev.py.

The second half of DualPipe's ranks mirrors the first. So drop it, and let every microbatch turn around at the last
rank: stages lie in a V, s and 2p - 1 - s on rank s, and what was the other direction is now the way back. Forward of
one chunk and backward of the other still run as one action. For 2p stages on p ranks the bubble is
(p - 1)(F&B + B - 3W), of a chunk's times (half a rank's), exactly so where F = I >= W. Every rank keeps 2p + 1 halves
alive: p + 1/2 microbatches of all its layers.
"""

from shardwright.schedule.generators.dualpipe import eight_phases
from shardwright.schedule.generators.row_writer import Row
from shardwright.schedule.schedule import Schedule
from shardwright.sharding.stage_placement import vee


def dualpipev(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipe's eight phases, all ranks being on the way to the turn."""
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
        f"dualpipev needs m >= 2p microbatches: m {num_microbatches} < 2 x {num_ranks} = {least}; use {least} or more"
    ]
