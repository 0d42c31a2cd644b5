"""How far rounding alone moves a job: what a right plan may differ from one rank by, on whatever machine runs it.

Two orders of the same sums differ by roundings, and by what the model, and Adam's division, make of them. A gradient
that is nothing but rounding errors, such as that of a bias which softmax cancels, becomes a step like any other. How
much that is, a job tells itself: one rank trains again, from weights that are moved by one rounding each. Backward
error analysis says that another order of summation is such a move (Higham 2002, chapter 1.5). So a plan may differ from
one rank by a small multiple of what these runs differ by.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.measure.verdict import Verdict
from shardwright.parallel.tensor.initial_values import Initial, write_initial
from shardwright.sharding.parameter_shard import ParameterShard

HALF_UNIT = {"float32": 2.0**-24, "bf16": 2.0**-9, "fp16": 2.0**-11}  # in the last place, of what a job computes in
# A plan rounds in as many places as one rank does, and a move only in the weights: a factor for the places between,
# and for moves that happen to cancel.
LEEWAY = 32.0
# What differs by more than this is told to be different, whatever rounding does: such a job proves nothing.
MOST = 1e-3
MOVES = (1, 2, 3)  # a choice of experts may hang on a rounding: then one run says nothing, and three say it


def moved_weights(job: JobSpec, initial: Initial, number: int) -> Initial:
    """Initial weights that differ from a job's `initial` ones by one rounding of its number type, up or down at
    random."""
    half_unit = HALF_UNIT[job.precision.compute]

    def moved(place: ParameterShard, start: int, out: Tensor) -> None:
        values, signs = torch.empty_like(out, dtype=torch.float32), torch.empty_like(out, dtype=torch.float32)
        initial(place, start, values)
        # Of numbers of another seed, so that every plan moves the same weights the same way.
        write_initial(number, replace(place, name=f"move of {place.name}", init="normal", std=1.0), start, signs)
        out.copy_(values.mul_(torch.full_like(signs, 2 * half_unit).copysign_(signs).add_(1)))

    return moved


def is_rounding(found: Verdict, moved: Sequence[Verdict], tolerance: float) -> bool:
    """True if each difference is within the tolerance, and a small multiple of what moved weights make.

    Never where that multiple is more than `MOST`: rounding would explain everything.
    """
    return all(
        difference <= (bound := tolerance + LEEWAY * median(of)) and bound < MOST
        for difference, *of in zip(found.differences, *(run.differences for run in moved), strict=True)
    )
