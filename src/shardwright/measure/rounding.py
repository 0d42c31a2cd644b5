"""The differences that rounding alone makes in a job: the bound for a correct plan's difference from one rank, on any
machine.

Two orders of the same sums differ by rounding errors, and the model and Adam's division amplify these. A gradient that
is only rounding errors, such as that of a bias which softmax cancels, becomes a step like any other. A job measures the
effect itself: one rank trains again, from weights that are moved by one rounding each. Backward error analysis says
that another order of summation is such a move (Higham 2002, chapter 1.5). So a plan may differ from one rank by a small
multiple of the differences of these runs.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.config.number_types import NUMBER_TYPES
from shardwright.measure.verdict import Verdict
from shardwright.parallel.tensor.initial_values import Initial, write_initial
from shardwright.parallel.zero.unit_setting import dtype_of
from shardwright.sharding.parameter_shard import ParameterShard

# The largest relative error of one rounding to nearest, by the computation's number type: half of the gap after 1.
HALF_UNIT = {name: torch.finfo(dtype_of(name)).eps / 2 for name in NUMBER_TYPES if not NUMBER_TYPES[name].is_narrow}
# A plan rounds in as many places as one rank does, but a move only rounds the weights: a factor for the other places,
# and for moves that happen to cancel.
LEEWAY = 32.0
# A larger difference is always reported, whatever rounding does: such a job proves nothing.
MOST = 1e-3
MOVES = (1, 2, 3)  # a choice of experts may depend on one rounding: then one run proves nothing, but three runs do


def moved_weights(job: JobSpec, initial: Initial, number: int) -> Initial:
    """Initial weights that differ from a job's `initial` weights by one rounding of its dtype, up or down at random."""
    half_unit = HALF_UNIT[job.precision.compute]

    def write_moved(place: ParameterShard, start: int, out: Tensor) -> None:
        values, signs = torch.empty_like(out, dtype=torch.float32), torch.empty_like(out, dtype=torch.float32)
        initial(place, start, values)
        # The signs are random numbers of another seed, so that every plan moves the same weights in the same direction.
        write_initial(number, replace(place, name=f"move of {place.name}", init="normal", std=1.0), start, signs)
        out.copy_(values.mul_(torch.full_like(signs, 2 * half_unit).copysign_(signs).add_(1)))

    return write_moved


def is_rounding(verdict: Verdict, moved_runs: Sequence[Verdict], tolerance: float) -> bool:
    """True if each difference is at most the tolerance plus a small multiple of the differences by moved weights.

    False if that bound is `MOST` or more: then rounding would explain everything.
    """
    return all(
        difference <= (bound := tolerance + LEEWAY * median(moved_differences)) and bound < MOST
        for difference, *moved_differences in zip(
            verdict.differences, *(run.differences for run in moved_runs), strict=True
        )
    )
