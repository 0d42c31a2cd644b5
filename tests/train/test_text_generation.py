"""A sample of text is written by one replica, or by all together where they share experts; it is the same text."""

from typing import Any

import pytest

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.build import build
from shardwright.train.text_generation import generate, sample_text
from support.cases import small_job
from support.ranks import leaves_nothing, run_on_mesh


@leaves_nothing
def written(mesh: Mesh, job: JobSpec) -> str:
    return sample_text(build(job, mesh))


@leaves_nothing
def ids_of(mesh: Mesh, job: JobSpec, ends: tuple[int, ...]) -> list[int]:
    replica = build(job, mesh)
    with replica.gathered():
        return generate(replica, [1, 2], 6, seed=0, temperature=1.0, ends=ends)


@pytest.mark.parametrize("plan", [{}, {"pp": 2}, {"tp": 2}])
def test_it_ends_before_a_token_that_ends_a_text(plan: dict[str, Any]) -> None:
    job = writing_job("llama", **plan)
    whole = run_on_mesh(job, ids_of, job, ())[0]
    last = next(i for i in range(3, 8) if whole[i] not in whole[2:i])  # a token that was not written before
    assert run_on_mesh(job, ids_of, job, (whole[last],)) == [whole[:last]] * job.plan.world


def writing_job(kind: str, **plan: Any) -> JobSpec:
    job = small_job(kind, **plan)
    model, run = job.model.model_copy(update={"vocab": 256}), job.run.model_copy(update={"sample_tokens": 4})
    return job.model_copy(update={"model": model, "run": run})


@pytest.mark.parametrize(("kind", "plan"), [("latent", {"dp": 2, "zero": 3}), ("deepseek", {"dp": 2, "ep": 2})])
def test_the_first_replica_says_what_one_rank_would(kind: str, plan: dict[str, Any]) -> None:
    (alone,) = run_on_mesh(writing_job(kind), written, writing_job(kind))
    assert len(alone) >= 4
    assert run_on_mesh(writing_job(kind, **plan), written, writing_job(kind, **plan)) == [alone, ""]
