"""The table of number types: each says what it is for, by every name that it has."""

import pytest
import torch

from shardwright.config.base import PlanError
from shardwright.config.load import load_job
from shardwright.config.number_types import NUMBER_TYPES, narrow_numbers, number_called, wide_numbers
from shardwright.cost.calibration import product_constants, shipped
from shardwright.cost.from_job import run_of
from shardwright.layers.query import PlanGrid
from shardwright.memory.job_memory import job_memory
from shardwright.memory.rank_estimate import peak_memory
from shardwright.parallel.zero.unit_setting import dtype_of


def test_bytes_are_those_of_the_dtype() -> None:
    assert [number.name for number in wide_numbers()] == ["bf16", "fp16", "float32"]
    assert [number.name for number in narrow_numbers()] == ["fp8", "mxfp8", "nvfp4"]
    assert all(dtype_of(number.name).itemsize == number.num_bytes for number in wide_numbers())
    assert dtype_of("bf16") is torch.bfloat16


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("bf16", "bf16"), ("BFloat16", "bf16"), ("float16", "fp16"), ("half", "fp16"), ("fp32", "float32"),
        ("MXFP8", "mxfp8"), ("fp8 beside bf16", "fp8"), ("NVFP4", "nvfp4"), ("int8", ""),
    ],
)  # fmt: skip
def test_a_text_names_one(text: str, name: str) -> None:
    assert number_called(text) == name


def test_narrow_numbers_are_of_products_alone() -> None:
    for number in NUMBER_TYPES.values():
        grid = PlanGrid(precision=number.name)
        assert grid.is_narrow == (len(product_constants(number.name)) == 2) == number.is_narrow
        assert grid.element_bytes == (number.num_bytes or 2)
    with pytest.raises(KeyError):
        _ = PlanGrid(precision="int8").element_bytes
    with pytest.raises(PlanError, match=r"precision\.compute = .fp8.: it should be 'float32', 'bf16' or 'fp16'"):
        load_job("quickstart", ["precision.compute=fp8"])
    with pytest.raises(PlanError, match=r"precision\.moments = .fp16.: it should be 'float32' or 'bf16'"):
        load_job("quickstart", ["precision.moments=fp16"])


@pytest.mark.parametrize("compute", ["float32", "bf16", "fp16"])
def test_weights_beside_products_in_fp8_are_in_the_numbers_of_compute(compute: str) -> None:
    overrides = ["cluster.device=h100-sxm", f"precision.compute={compute}", "precision.float8=rowwise"]
    job = load_job("quickstart", overrides)
    closed_form, account = peak_memory(run_of(job), shipped()), job_memory(job)[0]
    assert closed_form.parameters == pytest.approx(account.parameters_bytes, rel=0.01)  # without padding
    assert closed_form.optimizer == pytest.approx(account.optimizer_bytes, rel=0.01)
