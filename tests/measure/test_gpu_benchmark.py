"""benchmarks/gpu.py without a device: a part dry to its end, its files and its report."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwright.measure.verdict import Verdict
from support.forked_commands import SCRIPT, run_forked

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))

import gpu  # noqa: E402
import gpu_bench  # noqa: E402
import gpu_equal  # noqa: E402
import gpu_mfu  # noqa: E402
import gpu_operators  # noqa: E402
import gpu_ranks  # noqa: E402
import gpu_report  # noqa: E402

# Packages that an image with torch alone lacks, and a bundle does not bring: none of them may be imported.
_LEAN = """
import sys
LACKED = {"pyarrow", "rich", "tensorboard", "tokenizers", "transformers", "yaml"}
class Lacked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in LACKED:
            raise ModuleNotFoundError(f"there is no {name} in an image with torch alone")
sys.meta_path.insert(0, Lacked())
"""


def run_gpu(*options: str, path: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """The script, from its beginning if modules of its own are in `path`."""
    if path is None:
        return run_forked(SCRIPT, str(FOLDER / "gpu.py"), *options)
    command = [sys.executable, str(FOLDER / "gpu.py"), *options]
    environment = os.environ | {"PYTHONPATH": str(path)}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)


def parts_in(folder: Path, *parts: str) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{part}.json").read_text("utf-8")) for part in parts]


@pytest.mark.processes
def test_a_part_runs_dry_to_its_end_and_not_again(tmp_path: Path) -> None:
    """The kernels alone: all parts take a minute, and are `make gpu ARGS="--dry --quick"`."""
    lean, out = tmp_path / "lean", tmp_path / "out"
    lean.mkdir()
    (lean / "sitecustomize.py").write_text(_LEAN)
    asked = ("--dry", "--quick", "--parts", "kernels", "--out", str(out))
    done = run_gpu(*asked, path=lean)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (result,) = parts_in(out, "kernels")
    assert {file.name for file in out.iterdir()} == {"kernels.json", "report.md"}
    assert result["status"] == "complete" and result["rows"]
    assert not [row for row in result["rows"] if "error" in row]
    assert "## kernels (dry quick)" in done.stdout
    assert (out / "report.md").read_text("utf-8") == done.stdout
    priced = [passes for row in result["rows"] for passes in row["passes"].values()]
    assert all(one["roofline_s"] > 0 and one["seconds"] is None for one in priced)
    assert sum(one["predicted_s"] is not None for one in priced) > len(priced) / 2
    again = run_gpu(*asked)
    assert again.stdout == done.stdout and parts_in(out, "kernels") == [result]
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
    with pytest.raises(SystemExit) as ended:
        gpu_bench.run_cases(bench(tmp_path, -1.0), [("fourth", works)], file)
    assert ended.value.code == gpu_bench.OUT_OF_TIME and len(calls) == 2 and len(gpu_bench.read_rows(file)) == 3


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
    gpu_bench.put_last(file)
    assert [row["case"] for row in gpu_bench.read_rows(file)] == ["next"]
    works = [(name, lambda: {"ok": True}) for name in ("fatal", "next", "behind")]
    gpu_bench.run_cases(bench(tmp_path), works, file)
    assert [row["case"] for row in gpu_bench.read_rows(file)] == ["next", "behind", "fatal"]  # it may take all the time


def call_gpu(monkeypatch: pytest.MonkeyPatch, folder: Path, cases: list[gpu_bench.Case], **options: Any) -> Any:
    """One call of a made-up part. Returns what is in its file."""
    monkeypatch.setitem(sys.modules, "gpu_made_up", SimpleNamespace(cases=lambda _: cases))
    monkeypatch.setattr(gpu, "PARTS", {"made_up": 300})
    device = {"catalog_name": ""} | options.pop("device", {"name": "one"})
    monkeypatch.setattr(gpu, "_device_of", lambda _: device)
    asked = {"device": "cpu", "dry": False, "quick": False, "again": False, "limit": 600.0} | options
    gpu._run(SimpleNamespace(**asked), ["made_up"], folder)  # type: ignore[arg-type]
    return gpu_bench.read_part(folder / "made_up.json")


def test_a_call_goes_on_behind_the_last_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls"

    def case(name: str, ends_time: bool = False) -> gpu_bench.Case:
        def run() -> gpu_bench.Row:
            with calls.open("a") as file:
                file.write(f"{name} ")
            if ends_time:  # of this process, that of the part
                gpu_bench.time = SimpleNamespace(monotonic=lambda: 1e18, perf_counter=lambda: 0.0)  # type: ignore
            return {"ok": True}

        return name, run

    cases = [case("first", ends_time=True), case("second"), case("third")]
    out = tmp_path / "out"
    part = call_gpu(monkeypatch, out, cases)
    assert part["status"] == "out of time" and "at 1 of 3 cases" in part["error"] and gpu.is_wrong(part)
    part = call_gpu(monkeypatch, out, cases)
    assert part["status"] == "complete" and calls.read_text() == "first second third " and "error" not in part
    assert call_gpu(monkeypatch, out, cases) == part
    halved = part | {"status": "begun", "rows": part["rows"][:2]}
    gpu_bench.write_json(out / "made_up.json", halved)  # a call that was killed
    assert len(call_gpu(monkeypatch, out, cases)["rows"]) == 3 and calls.read_text().split()[3:] == ["third"]
    gpu_bench.write_json(out / "made_up.json", halved)  # rows of two devices are not one part
    call_gpu(monkeypatch, out, cases[1:], device={"name": "another"})
    assert calls.read_text().split()[4:] == ["second", "third"]
    call_gpu(monkeypatch, out, cases[1:], again=True, device={"name": "another"})
    assert calls.read_text().split()[6:] == ["second", "third"]
    assert [file.name for file in out.iterdir()] == ["made_up.json"]


def test_strategies_of_two_ranks_go_on_behind_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, moments = list[list[str]](), iter([0.0, 1.0, 100.0, 0.0, 1.0])

    def run_pair(at: gpu_bench.Bench, via: str, names: list[str]) -> dict[str, Any]:
        asked.append(names)
        return {"plans": {name: {"ok": True} for name in names[:1]}, "error": "a rank ended"}

    monkeypatch.setattr(gpu_ranks, "_run_pair", run_pair)
    monkeypatch.setattr(gpu_ranks, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    at = gpu_bench.Bench("cpu", False, False, tmp_path, 50.0)
    with pytest.raises(gpu_bench.TimeIsOverError) as over:
        gpu_ranks._strategies(at, "a case", "cpu", ["a", "b", "c"])
    # The second failed alone: its pair went on to it, and ended there.
    assert asked == [["a", "b", "c"]] and over.value.so_far["a"]["ok"] and "c" not in over.value.so_far
    gpu_bench.write_json(at.file("ranks"), {"half": {"a case": over.value.so_far}})
    row = gpu_ranks._strategies(at, "a case", "cpu", ["a", "b", "c"])
    assert asked[1:] == [["c"]] and list(row["plans"]) == ["a", "b", "c"]


def test_what_a_case_has_half_done_is_kept(tmp_path: Path) -> None:
    def halves() -> gpu_bench.Row:
        raise gpu_bench.TimeIsOverError({"a": 1})

    file = tmp_path / "part.json"
    with pytest.raises(SystemExit) as ended:
        gpu_bench.run_cases(bench(tmp_path), [("long", halves)], file)
    assert ended.value.code == gpu_bench.OUT_OF_TIME
    assert gpu_bench.read_part(file) == {"num_cases": 1, "rows": [], "half": {"long": {"a": 1}}}


def test_two_runs_may_differ_by_what_has_no_fixed_order_and_by_no_more(tmp_path: Path) -> None:
    def verdict(difference: float) -> Verdict:
        return Verdict(2, 1, difference, difference, difference, bitwise=difference == 0)

    on_cuda = replace(bench(tmp_path), kind="cuda")
    row: gpu_bench.Row = {"ok": True, "differences": {}, "limits": {}}
    near, far = (gpu_equal.run_twice(on_cuda, dict(row), verdict(difference)) for difference in (1e-7, 1e-4))
    assert near["ok"] and not far["ok"] and near["bits of two runs"] is False
    assert all(0 < limit < 1e-4 for limit in near["limits"].values()) and "attention" in near["no fixed order"][0]
    assert "Without a fixed order: attention" in gpu_report._equal([near | {"case": "dropout"}])
    assert not gpu_equal.run_twice(bench(tmp_path), dict(row), verdict(1e-7))["ok"]
    assert gpu_equal.run_twice(bench(tmp_path), dict(row), verdict(0.0))["ok"]


def test_blocks_get_the_output_with_its_rows_one_behind_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, gradients = list[Tensor](), gpu_operators.block_gradients

    def looked_at(block: Any, dout: Tensor, out: Tensor, lse: Tensor) -> Any:
        seen.append(out)
        return gradients(block, dout, out, lse)

    monkeypatch.setattr(gpu_operators, "block_gradients", looked_at)
    (run,) = (run for name, run in gpu_operators.operator_cases(bench(tmp_path)) if name == "block attention, float32")
    assert run()["ok"]
    assert len(seen) == 3 and all(out.stride(2) == out.shape[1] * out.shape[3] for out in seen)


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
    rows = gpu_bench.read_rows(at.file("made_up"))
    assert [row["case"] for row in rows] == ["ruin", "next"] and "ended in this case" in rows[0]["error"]
    assert gpu.is_wrong({"status": "complete", "rows": rows})
    assert not gpu.is_wrong({"status": "complete", "rows": rows[1:]})
    monkeypatch.setitem(sys.modules, "gpu_made_up", SimpleNamespace(cases=lambda _: cases))
    monkeypatch.setattr(gpu, "_GRACE_S", 0.5)
    start_s = time.monotonic()
    status, error = gpu._run_part(bench(tmp_path, 1.0), "made_up")
    assert status == "out of time" and error and time.monotonic() - start_s < 20
    assert [row["case"] for row in gpu_bench.read_rows(at.file("made_up"))] == ["ruin", "next", "long"]


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
