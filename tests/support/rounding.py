"""Asserts that a plan differs from one rank by no more than rounding alone moves that job (measure/rounding.py)."""

import torch

from shardwright.config.job import JobSpec
from shardwright.measure.rounding import HALF_UNIT, MOVES, is_rounding, moved_weights
from shardwright.measure.verdict import Record, Verdict, compare
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.initial_values import seeded
from shardwright.train.build import build
from support.cases import by_one_rank, record, record_after, train
from support.ranks import leaves_nothing

# A bound that needs no such runs: a handful of roundings of the number itself.
ALWAYS = 16 * HALF_UNIT["float32"]


@leaves_nothing
def moved_record(mesh: Mesh, job: JobSpec, num_steps: int, number: int) -> Record:
    """The record of a job on this rank, from weights that are moved by a rounding."""
    replica = build(job, mesh, moved_weights(job, seeded(job.run.seed), number))
    return record_after(train(replica, mesh, job, num_steps), replica, mesh, job)


def check_rounding(verdict: Verdict, job: JobSpec) -> None:
    """Assert that a plan in float32 differs from one rank, over `cases.record`, by no more than rounding explains."""
    loss = verdict.max_loss_difference / torch.tensor(float(job.model.vocab)).log().item()
    result = (loss, verdict.max_grad_norm_relative_difference, verdict.max_parameter_relative_difference)
    if max(result) <= ALWAYS:
        return
    one = by_one_rank(job, record, verdict.steps)
    moved = [compare([by_one_rank(job, moved_record, verdict.steps, number)], one) for number in MOVES]
    assert is_rounding(verdict, moved, ALWAYS), (verdict, moved)
