"""PipeDream and PipeDream-2BW against a serial model of what their papers say, and whether they train."""

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.cli.main import cli
from shardwright.config.job import JobSpec
from shardwright.config.plan import PlanSpec
from shardwright.model.decoder import DecoderStage, stage_span
from shardwright.parallel.comm.process_groups import Mesh, MeshNeeds, make_mesh
from shardwright.parallel.optimizers.elementwise import make_optimizer
from shardwright.parallel.tensor.linear import LayerSharding
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.schedule.job_program import job_program
from shardwright.schedule.lowering.weight_versions import stashed_versions
from shardwright.train.async_step import train_stream
from shardwright.train.build import build
from shardwright.train.train_step import learning_rate
from support.cases import made_up_tokens, record, small_job
from support.ranks import leaves_nothing, run_on_mesh

BATCHES = 3


def job_for(schedule: str, pp: int, **fields: Any) -> JobSpec:
    job = small_job(pp=pp, schedule=schedule, batch=4 * fields.get("dp", 1), layers=2 * pp, **fields)
    return job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"clip_grad_norm": 0.0})})


@leaves_nothing
def streamed(mesh: Mesh, job: JobSpec) -> tuple[dict, dict, int, list[float], list[str]]:
    """Weights after a stream of batches, the versions that were seen, the most that were alive, losses, actions."""
    replica = build(job, mesh)
    share = job.batch.global_batch_size // job.plan.dp
    own = slice(mesh.dp.index * share, (mesh.dp.index + 1) * share)
    program = job_program(job, BATCHES)
    results = train_stream(replica, program, 0, lambda n: made_up_tokens(job, n)[own])
    held = {p.place.name: p.detach().clone() for s in replica.stages.values() for p in placed_parameters(s).values()}
    alive = max(weight_stash.most_alive for weight_stash in replica.weight_stashes.values())
    performed = [str(entry.action) for entry in replica.executor.performed]
    return held, replica.executor.versions_seen, alive, [r.loss for r in results], performed


def serial(job: JobSpec) -> tuple[dict[str, torch.Tensor], dict[tuple[int, int], int], list[float]]:
    """The same on one rank, written from the papers: a list of weight versions for each stage."""
    torch.set_num_threads(1)
    pp, per_batch = job.plan.pp, job.batch.global_batch_size // job.plan.microbatch_size
    mesh = make_mesh(MeshNeeds(PlanSpec()), 0, torch.device("cpu"), 30)
    stages, optimizers, history = [], [], []
    for s in range(pp):
        stage = DecoderStage(job.model, stage_span(job.plan, job.model.layers, s), LayerSharding.of_tp(mesh.tp))
        stage.initialise(job.run.seed, torch.device("cpu"))
        parameters = list(placed_parameters(stage).values())
        masters = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
        stages.append((stage, parameters, masters))
        decayed = [m for p, m in zip(parameters, masters, strict=True) if p.place.init == "normal"]
        plain = [m for p, m in zip(parameters, masters, strict=True) if p.place.init != "normal"]
        optimizers.append(make_optimizer(job.optimizer, decayed, plain))
        history.append([[m.detach().clone() for m in masters]])
    seen, losses = {}, []
    for i in range(BATCHES * per_batch):
        batch = i // per_batch
        tokens = made_up_tokens(job, batch).split(job.plan.microbatch_size)[i % per_batch]
        x = tokens[:, :-1]
        for s, (stage, parameters, _) in enumerate(stages):
            # PipeDream: before its forward of microbatch i a stage has run all backwards but the last p - 1 - s.
            version = max(0, i - (pp - 1 - s) if job.plan.schedule == "pipedream" else batch - 1)
            seen[s, i] = version
            for parameter, data in zip(parameters, history[s][version], strict=True):
                parameter.data = data
            x = stage(x) if s < pp - 1 else stage(x, tokens[:, 1:])
        x.backward()
        losses.append(x.item())  # the backward has computed it
        for s, (_, parameters, masters) in enumerate(stages):
            if job.plan.schedule == "pipedream-2bw" and (i + 1) % per_batch:
                continue
            updated = 1 if job.plan.schedule == "pipedream" else per_batch
            for parameter, master in zip(parameters, masters, strict=True):
                master.grad = parameter.gradient * (1.0 / updated)
                parameter.has_gradient = False
            for group in optimizers[s].param_groups:
                group["lr"] = learning_rate(job.optimizer, batch)
            optimizers[s].step()
            history[s].append([m.detach().clone() for m in masters])
    final = {p.place.name: m.detach() for _, ps, ms in stages for p, m in zip(ps, ms, strict=True)}
    means = [sum(losses[b * per_batch : (b + 1) * per_batch]) / per_batch for b in range(BATCHES)]
    return final, seen, means


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_equals_the_serial_model(schedule: str, pp: int) -> None:
    job = job_for(schedule, pp)
    expected, seen, losses = serial(job)
    program = job_program(job, BATCHES)
    weights: dict[str, torch.Tensor] = {}
    for rank, (held, versions, alive, own, performed) in enumerate(run_on_mesh(job, streamed, job)):
        weights |= held
        assert versions == {key: version for key, version in seen.items() if key[0] == rank}
        assert alive == stashed_versions(program)[rank]
        assert own == pytest.approx(losses, abs=2e-6)
        assert performed == [str(action) for action in program.ranks[rank]]
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_a_forward_that_runs_again_sees_the_weights_that_it_saw(schedule: str) -> None:
    """With weights of another version, activations and so all gradients would be others."""
    once, again = (job_for(schedule, 3, recompute=which) for which in ("none", "stage"))
    assert len(job_program(again, BATCHES).recomputed) == 2 * 4 * BATCHES  # all but those of the last stage
    for (held, seen, *_), (held_again, seen_again, *_) in zip(
        run_on_mesh(once, streamed, once), run_on_mesh(again, streamed, again), strict=True
    ):
        assert seen == seen_again
        assert all(torch.equal(held[name], held_again[name]) for name in held)


def test_pipedream_keeps_one_version_for_each_microbatch_on_the_way() -> None:
    assert stashed_versions(job_program(job_for("pipedream", 4), BATCHES)) == [4, 3, 2, 1]
    assert stashed_versions(job_program(job_for("pipedream-2bw", 4), BATCHES)) == [2, 2, 2, 2]


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_replicas_stay_equal(schedule: str) -> None:
    job = job_for(schedule, 2, dp=2)
    results = run_on_mesh(job, streamed, job)
    for stage in (0, 1):
        left, right = (results[2 * stage + replica][0] for replica in (0, 1))
        assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_it_trains(schedule: str, tmp_path: Path) -> None:
    """And leaves nothing of its launcher behind where temporary files are."""
    from click.testing import CliRunner

    fields = {
        "plan.dp": 1, "plan.tp": 1, "plan.pp": 2, "plan.sequence_parallel": "false", "plan.schedule": schedule,
        "optimizer.clip_grad_norm": 0, "optimizer.steps": 40, "optimizer.warmup_steps": 5, "run.log_every": 20,
        "run.eval_every": 0, "run.sample_tokens": 0, "model.layers": 2, "model.hidden": 64, "model.ffn": 128,
        "model.sequence": 64, "batch.global_batch_size": 16, "run.folder": f'"{tmp_path}"',
    }  # fmt: skip
    arguments = [part for name, value in fields.items() for part in ("--set", f"{name}={value}")]
    result = CliRunner().invoke(cli, ["train", "quickstart", "--json", *arguments], catch_exceptions=False)
    outcome = json.loads(result.stdout.splitlines()[-1])
    assert outcome["steps"] == 40
    assert outcome["last_loss"] < outcome["first_loss"] - 1.0
    assert outcome["validation_loss"] < outcome["unigram_loss"] + 0.3
    names = [name for folder in Path(tempfile.gettempdir()).iterdir() if folder.is_dir() for name in _names_in(folder)]
    assert not [name for name in names if name.startswith(f"shardwright-{os.getpid()}_")]


def _names_in(folder: Path) -> list[str]:
    """Names of what is in a folder, which another process may take away meanwhile."""
    with suppress(OSError):
        return os.listdir(folder)
    return []


def test_a_tied_embedding_on_one_rank_learns_from_both_uses() -> None:
    """One batch on one rank: nothing is asynchronous yet, so it is the step of any other schedule."""
    job = small_job("gpt-tied", schedule="pipedream-2bw", batch=4)
    job = job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"clip_grad_norm": 0.0})})
    (expected,) = run_on_mesh(job.as_one_rank(), record, job.as_one_rank(), 1)
    mesh = make_mesh(MeshNeeds(job.plan), 0, torch.device("cpu"), 30)
    replica = build(job, mesh)
    train_stream(replica, job_program(job, 1), 0, lambda n: made_up_tokens(job, n))
    held = {p.place.name: p.detach() for p in placed_parameters(replica.stages[0]).values()}
    for place, box in expected.boxes:
        assert torch.equal(held[place.name], box), place.name
