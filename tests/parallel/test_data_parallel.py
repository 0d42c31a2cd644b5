"""Gradients are reduced while the backward runs, in whole buckets, in the same order on every replica."""

import time

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.zero import flat_unit as unit
from shardwright.schedule.action import Kind
from shardwright.train.build import build
from shardwright.train.train_step import train_step
from support.cases import made_up_tokens, small_job
from support.ranks import run_on_mesh


def reductions(mesh: Mesh, job: JobSpec) -> tuple[list[int], list[bool]]:
    """Sizes of the buckets in the order of their reductions, and which began before the last backward ended."""
    begun: list[tuple[float, int]] = []
    original = unit.start_all_reduce

    def noting(x, axis):
        begun.append((time.perf_counter(), x.numel()))
        return original(x, axis)

    unit.start_all_reduce = noting
    replica = build(job, mesh)
    train_step(replica, 0, made_up_tokens(job, 0)[: job.batch.global_batch_size // 2])
    backwards = [entry for entry in replica.executor.performed if entry.action.kind is Kind.BACKWARD]
    assert all(at >= backwards[-1].start_s for at, _ in begun)  # none while microbatches accumulate
    return [size for _, size in begun], [at < backwards[-1].end_s for at, _ in begun]


def test_reductions_overlap_the_last_backward() -> None:
    job = small_job(dp=2, bucket_mib=0.02, batch=8, layers=4)
    results = run_on_mesh(job, reductions, job)
    sizes, during = results[0]
    assert results[1][0] == sizes
    assert len(sizes) > 4
    assert all(during)  # every parameter of this model gets a gradient, so every bucket fills during the backward


def test_partial_sums_are_reduced_during_the_backward_too() -> None:
    job = small_job(dp=2, tp=2, sequence_parallel=True, bucket_mib=0.02, batch=8, layers=4)
    for sizes, during in run_on_mesh(job, reductions, job):
        assert all(during)
        assert len(sizes) > 2
