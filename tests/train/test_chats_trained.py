"""Chats that are packed, trained on: against the plain implementation, and under plans against it too."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwright.config.data import DataSpec, SourceSpec
from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.initial_values import initial_box
from shardwright.sharding.stage_parameters import model_parameters
from shardwright.sharding.token_marks import UNCOUNTED
from shardwright.train.build import build
from shardwright.train.data.batch_reader import my_share
from shardwright.train.data.prepare import prepare_tokens
from shardwright.train.train_step import evaluate, train_step
from support.cases import small_job
from support.plain_decoder import PlainDecoder
from support.ranks import run_on_mesh

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
PLANS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2}, "tp2-pp2": {"tp": 2, "pp": 2}, "cp2-dp2-zero3": {"cp": 2, "dp": 2, "zero": 3},
}  # fmt: skip


def job_of(folder: Path, **plan: Any) -> JobSpec:
    """Chats of very different answers beside text, in the few letters that the model knows."""
    if not (folder / "chats.jsonl").exists():
        rng = np.random.default_rng(1)

        def text(most: int) -> str:
            return "".join(chr(code) for code in rng.integers(32, 60, rng.integers(1, most)))

        rows = [
            {"messages": [{"role": "user", "content": text(9)}, {"role": "assistant", "content": text(2 + n % 12)}]}
            for n in range(60)
        ]
        (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text(40)}) for _ in range(40)))
        (folder / "t.jinja").write_text(TEMPLATE)
    data = DataSpec(
        sources=[
            SourceSpec(path=str(folder / "chats.jsonl"), chats=True, weight=3.0),
            SourceSpec(path=str(folder / "text.jsonl"), weight=1.0),
        ],
        separate_documents=True, chat_template=str(folder / "t.jinja"), cache=str(folder / "cache"), workers=1,
    )  # fmt: skip
    job = small_job("llama", batch=8, **plan)
    # Bytes need 256 ids; the letters here are few, and below the smallest of them nothing is learned.
    return job.model_copy(update={"data": data, "model": job.model.model_copy(update={"vocab": 256})})


def trained(mesh: Mesh, job: JobSpec, folder: Path) -> list[tuple[float, float]]:
    """The losses and norms of two steps, and the loss of a third batch."""
    samples = prepare_tokens(job.data, job.model, job.run.seed, folder).train_samples()
    replica = build(job, mesh)
    results = []
    for step in range(2):
        result = train_step(replica, step, my_share(samples, 8 * step, job, mesh))
        assert result.grad_norm is not None
        results.append((result.loss, result.grad_norm))
    return [*results, (evaluate(replica, my_share(samples, 16, job, mesh)), 0.0)]


def plainly_trained(job: JobSpec, folder: Path) -> list[tuple[float, float]]:
    tokens = torch.from_numpy(prepare_tokens(job.data, job.model, job.run.seed, folder).train_samples().batch(0, 24))
    learned = ((tokens >= 0) & (tokens < UNCOUNTED)).sum(dim=1)
    assert len(set(learned.tolist())) > 5, "samples of as many counted tokens would hide a mean of means"
    places, cpu = model_parameters(job.model), torch.device("cpu")
    weights = {place.name: initial_box(place, job.run.seed, cpu).double() for place in places}
    model = PlainDecoder(job.as_one_rank(), weights)
    steps = [model.step(n, tokens[8 * n : 8 * n + 8]) for n in range(2)]
    return [*steps, (model.evaluate(tokens[16:]), 0.0)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["one", *PLANS])
def test_the_loss_of_answers_is_that_of_the_plain_implementation(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    job = job_of(folder, **PLANS.get(name, {}))
    expected = plainly_trained(job, folder)
    for results in run_on_mesh(job, trained, job, folder):
        for own, plain in zip(results, expected, strict=True):
            assert own == pytest.approx(plain, rel=2e-5)
