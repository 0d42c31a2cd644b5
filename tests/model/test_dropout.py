"""Dropout: the same elements in every plan, and masks that are as random as they should be."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.config.model import ModelSpec
from shardwright.config.plan import PlanSpec
from shardwright.model.dropout import LEVELS, Dropout, kept_elements
from shardwright.model.forward_pass import ForwardPass
from shardwright.parallel.comm.process_groups import Mesh, MeshNeeds, make_mesh
from shardwright.parallel.pipeline.pipeline_stage import Microbatch
from shardwright.parallel.tensor.linear import LayerSharding
from shardwright.train.build import build
from shardwright.train.train_step import evaluate, train_step
from support.cases import against_one_rank, made_up_tokens, small_job
from support.ranks import run_on_mesh
from support.rounding import check_rounding

RATE = 0.1
PLANS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "pp4": ("llama", {"pp": 4, "schedule": "1f1b"}, True),
    "pp2-zb-v": ("gpt-tied", {"pp": 2, "schedule": "zb-v", "microbatch_size": 2}, True),
    "pp2-interleaved": ("llama", {"pp": 2, "schedule": "interleaved-1f1b", "virtual_stages": 2}, True),
    "tp2": ("llama", {"tp": 2, "microbatch_size": 2}, False),
    "tp2-sp": ("gpt", {"tp": 2, "sequence_parallel": True, "microbatch_size": 2}, False),
    "dp2": ("gpt", {"dp": 2}, False),
    "dp2-zero3": ("llama", {"dp": 2, "zero": 3}, False),
    "pp2-dualpipe": ("gpt", {"pp": 2, "schedule": "dualpipe"}, False),
    "dp2-tp2-sp-pp2": ("llama-tied", {"dp": 2, "tp": 2, "sequence_parallel": True, "pp": 2}, False),
}


def with_dropout(job: JobSpec) -> JobSpec:
    return job.model_copy(update={"model": job.model.model_copy(update={"dropout": RATE})})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PLANS)
def test_plan_drops_what_one_rank_drops(name: str) -> None:
    kind, fields, is_bitwise = PLANS[name]
    job = with_dropout(small_job(kind, **fields))
    verdict = against_one_rank(job)
    assert verdict.bitwise or not is_bitwise
    check_rounding(verdict, job)


def losses(mesh: Mesh, job: JobSpec) -> tuple[float, float]:
    """Of the initial weights: evaluated, and in a first step."""
    replica = build(job, mesh)
    tokens = made_up_tokens(job, 0)
    return evaluate(replica, tokens), train_step(replica, 0, tokens).loss


def test_evaluation_drops_nothing() -> None:
    (plain,) = run_on_mesh(small_job(), losses, small_job())
    (dropped,) = run_on_mesh(small_job(), losses, with_dropout(small_job()))
    assert plain[0] == plain[1] == dropped[0] != dropped[1]


def mask(key: int, rate: float = RATE, rows: int = 512, channels: int = 254) -> Tensor:
    """[rows, channels], 1.0 where an element is dropped."""
    kept = kept_elements(torch.arange(rows)[:, None], channels, key, round(rate * LEVELS))
    return 1.0 - kept.squeeze(1).double()


def assert_uncorrelated(a: Tensor, b: Tensor) -> None:
    covariance = ((a - RATE) * (b - RATE)).mean() / (RATE * (1 - RATE))
    assert abs(covariance) < 5 / math.sqrt(a.numel())


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
def test_rate(rate: float) -> None:
    share = mask(7, rate).mean()
    assert abs(share - rate) < 5 * math.sqrt(rate * (1 - rate) / (512 * 254)) + 0.5 / LEVELS


def test_neighbours_are_independent() -> None:
    dropped = mask(11)
    for lag in (1, 2, 3, 4, 5, 64):  # within a word of four channels, and beyond
        assert_uncorrelated(dropped[:, lag:], dropped[:, :-lag])
        assert_uncorrelated(dropped[lag:], dropped[:-lag])
    # Rows and columns each drop as many as chance has them drop: the variance of a binomial count.
    for dim, n in ((0, 512), (1, 254)):
        counts = dropped.sum(dim=dim)
        expected = n * RATE * (1 - RATE)
        assert abs(counts.var() / expected - 1) < 6 * math.sqrt(2 / len(counts))


def drop(job_sequence: int, microbatch: Microbatch | None, place: str, x: Tensor) -> Tensor:
    spec = ModelSpec(dropout=RATE, hidden=x.shape[-1], heads=1, sequence=job_sequence)
    mesh = make_mesh(MeshNeeds(PlanSpec()), 0, torch.device("cpu"), 30)
    cut = LayerSharding.of_tp(mesh.tp)
    return Dropout(spec, place, cut)(x, ForwardPass(None, microbatch))


def test_steps_layers_branches_samples_and_seeds_differ() -> None:
    x = torch.ones(64, 2, 128)
    base = (Microbatch(1, 0, 0), "layers.0.mlp")
    others = [
        (Microbatch(2, 0, 0), "layers.0.mlp"), (Microbatch(1, 1, 0), "layers.0.mlp"),
        (Microbatch(1, 0, 2), "layers.0.mlp"), (Microbatch(1, 0, 0), "layers.1.mlp"),
        (Microbatch(1, 0, 0), "layers.0.attention"), (Microbatch(1, 0, 0), "embedding"),
    ]  # fmt: skip
    first = (drop(64, *base, x) == 0).double()
    for other in others:
        assert_uncorrelated(first, (drop(64, *other, x) == 0).double())
    assert_uncorrelated(first[:, 0], first[:, 1])
    assert torch.equal(drop(64, *base, x)[:, 1:], drop(64, Microbatch(1, 0, 1), "layers.0.mlp", x[:, :1]))


def test_scaling_keeps_the_mean_and_the_gradient_has_the_mask() -> None:
    x = torch.randn(64, 2, 128, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = drop(64, Microbatch(1, 0, 0), "embedding", x)
    kept = y != 0
    levels = round(RATE * LEVELS)
    torch.testing.assert_close(y[kept], x[kept] * LEVELS / (LEVELS - levels))
    y.sum().backward()
    torch.testing.assert_close(x.grad, kept * (LEVELS / (LEVELS - levels)))


def test_mask_is_pinned() -> None:
    """Changing the generator would change every continued run: that must be on purpose."""
    assert mask(1234, 0.5, 4, 8).int().tolist() == [
        [1, 1, 1, 0, 0, 0, 1, 1],
        [0, 0, 1, 1, 0, 1, 1, 0],
        [1, 0, 0, 0, 0, 0, 1, 1],
        [1, 1, 1, 1, 0, 1, 0, 0],
    ]
