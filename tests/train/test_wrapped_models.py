"""The decoder of text of a model with several kinds of input comes in, trains, and goes out alone."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwright.train.build import job_mesh
from support.released_models import opened
from support.wrapped_models import WRAPPED, save_wrapped
from train.test_released_models import (
    MOST,
    begun,
    difference,
    exported,
    job_of,
    our_logits,
    some_ids,
    trained_and_saved,
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", WRAPPED)
def test_a_decoder_comes_in_and_goes_out(name: str, tmp_path: Path) -> None:
    model = save_wrapped(name, tmp_path / "in")
    job = job_of(tmp_path / "in")
    mesh, ids_BS = job_mesh(job, 0, torch.device("cpu")), some_ids(job)
    with torch.no_grad():
        assert difference(our_logits(begun(job, mesh), ids_BS), model(input_ids=ids_BS).logits) < MOST
    after = trained_and_saved(mesh, job, tmp_path)
    out = exported(tmp_path)
    assert "vision_config" not in json.loads((out / "config.json").read_text())
    with torch.no_grad():
        assert after is not None and difference(opened("llama", out)(ids_BS).logits, after) < MOST


def test_experts_in_columns_are_those_in_rows(tmp_path: Path) -> None:
    """The released files of Qwen3-VL have experts as [E, H, 2 F], and transformers 5 writes [E, 2 F, H]."""
    save_wrapped("Qwen3VLMoe", tmp_path)
    job, file = job_of(tmp_path), tmp_path / "model.safetensors"
    mesh, ids_BS = job_mesh(job, 0, torch.device("cpu")), some_ids(job)
    of_rows = our_logits(begun(job, mesh), ids_BS)
    tensors = load_file(file)
    stacked = {name: tensor.transpose(1, 2).contiguous() for name, tensor in tensors.items() if ".experts." in name}
    assert len(stacked) == 8
    save_file(tensors | stacked, file)
    assert torch.equal(our_logits(begun(job, mesh), ids_BS), of_rows)
