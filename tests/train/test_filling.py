"""Tokens that only fill a sample up: experts and what keeps them even know nothing of them, under any plan."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fuzz.ledgers import Table, foretold_otherwise
from shardwright.config.job import JobSpec
from shardwright.measure.verdict import Record, compare
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.schedule.job_program import job_program
from shardwright.sharding.token_marks import FILLING, UNCOUNTED
from shardwright.train.build import build
from shardwright.train.train_step import StepResult, train_step
from support.cases import EXPERTS, by_one_rank, my_tokens, record_after, small_job
from support.cases import train as train_steps
from support.ranks import leaves_nothing, run_on_mesh
from support.rounding import check_rounding

SP2 = {"tp": 2, "sequence_parallel": True}
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "ep2-dp2": ("qwen-moe", {"dp": 2, "ep": 2}),
    "ep2-over-sp2": ("expert-choice", {"ep": 2, "expert_tp": 1, **SP2}),
    "sp2-reroute": ("correlation", SP2),
    "cp2-ep2-zero1": ("gshard", {"cp": 2, "ep": 2, "zero": 1}),
    "pp2-recompute": ("deepseek-mtp", {"pp": 2, "recompute": "full"}),
    "ep2-zero3": ("deepseek", {"dp": 2, "ep": 2, "zero": 3}),
}
LENGTHS = (13, 5, 9, 12, 7, 13, 2, 11)


def documents_job(kind: str, losses: bool = True, sequence: int = 16, **plan: Any) -> JobSpec:
    job = small_job(kind, batch=8, **{"microbatch_size": 2, **plan})
    loss = {"aux_loss": "switch"} if job.model.moe.aux_loss == "none" else {}
    weights = loss | {"aux_coefficient": 0.5, "z_coefficient": 0.01} if losses else {}
    model = job.model.model_copy(update={"sequence": sequence, "moe": job.model.moe.model_copy(update=weights)})
    data = job.data.model_copy(update={"separate_documents": True})
    return job.model_copy(update={"model": model, "data": data})


def one_each(job: JobSpec) -> Tensor:
    """One document a sample, the same whatever the sequence, and filling behind it: [B, S + 1]."""
    generator = torch.Generator().manual_seed(3)
    ids = (torch.rand(len(LENGTHS), max(LENGTHS), generator=generator).square() * job.model.vocab).long()
    tokens = torch.full((len(LENGTHS), job.model.sequence + 1), UNCOUNTED + FILLING)
    for row, of_row, length in zip(tokens, ids, LENGTHS, strict=True):
        row[:length] = of_row[:length]
        row[0] = -1 - of_row[0]
        row[1 : length // 2] += UNCOUNTED  # a prompt: it has no loss, and is as real as the answer
        row[length] = -1 - FILLING
    return tokens


@leaves_nothing
def two_steps(mesh: Mesh, job: JobSpec) -> list[StepResult]:
    replica = build(job, mesh)
    return [train_step(replica, step, one_each(job)) for step in range(2)]


@pytest.mark.parametrize("kind", [*EXPERTS, "deepseek-mtp"])
def test_how_much_filling_there_is_makes_no_difference(kind: str) -> None:
    """Losses, gradients, and what is told of experts, with 16 and with 25 positions a sample."""
    short, long = (
        run_on_mesh(job, two_steps, job)[0] for job in (documents_job(kind), documents_job(kind, sequence=25))
    )
    for few, many in zip(short, long, strict=True):
        assert many.loss == pytest.approx(few.loss, rel=1e-5)
        assert many.grad_norm == pytest.approx(few.grad_norm, rel=1e-5)
        for own, other in zip(few.routing, many.routing, strict=True):
            assert (own.load, own.together) == (other.load, other.together)
            assert own.scalars() == pytest.approx(other.scalars(), rel=1e-5)
        if kind in ("mixtral", "qwen-moe", "deepseek-mtp"):
            num_chosen = 3 if kind == "deepseek-mtp" else 2
            assert sum(few.routing[0].load) == sum(LENGTHS) * num_chosen
        if kind == "deepseek-mtp":  # what predicts one token further sees those that have a next one
            assert sum(few.routing[-1].load) == sum(length - 1 for length in LENGTHS) * num_chosen
    without = run_on_mesh(job := documents_job(kind, losses=False), two_steps, job)[0]
    assert without[0].grad_norm != pytest.approx(short[0].grad_norm, rel=1e-3), "the losses weigh nothing here"


@leaves_nothing
def recorded(mesh: Mesh, job: JobSpec) -> tuple[Record, Table]:
    replica = build(job, mesh)
    steps = train_steps(replica, mesh, job, 1)
    mesh.ledger.clear()
    steps += [train_step(replica, 1, my_tokens(mesh, job, 1))]
    ledger = mesh.ledger.table()
    return record_after(steps, replica, mesh, job), ledger


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PLANS)
def test_plan_equals_one_rank(name: str) -> None:
    """Of samples that are filled up at their end, or from their first token on; and ranks move what was foretold."""
    kind, plan = PLANS[name]
    job = documents_job(kind, **plan)
    ranks = run_on_mesh(job, recorded, job)
    check_rounding(compare([record for record, _ in ranks], by_one_rank(job, recorded)[0]), job)
    assert not foretold_otherwise(job, job_program(job), [ledger for _, ledger in ranks])
