"""ZB-H2: twice the warm-up, and no rank idles between its first and its last action. Qi et al. 2024
(arXiv 2401.10241), figure 3, bottom.

Rank 0 runs 2p - 1 forwards before its first backward, as many as it takes for a gradient to come back from the last
rank; in the end weight gradients fill the wait. A rank's own span then has a bubble of (p - 1)(F + I - 2W), and none
where F + I <= 2W. One step alone still takes (p - 1)F longer than its work, because ranks begin one after the other;
that is hidden only if the next step may begin before the last rank has ended this one: with no barrier at the
optimizer step. The price is memory: every rank keeps min(m, 2p - 1) microbatches alive.
"""

from shardwright.schedule.generators.row_writer import Row
from shardwright.schedule.schedule import Schedule
from shardwright.sharding.stage_placement import in_line


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """Warm-up of 2(p - r) - 1 forwards; weight gradients run 2r microbatches late."""
    rows = []
    for rank in range(num_ranks):
        row = Row([rank], [range(num_microbatches)])
        row.write("F0", times=2 * (num_ranks - rank) - 1)
        row.write("I0 F0", times=2 * rank)
        row.write("I0 W0 F0", times=num_microbatches - 2 * rank)
        row.write("W0", times=2 * rank)
        rows.append(row.actions())
    return Schedule("zb-h2", num_microbatches, in_line(num_ranks), tuple(rows))
