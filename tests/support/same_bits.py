"""Runs that must not differ by a bit: the jobs, and how two records of them are compared."""

from typing import Any

import torch

from shardwright.config.job import JobSpec
from shardwright.measure.verdict import Record
from support.cases import small_job

NUM_STEPS = 2  # the second is of weights that the first has moved


def of_four_microbatches(kind: str, layers: int = 0, **plan: Any) -> JobSpec:
    """With dropout, whose masks differ from step to step and from microbatch to microbatch."""
    return with_dropout(small_job(kind, batch=4, layers=layers, **plan), 0.1)


def with_dropout(job: JobSpec, rate: float) -> JobSpec:
    return job.model_copy(update={"model": job.model.model_copy(update={"dropout": rate})})


def assert_same_bits(ours: list[Record], others: list[Record]) -> None:
    for own, other in zip(ours, others, strict=True):
        assert own.steps == other.steps
        assert [place for place, _ in own.boxes] == [place for place, _ in other.boxes]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(own.boxes, other.boxes, strict=True))
