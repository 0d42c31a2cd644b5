"""Buckets of made-up gradients, and what Gloo ranks make of them under each method of compression."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from shardwright.config.job import JobSpec
from shardwright.config.plan import PlanSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.compress.bucket import Bucket, ErrorSpan
from shardwright.parallel.compress.compressor import make_compressor
from shardwright.sharding.parameter_shard import ParameterShard
from support.cases import small_job
from support.ranks import run_on_mesh

# Small ones between large ones; a vector that PowerSGD does not take; three dims; nothing divides by 4 x 256.
SHAPES = [(33,), (96, 70), (8, 40, 32), (64,), (5001,), (50, 60)]
SMALL = [0, 3, 5]
LARGE = [1, 2, 4]
PADDING = 7.0


def places_of(shapes: list[tuple[int, ...]]) -> list[ParameterShard]:
    """Whole tensors of these shapes."""
    return [ParameterShard(shape, tuple((0, size) for size in shape), "normal") for shape in shapes]


PLACES = places_of(SHAPES)
NUM_STEPS = 5
PLANS = {
    "bf16": PlanSpec(compress="bf16"),
    "fp16": PlanSpec(compress="fp16"),
    "int8": PlanSpec(compress="int8"),
    "powersgd": PlanSpec(compress="powersgd", compress_rank=3),
    "topk": PlanSpec(compress="topk", compress_share=0.03),
}
WITH_FEEDBACK = ["int8", "powersgd", "topk"]
WORLDS = [2, 4]
BAD = [math.nan, math.inf, -math.inf]


def num_elements() -> int:
    """Of the bucket, padded for four ranks."""
    return -(-sum(map(math.prod, SHAPES)) // 4) * 4


def gradient(rank: int, step: int) -> list[torch.Tensor]:
    """Of small tensors whole numbers, whose sum is exact in any order."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    large = [torch.randn(shape, generator=generator) * 10.0 ** -(i + 1) for i, shape in enumerate(SHAPES)]
    small = [torch.randint(-50, 50, shape, generator=generator).float() for shape in SHAPES]
    return [small[i] if i in SMALL else large[i] for i in range(len(SHAPES))]


def bucket(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A flat bucket with padding at its end, and its views."""
    flat = torch.full((num_elements(),), PADDING)
    views = views_of(flat)
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
    return flat, views


def views_of(flat: torch.Tensor) -> list[torch.Tensor]:
    parts = flat[: sum(map(math.prod, SHAPES))].split([math.prod(shape) for shape in SHAPES])
    return [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)]


@dataclass
class Outcome:
    """The results of one rank after some steps: each step's flat result or share, ledger, savings and state."""

    results: list[torch.Tensor]
    table: dict[str, dict[str, int]]
    bytes_saved: int
    memory: list[torch.Tensor]
    errors: list[ErrorSpan]


def layout(num_ranks: int, index: int, scatter: bool) -> Bucket:
    """Of the tensors in the bucket that `bucket` makes."""
    lengths = tuple(map(math.prod, SHAPES))
    offsets = tuple(sum(lengths[:i]) for i in range(len(lengths)))
    return Bucket(num_elements(), offsets, lengths, num_ranks, index, scatter)


def reduce_steps(mesh: Mesh, plan: PlanSpec, scatter: bool, steps: list[int], before: Any = None) -> Outcome:
    """Of a compressor that begins, or that goes on from the outcome of another one."""
    make = make_compressor(plan)
    assert make is not None
    compressor = make(PLACES)

    def errors() -> list[ErrorSpan]:
        return list(compressor.errors(layout(mesh.dp.size, mesh.dp.index, scatter), torch.device("cpu")))

    if before is not None:
        for own, then in zip(errors(), before.errors, strict=True):
            own.values.copy_(then.values)
        if warm_starts := before.memory[1:] if plan.compress == "powersgd" else []:
            compressor.method.start_from(warm_starts)
    mesh.ledger.clear()
    results = []
    for step in steps:
        flat, tensors = bucket(gradient(mesh.dp.index, step))
        if scatter:
            out = torch.empty(flat.numel() // mesh.dp.size)
            compressor.start_scatter(flat, tensors, mesh.dp, out).wait()
            results.append(out)
        else:
            compressor.start(flat, tensors, mesh.dp).wait()
            results.append(flat)
    return Outcome(results, mesh.ledger.table(), compressor.bytes_saved, compressor.method.state_tensors(), errors())


def all_methods(mesh: Mesh) -> dict[tuple[str, bool], Outcome]:
    steps = list(range(NUM_STEPS))
    return {(name, scatter): reduce_steps(mesh, plan, scatter, steps) for name, plan in PLANS.items()
            for scatter in (False, True)}  # fmt: skip


def job_over(world: int) -> JobSpec:
    return small_job(dp=world, batch=4)


@cache
def outcomes(world: int) -> list[dict[tuple[str, bool], Outcome]]:
    """By rank, then by method and whether the bucket was scattered."""
    return run_on_mesh(job_over(world), all_methods)


def exact_sum(world: int, step: int) -> torch.Tensor:
    """Of the whole bucket, float64."""
    total = sum(bucket(gradient(rank, step))[0].double() for rank in range(world))
    assert isinstance(total, torch.Tensor)
    return total


def large_part(flat: torch.Tensor) -> np.ndarray:
    """The elements that are compressed (by all but PowerSGD), side by side."""
    views = views_of(flat)
    return np.concatenate([views[i].reshape(-1).numpy() for i in LARGE])


def large_gradients(world: int, step: int) -> list[np.ndarray]:
    return [large_part(bucket(gradient(rank, step))[0]) for rank in range(world)]
