"""Uneven stages by dynamic programming: the layers of each rank of a pipeline with one stage a rank.

The time of a step is the sum of the stages plus (m - 1) times the slowest (pieces.py). As in Alpa's inter-operator pass
(Zheng et al. 2022, arXiv 2201.12023, section 5.2) the slowest stage is bounded, dynamic programming over (stage, layers
placed) finds the least sum under this bound, and the bound is varied. The differences: ranks and their devices are
given, so a stage has the cost of its own device; memory counts the microbatches in flight at its rank of the pipeline;
and because the least sum only falls as the bound rises, bounds are bisected, not tried one by one. On devices of one
kind all layouts have the same sum, and the smallest bound wins (PipeDream, Narayanan et al. 2019, section 3.1; DAPPLE,
Fan et al. 2020, arXiv 2007.01045).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardwright.config.phrase import say
from shardwright.config.units import GIB
from shardwright.planner.stages.pieces import PipelineSlot, Stages, may_be_empty, stages_of
from shardwright.sharding.stage_placement import in_line

Floats = npt.NDArray[np.float64]

# Weight of unevenness against seconds: among equally fast layouts the most even one is chosen.
_EVENNESS = 1e-7


class NoFitError(ValueError):
    """No layout fits. `excess_bytes` is the excess of the nearest layout, on `rank`."""

    def __init__(self, rank: int, excess_bytes: float, num_layers: int, num_stages: int) -> None:
        self.rank, self.excess_bytes = rank, excess_bytes
        super().__init__(
            say(
                "no cut of {layers} layers into {stages} stages fits: in the one that comes nearest, pipeline rank "
                "{rank} needs {excess:.1f} GiB more than there is; recompute more, use a smaller microbatch, or more "
                "tensor or pipeline parallelism",
                layers=num_layers,
                stages=num_stages,
                rank=rank,
                excess=excess_bytes / GIB,
            )
        )


def check_layers(num_layers: int, num_stages: int) -> None:
    """Raise ValueError if some stage would have nothing to do."""
    num_needed = sum(not may_be_empty(stage, num_stages) for stage in range(num_stages))
    if num_layers < num_needed:
        raise ValueError(
            say(
                "{stages} stages need at least {needed} layers between embedding and head, and there are {layers}; use "
                "at most {most} stages",
                stages=num_stages,
                needed=num_needed,
                layers=num_layers,
                most=num_layers + 2,
            )
        )


def best_stages(slots: Sequence[PipelineSlot], num_microbatches: int) -> Stages:
    """The fastest layout with a stage for each slot that fits all memories. NoFitError if there is none.

    ValueError if there are too few layers.
    """
    num_layers, num_stages = len(slots[0].pieces) - 2, len(slots)
    check_layers(num_layers, num_stages)
    seconds, over_memory = _tables(slots)
    smallest, _ = _least(seconds, np.maximum)
    if not np.isfinite(smallest):
        excess, layout = _least(over_memory, np.maximum)
        rank_bytes = stages_of(layout, slots, in_line(num_stages), 1).rank_bytes
        rank = int(
            np.argmax([num_bytes - slot.memory_bytes for num_bytes, slot in zip(rank_bytes, slots, strict=True)])
        )
        raise NoFitError(rank, excess, num_layers, num_stages)
    bound = _best_bound(seconds, smallest * (1 + 1e-12), num_microbatches)  # allow for rounding
    uneven = _EVENNESS / bound
    allowed = [np.where(times <= bound, times + uneven * times * times, np.inf) for times in seconds]
    return stages_of(_least(allowed, np.add)[1], slots, in_line(num_stages), num_microbatches)


def _tables(slots: Sequence[PipelineSlot]) -> tuple[list[Floats], list[Floats]]:
    """For each stage, by [first layer][end]: seconds, infinite if not allowed; and bytes above its memory."""
    num_stages = len(slots)
    seconds, excess = [], []
    for stage, slot in enumerate(slots):
        piece_costs = np.array([(piece.seconds, piece.taken_bytes(slot.in_flight)) for piece in slot.pieces])
        cumulated = np.concatenate([np.zeros((1, 2)), np.cumsum(piece_costs[1:-1], axis=0)])
        extra = (stage == 0) * piece_costs[0] + (stage == num_stages - 1) * piece_costs[-1]
        range_costs = cumulated[None, :, :] - cumulated[:, None, :] + extra
        index = np.arange(len(cumulated))
        is_cut = index[:, None] <= index if may_be_empty(stage, num_stages) else index[:, None] < index
        bytes_over = np.where(is_cut, range_costs[..., 1] - slot.memory_bytes, np.inf)
        excess.append(bytes_over)
        # A stage that fits exactly must not be refused because of rounding.
        seconds.append(np.where(bytes_over <= 1e-12 * np.abs(range_costs[..., 1]), range_costs[..., 0], np.inf))
    return seconds, excess


def _least(tables: Sequence[Floats], join: np.ufunc) -> tuple[float, tuple[int, ...]]:
    """The least sum (np.add) or the least maximum (np.maximum) over all layouts, and the layout that has it."""
    num_layers = tables[0].shape[0] - 1
    best: Floats = tables[0][0]  # of the first stage alone, by how many layers are placed
    chosen_starts = []
    for table in tables[1:]:
        joined = join(best[:, None], table)
        chosen = joined.argmin(axis=0)
        chosen_starts.append(chosen)
        best = np.take_along_axis(joined, chosen[None], axis=0)[0]
    ends = [num_layers]
    for chosen in reversed(chosen_starts):
        ends.append(int(chosen[ends[-1]]))
    ends.append(0)
    layout = tuple(end - start for start, end in zip(ends[:0:-1], ends[-2::-1], strict=True))
    return float(best[num_layers]), layout


def _best_bound(tables: Sequence[Floats], smallest: float, num_microbatches: int) -> float:
    """The bound on the slowest stage whose least sum plus (m - 1) times itself is smallest."""
    num_repeats = num_microbatches - 1

    def least_sum(bound: float) -> float:
        return _least([np.where(times <= bound, times, np.inf) for times in tables], np.add)[0]

    best_bound, unbounded_sum = smallest, least_sum(np.inf)
    best = least_sum(smallest) + num_repeats * smallest
    # On devices of one kind all sums are equal, and no larger bound is better.
    if best <= (unbounded_sum + num_repeats * smallest) * (1 + 1e-12):
        return best_bound
    bounds = _distinct(np.concatenate([times[np.isfinite(times) & (times > smallest)] for times in tables]))
    spans = [(0, len(bounds), unbounded_sum)]  # (first bound, end, lower bound on their sums)
    while spans:
        low, high, floor = spans.pop()
        if low == high or floor + num_repeats * bounds[low] >= best:
            continue
        middle = (low + high) // 2
        middle_sum = least_sum(bounds[middle])
        if middle_sum + num_repeats * bounds[middle] < best:
            best, best_bound = middle_sum + num_repeats * bounds[middle], float(bounds[middle])
        spans += [(middle + 1, high, floor), (low, middle, middle_sum)]
    return best_bound


def _distinct(times: Floats) -> Floats:
    """The sorted times; among those that differ only by rounding, the largest."""
    rising = np.sort(times)
    return rising[np.diff(rising, append=np.inf) > 1e-12 * rising]
