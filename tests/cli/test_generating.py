"""Text of released weights and of a run's is what transformers writes with them."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import released_models
from shardwright.cli.main import cli
from shardwright.train.build import job_mesh
from train.test_released_models import exported, job_of, trained_and_saved

TOKENS = 6


def written(*words: str) -> str:
    run = CliRunner().invoke(cli, ["generate", *words, "--tokens", str(TOKENS), "--temperature", "0", "--json"])
    assert run.exit_code == 0, run.output
    return json.loads(run.stdout)["text"]


def likeliest(folder: Path) -> str:
    """What transformers adds to "def ", the likeliest token each time."""
    from transformers import AutoModelForCausalLM

    model, ids = AutoModelForCausalLM.from_pretrained(folder), list(b"def ")
    with torch.no_grad():
        for _ in range(TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return bytes(ids).decode(errors="replace")


@pytest.mark.processes
def test_text_of_a_folder_and_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, keys = released_models.RELEASED["qwen2"]
    monkeypatch.setitem(released_models.RELEASED, "bytes", (family, keys | {"vocab_size": 256}))
    released_models.save_released("bytes", tmp_path / "in")
    assert written(str(tmp_path / "in"), "--set", "plan.tp=2") == likeliest(tmp_path / "in")
    job = job_of(tmp_path / "in")
    trained_and_saved(job_mesh(job, 0, torch.device("cpu")), job, tmp_path / "run")
    assert written(str(tmp_path / "run"), "--set", "plan.pp=2") == likeliest(exported(tmp_path / "run"))
