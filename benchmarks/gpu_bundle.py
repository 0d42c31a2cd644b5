"""Pack what gpu.py needs on a machine that has torch for CUDA, and no network: one folder of 40 MB at most.

    .venv/bin/python benchmarks/gpu_bundle.py build/gpu-bundle             # make gpu-bundle
    PYTHONPATH=build/gpu-bundle/src:build/gpu-bundle/site python3 build/gpu-bundle/benchmarks/gpu.py      # make gpu-run

In it are the package and the scripts as they are now, the wheels that an image with nothing but torch and numpy lacks,
for its Python and for the one that packs, and what a CPU can make beforehand (gpu_prepared.py): dry runs for devices of
the catalog, and as many references as there is room for, those that most cases share first.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import gpu_equal
import gpu_memory
import gpu_ranks
import torch
from gpu_bench import CPU, Bench, write_json
from gpu_prepared import Prepared, key_of

import shardwright

MOST_BYTES = 40_000_000
_KEPT_FREE = 1_000_000  # of it, for what is written last
_HERE = Path(__file__).parent
_NEEDED = ("click", "pydantic")  # all else that is imported comes with torch, or is numpy
_PYTHONS = ("3.12", f"{sys.version_info.major}.{sys.version_info.minor}")
_PLATFORMS = [f"manylinux{version}_x86_64" for version in ("_2_28", "_2_17", "2014", "1")]
_DEVICES = ("h100-sxm", "h200-sxm")
_MADE = "made.json"


def main() -> None:
    """Pack the folder that was asked for, and say what is in it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheels", type=Path, help="folder of wheels to take instead of what pip would fetch")
    asked = parser.parse_args()
    if asked.folder.exists() and not (asked.folder / _MADE).exists() and any(asked.folder.iterdir()):
        parser.error(f"{asked.folder} is no bundle, and would be lost")
    printed = pack(asked.folder, asked.wheels)
    print(json.dumps(printed, indent=1))
    if printed["bytes"] > MOST_BYTES:
        sys.exit(f"{asked.folder} has {printed['bytes']:,} bytes, more than {MOST_BYTES:,}")


def pack(folder: Path, wheels: Path | None = None) -> dict[str, int | str]:
    """Make the folder anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    made: dict[str, int | str] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "torch": torch.__version__, "commit": _commit()
    }  # fmt: skip
    write_json(folder / _MADE, made)  # from here on it may be made anew
    copy_scripts(folder)
    with tempfile.TemporaryDirectory() as scratch:
        unpack(wheels or _fetched(Path(scratch)), folder / "site")
    prepared = Prepared(folder / "benchmarks" / "prepared")
    made["dry runs"] = prepare_dry_runs(prepared)
    made["references"] = prepare_references(prepared, MOST_BYTES - _KEPT_FREE - size_of(folder))
    made["bytes"] = size_of(folder)
    write_json(folder / _MADE, made)
    return made


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def copy_scripts(folder: Path) -> None:
    """Copy the package and the scripts of gpu.py."""
    package = Path(shardwright.__file__).parent
    shutil.copytree(package, folder / "src" / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "benchmarks").mkdir()
    for script in sorted(_HERE.glob("gpu*.py")):
        shutil.copy(script, folder / "benchmarks")


def unpack(wheels: Path, site: Path) -> None:
    """Put all wheels into one folder for sys.path: files for one Python have its version in their names."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(site)


def _fetched(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", str(folder)]
    where = ["--only-binary", ":all:", "--implementation", "cp", *(f"--platform={name}" for name in _PLATFORMS)]
    constraints = _HERE.parent / "constraints.txt"
    for python in dict.fromkeys(_PYTHONS):
        command = [*pip, *where, "--python-version", python, "--constraint", str(constraints), *_NEEDED]
        subprocess.run(command, check=True)
    return folder


def _commit() -> str:
    asked = ["git", "-C", str(_HERE), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "not known"


def prepare_dry_runs(prepared: Prepared) -> int:
    """The dry runs of part memory. Returns how many."""
    rows = {}
    for name in _DEVICES:
        for job in gpu_memory.jobs(Bench("cuda", True, False, Path(), 0.0, name)).values():
            rows[key_of(job)] = gpu_memory.dry_row(job)
    prepared.keep_dry_runs(rows)
    return len(rows)


def prepare_references(prepared: Prepared, most_bytes: int) -> int:
    """References of parts equal and ranks, until so many bytes are full. Returns how many."""
    jobs = [*gpu_equal.referred_jobs(), *gpu_ranks.referred_jobs()]
    exact = [gpu_equal.exactly(job) for job in jobs]
    by_key = {gpu_equal.reference_key(job): job for job in exact}
    left_bytes, kept = most_bytes, list[int]()
    for key, _ in Counter(map(gpu_equal.reference_key, exact)).most_common():
        if left_bytes < min(kept, default=0):
            break  # what is left has no room for the smallest
        make = partial(gpu_equal.record_on, CPU, by_key[key])
        if num_bytes := prepared.keep_record(key, make, left_bytes):
            left_bytes -= num_bytes
            kept.append(num_bytes)
    return len(kept)


if __name__ == "__main__":
    main()
