"""Adapters: trained as peft trains them, alike on any ranks; frozen weights are values alone."""

from typing import Any

import pytest
import torch

from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.memory.job_memory import rank_memory
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.schedule.job_program import job_program
from shardwright.sharding.memory_account import RankMemory
from shardwright.sharding.mesh import MeshShape
from shardwright.train.build import build, job_mesh
from shardwright.train.train_step import train_step
from support.cases import made_up_tokens, small_job
from support.ranks import run_on_mesh

ALL = ("query", "key", "value", "out", "gate", "up", "down")
CPU = torch.device("cpu")


def job_of(
    targets: tuple[str, ...] = ALL, kind: str = "llama", precision: dict[str, Any] | None = None, **plan: Any
) -> JobSpec:
    fields = small_job(kind, batch=4, layers=2, **plan).model_dump()
    fields["model"]["adapter"] = {"rank": 4, "alpha": 8.0, "targets": targets}
    return make_job(fields | {"precision": precision or {}})


def few_steps(mesh: Mesh, job: JobSpec) -> tuple[list[float], RankMemory]:
    replica = build(job, mesh)
    share = job.batch.global_batch_size // job.plan.dp
    losses = [
        train_step(replica, step, made_up_tokens(job, step)[mesh.dp.index * share :][:share]).loss for step in range(4)
    ]
    return losses, replica.memory()


PLANS: dict[str, dict[str, Any]] = {
    "zero1": {"dp": 2, "zero": 1},
    "zero2": {"dp": 2, "zero": 2, "bucket_mib": 0.01},
    "zero3": {"dp": 2, "zero": 3},
    "tp2": {"tp": 2},
    "sp2": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "zero3 x sp2": {"dp": 2, "zero": 3, "tp": 2, "sequence_parallel": True},
    "cp2, recomputed": {"cp": 2, "recompute": "full"},
    "selective": {"tp": 2, "recompute": "selective"},
}


@pytest.mark.processes
@pytest.mark.parametrize("targets", [ALL, ("query", "value")], ids=["all", "query and value"])
@pytest.mark.parametrize("name", PLANS)
def test_ranks_train_as_one_rank_does_and_hold_what_is_predicted(name: str, targets: tuple[str, ...]) -> None:
    one, _ = few_steps(job_mesh(job_of(targets), 0, CPU), job_of(targets))
    job = job_of(targets, **PLANS[name])
    program = job_program(job)
    for rank, (losses, measured) in enumerate(run_on_mesh(job, few_steps, job)):
        assert losses == pytest.approx(one, rel=2e-6)
        place = MeshShape.of(job.plan).coordinates(rank)
        predicted = rank_memory(job, program, place["pp"], place["tp"])
        assert measured.parameters_bytes == predicted.parameters_bytes
        assert measured.gradients_bytes == predicted.gradients_bytes
        assert measured.optimizer_bytes == predicted.optimizer_bytes
