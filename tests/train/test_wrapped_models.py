"""The decoder of text of a model with several kinds of input comes in, trains, and goes out alone."""

import json
from pathlib import Path

import pytest
import torch

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
