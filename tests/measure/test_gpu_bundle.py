"""The bundle that gpu.py takes along to a machine without network, and the questions that it asks there."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardwright.config.job import JobSpec
from shardwright.measure.verdict import Record

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(FOLDER))

import gpu_bench  # noqa: E402
import gpu_bundle  # noqa: E402
import gpu_equal  # noqa: E402
import gpu_memory  # noqa: E402
import gpu_prepared  # noqa: E402
import gpu_probe  # noqa: E402


def bench(folder: Path) -> gpu_bench.Bench:
    return gpu_bench.Bench("cuda", True, True, folder, float("inf"))


def nothing_is_made() -> None:
    raise AssertionError("it is there")


def test_references_are_taken_from_where_they_were_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = gpu_prepared.Prepared(tmp_path / "prepared")
    job = gpu_equal.exactly(gpu_equal.small_job())
    key, record = gpu_equal.reference_key(job), gpu_equal.record_on(gpu_bench.CPU, job)
    assert prepared.keep_record(key, lambda: record, most_bytes=1000) == 0
    assert prepared.record(key, lambda: record) is record  # there was no room, and it is made again
    num_bytes = sum(box.nbytes for _, box in record.boxes)
    assert num_bytes < prepared.keep_record(key, lambda: record, most_bytes=2 * num_bytes) < 1.1 * num_bytes
    monkeypatch.setattr(gpu_prepared, "HERE", prepared)
    monkeypatch.setattr(gpu_equal, "record_on", nothing_is_made)
    gpu_equal._on_cpu.cache_clear()
    again = gpu_equal.reference(gpu_equal.small_job(plan="zero=3"))
    assert again.steps == record.steps and again.evaluated == record.evaluated
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(again.boxes, record.boxes, strict=True))
    monkeypatch.setattr(gpu_equal, "made_up_tokens", lambda job, step: torch.ones(1))
    assert gpu_equal.reference_key(job) != key  # tokens that another torch draws give something else


def test_all_references_of_part_equal_are_made_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(gpu_equal, "against_cpu", lambda bench, job: asked.append(job) or {"ok": None})
    monkeypatch.setattr(gpu_equal, "operator_cases", lambda bench: [])
    monkeypatch.setattr(gpu_equal, "_dry", lambda job: None)
    full = gpu_bench.Bench("cuda", True, False, tmp_path, float("inf"))
    for _, run in gpu_equal.cases(full):
        run()
    assert len(asked) > 40 and {job.model_dump_json() for job in asked} == {
        job.model_dump_json() for job in gpu_equal.referred_jobs()
    }


def test_dry_runs_are_taken_from_where_they_were_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, jobs = gpu_prepared.Prepared(tmp_path), gpu_memory.jobs(bench(tmp_path))
    rows = {gpu_prepared.key_of(job): {"dry": {"total_bytes": n}} for n, job in enumerate(jobs.values())}
    assert len(rows) == len(jobs)
    prepared.keep_dry_runs(rows)
    monkeypatch.setattr(gpu_prepared, "HERE", prepared)
    monkeypatch.setattr(gpu_memory, "dry_row", nothing_is_made)
    for n, job in enumerate(jobs.values()):
        assert gpu_memory._peak(bench(tmp_path), job) == {"ok": None, "dry": {"total_bytes": n}}


def test_references_that_most_cases_share_are_made_first_and_none_that_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, jobs = list[str](), {name: gpu_equal.small_job((f"run.seed={n}",)) for n, name in enumerate("abc")}

    def make(device: torch.device, job: JobSpec) -> Record:
        made.append(next(name for name, one in jobs.items() if one.run.seed == job.run.seed))
        return Record([], [(None, torch.zeros(250_000))], None)  # type: ignore[list-item]

    monkeypatch.setattr(gpu_equal, "record_on", make)
    monkeypatch.setattr(gpu_equal, "referred_jobs", lambda: [jobs[name] for name in "abbccc"])
    monkeypatch.setattr(gpu_bundle.gpu_ranks, "referred_jobs", list)
    prepared = gpu_prepared.Prepared(tmp_path)
    assert gpu_bundle.prepare_references(prepared, 2_300_000) == 2 and made == ["c", "b"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_bundle_has_the_package_the_scripts_and_the_wheels(tmp_path: Path) -> None:
    folder, wheels = tmp_path / "bundle", tmp_path / "wheels"
    wheels.mkdir()
    for python in ("311", "312"):
        with zipfile.ZipFile(wheels / f"made_up-1-cp{python}.whl", "w") as wheel:
            wheel.writestr("made_up/__init__.py", "")
            wheel.writestr(f"made_up/core.cpython-{python}.so", python)
    folder.mkdir()
    gpu_bundle.copy_scripts(folder)
    gpu_bundle.unpack(wheels, folder / "site")
    scripts = {file.name for file in (folder / "benchmarks").iterdir()}
    assert scripts == {file.name for file in FOLDER.glob("gpu*.py")} and {"gpu.py", "gpu_probe.py"} <= scripts
    assert (folder / "src" / "shardwright" / "config" / "catalog").is_dir() and not list(folder.rglob("__pycache__"))
    assert len(list((folder / "site" / "made_up").iterdir())) == 3
    assert 3e6 < gpu_bundle.size_of(folder) < gpu_bundle.MOST_BYTES / 4  # which leaves room for references


def test_a_bundle_is_run_without_a_virtual_environment(tmp_path: Path) -> None:
    shutil.copy(FOLDER.parent / "Makefile", tmp_path)
    for target, script in (("gpu-run", "gpu.py"), ("gpu-probe", "gpu_probe.py")):
        command = ["make", "-n", target, "PYTHON=mine", "ARGS=--dry"]
        alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60, env=alone)
        path = f"{tmp_path.resolve()}/build/gpu-bundle"
        assert done.stdout == f"PYTHONPATH={path}/src:{path}/site mine build/gpu-bundle/benchmarks/{script} --dry\n"


def test_what_is_no_bundle_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").write_text("kept")
    monkeypatch.setattr(sys, "argv", ["gpu_bundle.py", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        gpu_bundle.main()
    assert ended.value.code == 2 and (tmp_path / "mine").read_text() == "kept"


def test_all_questions_are_asked_dry(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_probe.py", "--dry"])
    gpu_probe.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["device", *gpu_probe.QUESTIONS]
    assert len(lines) == 11 and not [line for line in lines if "Error" in line]


def test_a_question_that_fails_is_a_line_and_the_next_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(at: gpu_bench.Bench) -> str:
        raise RuntimeError("no such\nkernel")

    monkeypatch.setattr(gpu_probe, "QUESTIONS", {"first": fails, "second": lambda at: "yes"})
    monkeypatch.setattr(sys, "argv", ["gpu_probe.py", "--dry"])
    gpu_probe.main()
    assert capsys.readouterr().out.splitlines()[1:] == ["first: RuntimeError: no such kernel", "second: yes"]


def test_without_a_device_the_probe_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_probe.py"])
    monkeypatch.setattr(gpu_probe.torch, "cuda", SimpleNamespace(is_available=lambda: False))
    with pytest.raises(SystemExit) as ended:
        gpu_probe.main()
    assert ended.value.code == 2
