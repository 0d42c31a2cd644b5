"""ZB-V: zero bubble in the memory of 1F1B. Qi et al. 2024 (arXiv 2401.10241), section 6.

Each rank holds two stages, laid out as a V: down the ranks and back up. The last stage is on rank 0, where the first
is; so each microbatch's loss is known where it began, and its gradient is on its way back at once. Where F = I = W
no rank idles between its first and last action; a step alone takes (p - 1)F / 2 longer than its work. Every rank
keeps 2p halves alive: p microbatches of all its layers. Where F, I and W differ, ranks do wait.

Chunk 0 is the rank's stage on the way down, chunk 1 the one on the way up.
"""

from shardwright.schedule.generators.row_writer import Row
from shardwright.schedule.schedule import Schedule
from shardwright.sharding.stage_placement import vee


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """The order for F = I = W, written for 2p - 1 microbatches or more; those that there are not are left out."""
    rows = []
    for rank in range(num_ranks):
        drawn = max(num_microbatches, 2 * num_ranks - 1)
        row = Row([rank, 2 * num_ranks - 1 - rank], [range(num_microbatches)] * 2)
        row.write("F0", times=2 * (num_ranks - rank) - 1)
        row.write("F1 F0", times=rank)
        row.write("F1 I1 W1", times=num_ranks - rank)
        row.write("F0 I0 W0 F1 I1 W1", times=drawn - num_ranks)
        row.write("I0 I1", times=rank)
        row.write("I0 W0", times=num_ranks - rank)
        row.write("W1", times=rank)
        row.write("W0", times=rank)
        rows.append(row.actions())
    return Schedule("zb-v", num_microbatches, vee(num_ranks), tuple(rows))
