"""Mechanisms against public measurements of them by themselves, as docs/mechanisms.md has them."""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_kernels() -> None:
    from kernels import MeasuredKernel, error, measured_kernels

    rows: dict[tuple[str, str, str], list[MeasuredKernel]] = defaultdict(list)
    for row in measured_kernels():
        rows[row.name, row.device, row.library].append(row)
    assert sum(map(len, rows.values())) == 659
    for device in ("a100-sxm-80g", "h100-sxm", "h200-sxm"):
        assert error(rows["product in bf16", device, "cublas"]) <= 0.22
    for device in ("a100-pcie-40g", "a40", "h100-pcie", "h20", "rtx-4090", "rtx-5090"):
        assert error(rows["product in bf16", device, "torch"]) <= 0.22
    assert error(rows["product in fp16", "v100-sxm-16g", "torch"]) <= 0.22
    for device in ("tpu-v6e", "tpu-v7x"):
        assert error(rows["product in bf16", device, "xla"]) <= 0.2
    assert error(rows["attention, forward", "tpu-v6e", "splash"]) <= 0.12
    for device in ("h100-sxm", "h200-sxm", "b200-sxm", "b300-sxm", "gb200-nvl72"):
        assert error(rows["product in fp8", device, "cublas"]) <= 0.2
    for library in ("flash2", "cudnn"):
        assert error(rows["attention, forward", "h100-sxm", library]) <= 0.25
    for device in ("gb200-nvl72", "gb300-nvl72", "h200-sxm"):
        for direction in ("forward", "backward"):
            in_fp8 = rows[f"attention in fp8, {direction}", device, "cudnn"]
            assert error(in_fp8 + rows[f"attention in mxfp8, {direction}", device, "cudnn"]) <= 0.2
    assert error(rows["attention in fp8, forward", "h100-sxm", "cudnn"]) <= 0.15


@pytest.mark.long
def test_small_models_weak_scaling_and_ends_of_pipelines() -> None:
    from mechanisms import Part, pipeline_ends, small_models, steps, weak_scaling

    def error(parts: Iterable[Part]) -> float:
        return statistics.median(abs(part.error) for part in parts)

    every_step = steps()
    assert error(small_models(every_step)) <= 0.15
    scaled = weak_scaling(every_step)
    assert len(scaled) > 50 and error(scaled) <= 0.03
    assert error(pipeline_ends(every_step)) <= 0.2
