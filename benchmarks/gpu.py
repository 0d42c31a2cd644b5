"""Tests of one CUDA device: right numbers, kernels, speed, memory, runs, a calibration, in calls of eight minutes.

    .venv/bin/python benchmarks/gpu.py                             # make gpu: all parts, as far as one call comes
    .venv/bin/python benchmarks/gpu.py --parts kernels,mfu         # some of them
    .venv/bin/python benchmarks/gpu.py --dry                       # on tensors without memory, no device needed
    .venv/bin/python benchmarks/gpu.py --report                    # the tables of what was measured so far

Each part runs in a process of its own, has a limit of its own, and leaves PART.json in the folder of `--out`. The same
call once more goes on: behind the last row of a part whose time was over, or that was interrupted, and with the parts
that had no time; a part that is over is not run again without `--again`. A failure is written down with its error, and
the rest goes on: case by case, and where a kernel leaves the device's context in ruins another process goes on behind
that case. Compiled kernels are kept for the next call (TORCHINDUCTOR_CACHE_DIR, by default runs/gpu-compiled).
docs/gpu.md plans half an hour on a device, and benchmarks/README.md says what the parts measure.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_bench import OUT_OF_TIME, Bench, Row, put_last, read_part, read_rows, run_cases, write_json
from gpu_report import report

# In this order, with most seconds of each in one call, for a machine that has compiled nothing yet. A call of all goes
# as far as its time allows.
PARTS = {"equal": 250, "ranks": 80, "kernels": 120, "mfu": 200, "memory": 150, "train": 150, "calibration": 100}
_CALL_S = 470.0
_LEAST_S = 20.0  # with less left in a call no part begins
_GRACE_S = 5.0  # between a part's own limit, at which it begins no case, and its end
_DRY_S = 600.0
_NO_DEVICE = 4
_OUT_OF_TIME = "out of time"

Fork = multiprocessing.get_context("fork")


def main() -> None:
    """Run what was asked for, and print the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", help=f"some of {', '.join(PARTS)}, with commas  [default: all]")
    parser.add_argument("--out", type=Path, help="folder of the results  [default: runs/gpu, runs/gpu-dry with --dry]")
    parser.add_argument("--again", action="store_true", help="from the beginning, also what is there")
    parser.add_argument("--dry", action="store_true", help="on tensors without memory, to the end of every part")
    parser.add_argument("--quick", action="store_true", help="one case of each kind, of small sizes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries equal, ranks, train alone")
    parser.add_argument("--limit", type=float, default=_CALL_S, help="seconds of the whole call")
    parser.add_argument("--report", action="store_true", help="only print what was measured")
    asked = parser.parse_args()
    known = list(PARTS) if asked.device == "cuda" else ["equal", "ranks", "train"]
    names = asked.parts.split(",") if asked.parts else known
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no part {', '.join(unknown)} on {asked.device}; the parts are {', '.join(known)}")
    folder = asked.out or Path("runs", "gpu-dry" if asked.dry else "gpu")
    if asked.dry and asked.device == "cpu":
        parser.error("a dry run takes the kernels of CUDA; leave --device out")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path("runs", "gpu-compiled").resolve()))
    if not asked.report:
        _run(asked, names, folder)
    result = {name: part for name in PARTS if (part := read_part(folder / f"{name}.json"))}
    text = report(result)
    print(text)
    if result:
        folder.joinpath("report.md").write_text(text + "\n", encoding="utf-8")
    left = (
        []
        if asked.report
        else [name for name in names if result.get(name, {}).get("status") in (None, "begun", _OUT_OF_TIME)]
    )
    if left:
        print(f"not over: {', '.join(left)}; the same command goes on there", file=sys.stderr)
    sys.exit(1 if left or any(is_wrong(part) for part in result.values()) else 0)


def is_wrong(part: dict[str, Any]) -> bool:
    """True if a part did not come to its end, or a case of it failed."""
    return part["status"] != "complete" or any("error" in row or row.get("ok") is False for row in part["rows"])


def _run(asked: argparse.Namespace, names: list[str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + asked.limit
    device = _device_of(asked)
    bench = Bench(asked.device, asked.dry, asked.quick, folder, 0.0, device["catalog_name"])
    for name in names:
        left_s = min(float(PARTS[name]), end_s - time.monotonic() - _GRACE_S)
        if asked.dry:  # nothing is measured, and a busy CPU may take its time
            left_s = _DRY_S
        file, before = bench.file(name), read_part(bench.file(name))
        if before.get("mode") == bench.mode and before["status"] == "complete" and not asked.again:
            print(f"{name}: measured on {before['date']}, not again", file=sys.stderr)
            continue
        if left_s < min(_LEAST_S, asked.limit / 2):
            print(f"{name}: not begun, the time of this call is over", file=sys.stderr)
            continue
        goes_on = may_go_on(before, bench, device) and not asked.again
        part = before if goes_on else {"part": name, "mode": bench.mode, "device": device, "took_s": 0.0, "rows": []}
        write_json(file, part | {"status": "begun", "date": _now()})
        put_last(file)
        behind = f", behind {len(part['rows'])} cases" if part["rows"] else ""
        print(f"{name}: up to {left_s:.0f} s{behind} ...", file=sys.stderr, flush=True)
        start_s = time.monotonic()
        status, error = _run_part(replace(bench, ends_s=start_s + left_s), name)
        taken_s = time.monotonic() - start_s
        over = read_part(file) | {"status": status, "date": _now(), "took_s": round(part["took_s"] + taken_s, 1)}
        over.pop("error", None)
        write_json(file, over | ({"error": error} if error else {}))
        print(f"{name}: {status} after {taken_s:.0f} s{f', {error}' if error else ''}", file=sys.stderr, flush=True)


def may_go_on(before: Row, bench: Bench, device: Row) -> bool:
    """True if the rows of a part are of such a call on such a device, and others may follow them."""
    return before.get("mode") == bench.mode and before.get("device") == device


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _run_part(bench: Bench, name: str) -> tuple[str, str]:
    """How a part ended, and with which error. A process that ended early is followed by another, which goes on behind
    the case that it ended in."""
    num_rows = len(read_rows(bench.file(name)))
    while (left_s := bench.ends_s - time.monotonic()) > 0:
        process = Fork.Process(target=_in_child, args=(name, bench))
        process.start()
        try:
            process.join(left_s + _GRACE_S)
            if process.is_alive():
                return _OUT_OF_TIME, f"a case was not over {_GRACE_S:.0f} s after the limit of this part"
        finally:
            _end(process)
        if process.exitcode == 0:
            return "complete", ""
        if process.exitcode == OUT_OF_TIME:
            break
        before, num_rows = num_rows, len(read_rows(bench.file(name)))
        if num_rows == before:
            return "failed", f"the process of this part ended with status {process.exitcode}"
    part = read_part(bench.file(name))
    return _OUT_OF_TIME, f"its limit was over at {len(part.get('rows', ()))} of {part.get('num_cases', '?')} cases"


def _end(process: Any) -> None:
    """End a part's process and what it started."""
    if process.is_alive():
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
        process.join()


def _in_child(name: str, bench: Bench) -> None:
    """All of a part. Only here CUDA is touched: after a fork it could not be."""
    os.setpgid(0, 0)
    import torch

    if bench.is_dry:
        torch.set_num_threads(1)
    part = importlib.import_module(f"gpu_{name}")
    run_cases(bench, part.cases(bench), bench.file(name))


def _device_of(asked: argparse.Namespace) -> Row:
    """The device that runs this. Ends the command where there is no such device."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "device.json")
        process = Fork.Process(target=_look_at_device, args=("dry" if asked.dry else asked.device, file))
        process.start()
        process.join()
        if process.exitcode == _NO_DEVICE:
            print("torch sees no CUDA device here; --dry runs every part without one", file=sys.stderr)
            sys.exit(2)
        if process.exitcode:
            print(f"the device can't be used: its process ended with status {process.exitcode}", file=sys.stderr)
            sys.exit(2)
        result: Row = json.loads(file.read_text("utf-8"))
        return result


def _look_at_device(kind: str, file: Path) -> None:
    import torch

    from shardwright.config.load import load_job
    from shardwright.train.step_metrics import known_device

    result: Row = {"torch": torch.__version__, "cuda": torch.version.cuda, "cores": os.cpu_count()}
    if kind != "cuda":
        catalog_name = "h200-sxm" if kind == "dry" else ""
        write_json(file, result | {"name": f"{kind}, no device", "catalog_name": catalog_name})
        return
    if not torch.cuda.is_available():
        sys.exit(_NO_DEVICE)
    device = torch.device("cuda", 0)
    known = known_device(load_job("quickstart", []), device)
    properties = torch.cuda.get_device_properties(device)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
    result |= {
        "name": properties.name, "catalog_name": known.name if known else "", "nccl": nccl,
        "memory_bytes": properties.total_memory, "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
    }  # fmt: skip
    write_json(file, result)


if __name__ == "__main__":
    main()
