"""1F1B: as soon as a backward can run, it runs.

PipeDream-Flush (Narayanan et al. 2021, arXiv 2006.09503, section 2) and DAPPLE (Fan et al. 2021, arXiv 2007.01045,
section 3). The bubble is GPipe's, (p - 1)(F + B), but rank r keeps only min(m, p - r) microbatches alive.
"""

from shardwright.schedule.action import Action, backward, forward
from shardwright.schedule.placement import in_line
from shardwright.schedule.schedule import Schedule


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Warm-up forwards until the first backward can arrive, then one forward and one backward in turn."""
    ranks = []
    for rank in range(num_ranks):
        warmup = min(num_microbatches, num_ranks - 1 - rank)
        row: list[Action] = [forward(rank, i) for i in range(warmup)]
        for i in range(num_microbatches - warmup):
            row += [forward(rank, warmup + i), backward(rank, i)]
        row += [backward(rank, i) for i in range(num_microbatches - warmup, num_microbatches)]
        ranks.append(tuple(row))
    return Schedule("1f1b", num_microbatches, in_line(num_ranks), tuple(ranks))
