"""How far a plan may lie from one rank: as far as rounding alone moves that very job, on whatever machine runs it.

Two orders of the same sums differ by roundings, and by what the model, and Adam's division, make of them. How much that
is, a job tells itself: one rank trains again, from weights that are moved by one rounding each. Backward error analysis
says that another order of summation is such a move (Higham 2002, chapter 1.5). So a plan may differ by a small multiple
of what these runs differ by.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from unittest import mock

import torch
from torch import Tensor

from cases import by_one_rank, record
from shardwright.measure.verify import Record, Verdict, compare
from shardwright.parallel import unit
from shardwright.parallel.mesh import Mesh
from shardwright.parallel.parameter import initial_box
from shardwright.spec.job import JobSpec
from shardwright.spec.place import Place

SINGLE = 2.0**-24  # half a unit in the last place of float32
# A plan rounds in as many places as one rank does, and a move only in the weights: a factor for the places between,
# and for moves that happen to cancel.
LEEWAY = 32.0
# What needs no such runs: a handful of roundings of the number itself.
ALWAYS = 16 * SINGLE
MOVES = (1, 2, 3)  # a choice of experts may hang on a rounding: then one run says nothing, and three say it


@contextmanager
def moved_weights(number: int, half_unit: float = SINGLE) -> Iterator[None]:
    """Initial weights that differ by one rounding, up or down at random; `half_unit` is of the computation's type."""

    def moved(place: Place, seed: int, device: torch.device) -> Tensor:
        box = initial_box(replace(place, box=tuple((0, n) for n in place.full_shape)), seed, device)
        generator = torch.Generator().manual_seed(number * 1_000_003 + sum(place.name.encode()))
        signs = torch.randint(0, 2, box.shape, generator=generator) * 2 - 1
        return (box * (1 + signs * 2 * half_unit))[place.slices].contiguous()

    with mock.patch.object(unit, "initial_box", moved):
        yield


def moved_record(mesh: Mesh, job: JobSpec, num_steps: int, number: int) -> Record:
    """The record of a job on this rank, from weights that are moved by a rounding."""
    with moved_weights(number):
        return record(mesh, job, num_steps)


def check_rounding(verdict: Verdict, job: JobSpec) -> None:
    """Assert that a plan in float32 differs from one rank, over `cases.record`, by no more than rounding explains."""
    loss = verdict.max_loss_difference / torch.tensor(float(job.model.vocab)).log().item()
    found = (loss, verdict.max_grad_norm_relative_difference, verdict.max_parameter_relative_difference)
    if max(found) <= ALWAYS:
        return
    one = by_one_rank(job, record, verdict.steps)
    moved = [compare([by_one_rank(job, moved_record, verdict.steps, number)], one) for number in MOVES]
    assert verdict.max_loss_difference <= _bound([of.max_loss_difference for of in moved])
    assert verdict.max_grad_norm_relative_difference <= _bound([of.max_grad_norm_relative_difference for of in moved])
    assert verdict.max_parameter_relative_difference <= _bound([of.max_parameter_relative_difference for of in moved])


def _bound(moved: list[float]) -> float:
    bound = LEEWAY * median(moved) + ALWAYS
    assert bound < 1e-3, "rounding moves this job so far that it proves nothing: choose another seed or shape"
    return bound
