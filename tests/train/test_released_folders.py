"""Folders of released weights as people have them: a tied head that lies there too, missing parts, adapters."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwright.config.base import PlanError
from shardwright.config.load import load_job
from shardwright.train.build import job_mesh
from shardwright.train.checkpoint.converting import convert_folder
from support.released_models import save_released
from train.test_released_models import begun, job_of, our_logits, some_ids

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
Tensors = dict[str, Tensor]


def change(folder: Path, by: Callable[[Tensors], object]) -> None:
    """Change what lies in a folder's one file."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    by(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    save_released("llama 3.1", tmp_path / "tied")
    return tmp_path / "tied"


def logits(folder: Path) -> Tensor:
    job = job_of(folder)
    return our_logits(begun(job, job_mesh(job, 0, torch.device("cpu"))), some_ids(job))


def refusal(folder: Path) -> str:
    with pytest.raises(PlanError) as caught:
        logits(folder)
    return str(caught.value)


def test_a_tied_head_may_lie_there_too(tied: Path) -> None:
    wanted = logits(tied)
    change(tied, lambda tensors: tensors.update({HEAD: tensors[TABLE].clone()}))
    assert torch.equal(logits(tied), wanted)


def test_one_that_is_another_matrix_is_refused(tied: Path) -> None:
    change(tied, lambda tensors: tensors.update({HEAD: tensors[TABLE] + 0.1}))
    assert f"{HEAD} is not {TABLE}, and config.json says that it is" in refusal(tied)


def test_all_files_that_are_missing_are_named(tied: Path) -> None:
    named = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model.safetensors"}
    (tied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    assert "2 files of the 3 that model.safetensors.index.json names are missing" in (printed := refusal(tied))
    assert "model-1.safetensors, model-2.safetensors" in printed


def test_quantised_weights_are_called_so(tied: Path) -> None:
    def quantise(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("proj.weight")]:
            tensors[name.replace(".weight", ".qweight")] = torch.zeros(4, 4, dtype=torch.int32)
            del tensors[name]

    change(tied, quantise)
    assert "quantised as by GPTQ or AWQ" in refusal(tied)
    with pytest.raises(PlanError, match="28 tensors of integers stand for weights") as caught:
        convert_folder(tied, tied.parent / "out", file_bytes=2**20)
    assert len(caught.value.faults) == 1


def test_an_adapter_is_no_model(tied: Path) -> None:
    (tied / "adapter_config.json").write_text("{}")
    (tied / "model.safetensors").rename(tied / "adapter_model.safetensors")
    assert "is an adapter (LoRA)" in refusal(tied)
    (tied / "config.json").unlink()
    job = tied.parent / "job.toml"
    job.write_text('[model]\nweights = "tied"\n')
    with pytest.raises(PlanError, match=r"is an adapter \(LoRA\) and no model; merge it"):
        load_job(str(job))
