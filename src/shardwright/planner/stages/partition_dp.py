"""Uneven stages by dynamic programming: which layers go to which rank of a pipeline with a stage a rank.

The time of a step is the sum of the stages plus (m - 1) times the slowest (pieces.py). As in Alpa's inter-operator pass
(Zheng et al. 2022, arXiv 2201.12023, section 5.2) the slowest stage is bounded, the least sum under this bound is found
by dynamic programming over (stage, layers placed), and the bound is varied. What differs: the ranks and their devices
are given, so a stage costs what it costs on its own device; memory counts the microbatches in flight at its place
in the pipeline; and since the least sum only falls as the bound rises, bounds are bisected, not tried one by one.
On devices of one kind all cuts have the same sum, and the smallest bound wins (PipeDream, Narayanan et al. 2019,
section 3.1; DAPPLE, Fan et al. 2020, arXiv 2007.01045).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardwright.config.units import GIB
from shardwright.planner.stages.pieces import PipelineSlot, Stages, may_be_empty, stages_of
from shardwright.sharding.stage_placement import in_line

Floats = npt.NDArray[np.float64]

# Of cuts that are equally fast the most even one is taken: how much evenness weighs against seconds.
_EVENNESS = 1e-7


class NoFitError(ValueError):
    """No cut fits. `excess_bytes` is what the cut that comes nearest has too much, on `rank`."""

    def __init__(self, rank: int, excess_bytes: float, num_layers: int, num_stages: int) -> None:
        self.rank, self.excess_bytes = rank, excess_bytes
        super().__init__(
            f"no cut of {num_layers} layers into {num_stages} stages fits: in the one that comes nearest, pipeline "
            f"rank {rank} needs {excess_bytes / GIB:.1f} GiB more than there is; recompute more, use a smaller "
            f"microbatch, or more tensor or pipeline parallelism"
        )


def check_layers(num_layers: int, num_stages: int) -> None:
    """ValueError if some stage would have nothing to do."""
    needed = sum(not may_be_empty(stage, num_stages) for stage in range(num_stages))
    if num_layers < needed:
        raise ValueError(
            f"{num_stages} stages need at least {needed} layers between embedding and head, and there are "
            f"{num_layers}; use at most {num_layers + 2} stages"
        )


def best_stages(seats: Sequence[PipelineSlot], num_microbatches: int) -> Stages:
    """The fastest cut of the pieces into a stage a seat that fits all memories. NoFitError if there is none.

    ValueError if there are too few layers.
    """
    num_layers, num_stages = len(seats[0].pieces) - 2, len(seats)
    check_layers(num_layers, num_stages)
    seconds, over_memory = _tables(seats)
    smallest, _ = _least(seconds, np.maximum)
    if not np.isfinite(smallest):
        excess, layout = _least(over_memory, np.maximum)
        over = stages_of(layout, seats, in_line(num_stages), 1).rank_bytes
        rank = int(np.argmax([taken - seat.memory_bytes for taken, seat in zip(over, seats, strict=True)]))
        raise NoFitError(rank, excess, num_layers, num_stages)
    bound = _best_bound(seconds, smallest * (1 + 1e-12), num_microbatches)  # for the rounding of sums
    uneven = _EVENNESS / bound
    allowed = [np.where(t <= bound, t + uneven * t * t, np.inf) for t in seconds]
    return stages_of(_least(allowed, np.add)[1], seats, in_line(num_stages), num_microbatches)


def _tables(seats: Sequence[PipelineSlot]) -> tuple[list[Floats], list[Floats]]:
    """For each stage, [first layer][end]: seconds, infinite where a cut is not allowed; and bytes above its memory."""
    num_stages = len(seats)
    seconds, excess = [], []
    for stage, seat in enumerate(seats):
        numbers = np.array([(piece.seconds, piece.taken_bytes(seat.in_flight)) for piece in seat.pieces])
        until = np.concatenate([np.zeros((1, 2)), np.cumsum(numbers[1:-1], axis=0)])
        extra = (stage == 0) * numbers[0] + (stage == num_stages - 1) * numbers[-1]
        of_range = until[None, :, :] - until[:, None, :] + extra
        place = np.arange(len(until))
        is_cut = place[:, None] <= place if may_be_empty(stage, num_stages) else place[:, None] < place
        over = np.where(is_cut, of_range[..., 1] - seat.memory_bytes, np.inf)
        excess.append(over)
        # What fits exactly must not be refused for the rounding of a sum.
        seconds.append(np.where(over <= 1e-12 * np.abs(of_range[..., 1]), of_range[..., 0], np.inf))
    return seconds, excess


def _least(tables: Sequence[Floats], join: np.ufunc) -> tuple[float, tuple[int, ...]]:
    """The least sum (np.add) or the least maximum (np.maximum) over all cuts, and the layout that has it."""
    num_layers = tables[0].shape[0] - 1
    best: Floats = tables[0][0]  # of the first stage alone, by how many layers are placed
    froms = []
    for table in tables[1:]:
        joined = join(best[:, None], table)
        chosen = joined.argmin(axis=0)
        froms.append(chosen)
        best = np.take_along_axis(joined, chosen[None], axis=0)[0]
    ends = [num_layers]
    for chosen in reversed(froms):
        ends.append(int(chosen[ends[-1]]))
    ends.append(0)
    layout = tuple(end - start for start, end in zip(ends[:0:-1], ends[-2::-1], strict=True))
    return float(best[num_layers]), layout


def _best_bound(tables: Sequence[Floats], smallest: float, num_microbatches: int) -> float:
    """The bound on the slowest stage whose least sum plus (m - 1) times itself is smallest."""
    times = num_microbatches - 1

    def least_sum(bound: float) -> float:
        return _least([np.where(t <= bound, t, np.inf) for t in tables], np.add)[0]

    best_bound, free = smallest, least_sum(np.inf)
    best = least_sum(smallest) + times * smallest
    if best <= (free + times * smallest) * (1 + 1e-12):  # as on devices of one kind, where all cuts have one sum
        return best_bound
    bounds = _distinct(np.concatenate([t[np.isfinite(t) & (t > smallest)] for t in tables]))
    spans = [(0, len(bounds), free)]  # bounds from one to another, and what none of their sums is below
    while spans:
        low, high, floor = spans.pop()
        if low == high or floor + times * bounds[low] >= best:
            continue
        middle = (low + high) // 2
        layout = least_sum(bounds[middle])
        if layout + times * bounds[middle] < best:
            best, best_bound = layout + times * bounds[middle], float(bounds[middle])
        spans += [(middle + 1, high, floor), (low, middle, layout)]
    return best_bound


def _distinct(times: Floats) -> Floats:
    """Sorted, and of those that differ by rounding alone the largest."""
    rising = np.sort(times)
    return rising[np.diff(rising, append=np.inf) > 1e-12 * rising]
