"""A model of every family comes in, trains and goes out: what transformers computes of it is what we do."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from shardwright.config.hugging_face.config_json import read_model
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.model.decoder import DecoderStage
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.train.build import Replica, build, job_mesh
from shardwright.train.checkpoint.kept import manifest_of
from shardwright.train.checkpoint.released_export import export_released
from shardwright.train.checkpoint.starting_weights import initial_values, released_weights_of, take_correction_biases
from shardwright.train.checkpoint.storage import open_storage
from shardwright.train.checkpoint.writing import CheckpointWriter
from shardwright.train.train_step import train_step
from support.cases import my_tokens
from support.ranks import run_on_mesh
from support.released_models import CASES, SEQUENCE, in_their_layout, opened, save_released

# Of the largest logit: some hundreds of float32, as in tests/model/test_hugging_face.py.
MOST = 1e-5
# Some hundreds of float32: a gradient is a sum over tokens, of products that each came through as many sums.
ROUNDINGS = 512 * 2.0**-24
STEPS = 3
PLANS: tuple[dict[str, Any], ...] = ({"tp": 2, "sequence_parallel": True}, {"pp": 2})
# Of one key/value head, which two ranks of tp can't share.
PLANS_OF_ONE_HEAD: tuple[dict[str, Any], ...] = ({"dp": 2, "zero": 3}, {"pp": 2})


def job_of(folder: Path, plan: dict[str, Any] | None = None) -> JobSpec:
    """A job that begins with the weights of a folder."""
    return make_job(
        {
            "model": read_model(str(folder)) | {"sequence": SEQUENCE, "weights": str(folder), "dropout": 0.0},
            "plan": plan or {}, "batch": {"global_batch_size": 4}, "run": {"device": "cpu"},
            "optimizer": {"learning_rate": 1e-3, "warmup_steps": 1, "steps": STEPS, "epsilon": 1e-5},
        }
    )  # fmt: skip


def begun(job: JobSpec, mesh: Mesh) -> Replica:
    released = released_weights_of(job)
    replica = build(job, mesh, initial_values(job, released))
    take_correction_biases(replica.stages, released)
    return replica


def our_logits(replica: Replica, ids_BS: Tensor) -> Tensor:
    """Logits of one rank, [B, S, V]."""
    (stage,) = replica.stages.values()
    with torch.no_grad(), replica.gathered():
        return stage.logits(stage(ids_BS)).transpose(0, 1)


def their_logits(name: str, folder: Path, ids_BS: Tensor) -> Tensor:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return opened(name, folder)(ids_BS).logits


def some_ids(job: JobSpec) -> Tensor:
    return torch.randint(job.model.vocab, (2, SEQUENCE), generator=torch.Generator().manual_seed(5))


def difference(ours: Tensor, reference: Tensor) -> float:
    return ((ours - reference).abs().max() / reference.abs().max()).item()


def trained_and_saved(mesh: Mesh, job: JobSpec, folder: Path) -> Tensor | None:
    """Train some steps and save; the logits after them, if this rank has the whole model."""
    replica = begun(job, mesh)
    for step in range(STEPS):
        train_step(replica, step, my_tokens(mesh, job, step))
    writer = CheckpointWriter(job, replica, mesh, folder)
    writer.save(STEPS, STEPS * job.batch.global_batch_size, 0, {})
    writer.wait()
    return our_logits(replica, some_ids(job)) if mesh.world.size == 1 else None


def exported(folder: Path) -> Path:
    storage = open_storage(str(folder / "checkpoints"))
    export_released(storage, manifest_of(storage, STEPS), folder / "out", file_bytes=2**30)
    return folder / "out"


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", CASES)
def test_in_and_out(name: str, tmp_path: Path) -> None:
    reference = save_released(name, tmp_path / "in")
    job = job_of(tmp_path / "in")
    mesh = job_mesh(job, 0, torch.device("cpu"))
    ids_BS = some_ids(job)
    with torch.no_grad():
        before = reference(ids_BS).logits
    assert difference(our_logits(begun(job, mesh), ids_BS), before) < MOST
    after = trained_and_saved(mesh, job, tmp_path)
    assert after is not None and difference(after, before) > 10 * MOST
    assert difference(their_logits(name, exported(tmp_path), ids_BS), after) < MOST


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, tmp_path: Path) -> None:
    """Of the loss by each tensor of theirs."""
    reference = save_released(name, tmp_path / "in")
    job = job_of(tmp_path / "in")
    replica = begun(job, job_mesh(job, 0, torch.device("cpu")))
    (stage,) = replica.stages.values()
    text = torch.randint(job.model.vocab, (2, SEQUENCE + 1), generator=torch.Generator().manual_seed(2))
    tokens_BS, targets_BS = text[:, :-1], text[:, 1:]
    their_loss = functional.cross_entropy(reference(tokens_BS).logits.flatten(0, 1), targets_BS.flatten())
    our_loss = stage(tokens_BS, targets_BS)
    their_loss.backward()
    our_loss.backward()
    assert_close(our_loss, their_loss, rtol=1e-5, atol=1e-5)
    own = gradients_by_their_names(name, job, stage)
    for named, parameter in reference.named_parameters():
        if not parameter.requires_grad:  # the bias of a choice is no weight
            continue
        gradient = parameter.grad[: len(own[named])]  # a table of positions is longer than the samples
        worst, largest = (own[named] - gradient).abs().max(), gradient.abs().max()
        assert worst <= ROUNDINGS * largest + 1e-7, f"gradient of {named}"


def gradients_by_their_names(name: str, job: JobSpec, stage: DecoderStage) -> dict[str, Tensor]:
    """The gradients of a whole model, as tensors of theirs."""
    sums: dict[str, Tensor] = {}
    for parameter in placed_parameters(stage).values():
        own = parameter.place.name
        if own not in sums or parameter.place.is_tied:
            sums[own] = sums.get(own, 0) + parameter.gradient
    return in_their_layout(name, job.model, sums, are_gradients=True)


@pytest.mark.sampled(20)
@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_in_and_out_under_plans(name: str, tmp_path: Path) -> None:
    save_released(name, tmp_path / "in")
    one = job_of(tmp_path / "in")
    after = trained_and_saved(job_mesh(one, 0, torch.device("cpu")), one, tmp_path / "one")
    assert after is not None
    for number, plan in enumerate(PLANS if one.model.num_kv_heads > 1 else PLANS_OF_ONE_HEAD):
        job, folder = job_of(tmp_path / "in", plan), tmp_path / str(number)
        run_on_mesh(job, trained_and_saved, job, folder)
        # Another order of sums moves the weights by roundings, which Adam makes larger.
        assert difference(their_logits(name, exported(folder), some_ids(job)), after) < 100 * MOST
