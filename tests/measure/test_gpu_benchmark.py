"""benchmarks/gpu.py without a device: a part dry to its end, its files and its report."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))

import gpu  # noqa: E402
import gpu_bench  # noqa: E402
import gpu_equal  # noqa: E402
import gpu_mfu  # noqa: E402
import gpu_report  # noqa: E402


def run_gpu(*options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(FOLDER / "gpu.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def parts_in(folder: Path, *parts: str) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{part}.json").read_text("utf-8")) for part in parts]


@pytest.mark.processes
def test_a_part_runs_dry_to_its_end_and_not_again(tmp_path: Path) -> None:
    """The kernels alone: all parts take a minute, and are `make gpu ARGS="--dry --quick"`."""
    asked = ("--dry", "--quick", "--parts", "kernels", "--out", str(tmp_path))
    done = run_gpu(*asked)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (found,) = parts_in(tmp_path, "kernels")
    assert found["status"] == "complete" and found["rows"]
    assert not [row for row in found["rows"] if "error" in row]
    assert "## kernels (dry quick)" in done.stdout
    assert (tmp_path / "report.md").read_text("utf-8") == done.stdout
    priced = [passes for row in found["rows"] for passes in row["passes"].values()]
    assert all(one["roofline_s"] > 0 and one["seconds"] is None for one in priced)
    assert sum(one["predicted_s"] is not None for one in priced) > len(priced) / 2
    again = run_gpu(*asked)
    assert again.stdout == done.stdout and parts_in(tmp_path, "kernels") == [found]
    assert again.stderr.count("not again") == 1


@pytest.mark.processes
def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    done = run_gpu("--out", str(tmp_path))
    assert done.returncode == 2 and "--dry" in done.stderr and not list(tmp_path.glob("*.json"))


def bench(folder: Path, seconds: float = 60.0) -> gpu_bench.Bench:
    return gpu_bench.Bench("cpu", False, False, folder, time.monotonic() + seconds)


def test_a_case_that_fails_is_written_down_and_the_next_goes_on(tmp_path: Path) -> None:
    file, calls = tmp_path / "rows.json", list[str]()

    def fails() -> gpu_bench.Row:
        raise ValueError("no such kernel")

    def works() -> gpu_bench.Row:
        calls.append("works")
        return {"ok": True}

    cases = [("first", fails), ("second", works)]
    gpu_bench.run_cases(bench(tmp_path), cases, file)
    first, second = gpu_bench.read_rows(file)
    assert first["error"] == "ValueError: no such kernel" and "fails" in first["trace"]
    assert second["ok"] and calls == ["works"]
    gpu_bench.run_cases(bench(tmp_path), [*cases, ("third", works)], file)
    assert [row["case"] for row in gpu_bench.read_rows(file)] == ["first", "second", "third"]
    assert len(calls) == 2  # what has a row is not run again
    gpu_bench.run_cases(bench(tmp_path, -1.0), [("fourth", works)], file)
    assert "the time of this part was over" in gpu_bench.read_rows(file)[-1]["error"] and len(calls) == 2


def test_a_case_that_ends_the_process_is_passed_over_then_but_not_in_the_next_call(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"

    def ends() -> gpu_bench.Row:
        raise SystemExit(9)

    with pytest.raises(SystemExit):
        gpu_bench.run_cases(bench(tmp_path), [("fatal", ends)], file)
    (row,) = gpu_bench.read_rows(file)
    assert "ended in this case" in row["error"]
    gpu_bench.run_cases(bench(tmp_path), [("fatal", ends), ("next", lambda: {"ok": True})], file)
    assert [row["case"] for row in gpu_bench.read_rows(file)] == ["fatal", "next"]
    gpu_bench.forget_begun(file)
    assert [row["case"] for row in gpu_bench.read_rows(file)] == ["next"]


_ATTENTION = functional.scaled_dot_product_attention


def by_plain_products(*args: Any, **options: Any) -> Tensor:
    """torch's attention without its fused kernels."""
    with sdpa_kernel(SDPBackend.MATH):
        return _ATTENTION(*args, **options)


@pytest.mark.parametrize("fields", [("model.name=tiny-mixtral",), ("precision.float8=tensorwise",)])
def test_limits_of_narrow_numbers_hold_and_tell_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: tuple[str, ...]
) -> None:
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        # torch's attention packs bf16 for a processor's matrix unit, and fails where its kernels may not use that.
        monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", by_plain_products)
    job = gpu_equal.small_job(("precision.compute=bf16", *fields))
    row = gpu_equal.against_cpu(bench(tmp_path), job)
    assert row["ok"] and all(row["differences"].values()), row
    other = gpu_equal.small_job(("run.seed=77", *fields))
    monkeypatch.setattr(gpu_equal, "exactly", lambda _: other.model_copy(update={"precision": job.precision}))
    assert not gpu_equal.against_cpu(bench(tmp_path), job)["ok"]


def test_a_process_that_breaks_is_followed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> gpu_bench.Row:
        os._exit(gpu_bench.BROKEN)

    cases = [("ruin", breaks), ("next", lambda: {"ok": True}), ("long", lambda: time.sleep(60))]
    monkeypatch.setitem(sys.modules, "gpu_made_up", SimpleNamespace(cases=lambda _: cases[:2]))
    at = bench(tmp_path)
    assert gpu._run_part(at, "made_up") == ("complete", "")
    rows = gpu_bench.read_rows(at.rows_file("made_up"))
    assert [row["case"] for row in rows] == ["ruin", "next"] and "ended in this case" in rows[0]["error"]
    assert gpu.is_wrong({"status": "complete", "rows": rows})
    assert not gpu.is_wrong({"status": "complete", "rows": rows[1:]})
    monkeypatch.setitem(sys.modules, "gpu_made_up", SimpleNamespace(cases=lambda _: cases))
    monkeypatch.setattr(gpu, "_GRACE_S", 0.5)
    start_s = time.monotonic()
    status, error = gpu._run_part(bench(tmp_path, 1.0), "made_up")
    assert status == "out of time" and error and time.monotonic() - start_s < 20
    assert [row["case"] for row in gpu_bench.read_rows(at.rows_file("made_up"))] == ["ruin", "next", "long"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTN", "products"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>", "attention"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, silu_kernel>", "elementwise"),
    ],
)
def test_kernels_are_told_apart(name: str, kind: str) -> None:
    assert gpu_mfu.kind_of_kernel(name) == kind


def test_the_report_shows_what_was_measured_and_what_failed() -> None:
    head = {
        "mode": {"dry": False, "quick": False, "kind": "cuda"}, "date": "2026-01-02T03:04:05+00:00", "took_s": 12.0,
        "device": {"name": "NVIDIA H200", "torch": "2.13.0", "cuda": "13.0", "nccl": "2.28.9"}, "status": "complete",
    }  # fmt: skip
    passes = {
        "forward": {
            "seconds": [1e-3, 2e-3, 3e-3], "flops_per_s": 7e14, "roofline_s": 1.4e-3, "of_roofline": 0.7,
            "predicted_s": 1.6e-3, "over_predicted": 1.25,
        }
    }  # fmt: skip
    kernels = head | {"rows": [{"case": "qkv", "passes": passes}, {"case": "rotary", "error": "RuntimeError: no"}]}
    far = {"case": "llama", "differences": {"loss": 2e-3}, "limits": {"loss": 1e-5}, "ok": False}
    refused = {"case": "NCCL", "accepted": False, "said": "Duplicate GPU detected"}
    text = gpu_report.report({"equal": head | {"rows": [far]}, "ranks": head | {"rows": [refused]}, "kernels": kernels})
    assert "2026-01-02T03:04:05+00:00, NVIDIA H200, torch 2.13.0, cuda 13.0, nccl 2.28.9; complete after 12 s." in text
    assert "| qkv | forward | 2000 [1000, 3000] | 700 | - | 1400 | 70% | 1600 | 1.25 |" in text
    assert "- rotary: RuntimeError: no" in text
    assert "| llama | loss 2.0e-03 of 1.0e-05 | **no** |" in text
    assert "refused: Duplicate GPU detected" in text
