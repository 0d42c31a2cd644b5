"""Part calibration of gpu.py: the file that `shardwright calibrate` writes on this device."""

import subprocess
import sys
import time
from functools import partial

from gpu_bench import Bench, Case, Row


def cases(bench: Bench) -> list[Case]:
    """One: the command writes its file into the folder of the results."""
    return [("shardwright calibrate", partial(_calibrate, bench))]


def _calibrate(bench: Bench) -> Row:
    """A dry run only asks whether there is such a command."""
    command = [sys.executable, "-m", "shardwright", "calibrate"]
    asked = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60, check=False)
    if asked.returncode:
        return {"ok": None, "skipped": "this version has no command calibrate", "said": asked.stderr[-500:]}
    if bench.is_dry:
        return {"ok": None, "skipped": "a dry run measures nothing; the command is there"}
    file = bench.folder / "calibration.toml"
    left_s = max(1.0, bench.ends_s - time.monotonic())
    done = subprocess.run(
        [*command, "--out", str(file)], capture_output=True, text=True, timeout=left_s, check=False, errors="replace"
    )
    printed = done.stdout[-3000:] + done.stderr[-1000:]
    if done.returncode or not file.exists():
        raise RuntimeError(f"calibrate ended with status {done.returncode}: {printed[-400:]}")
    return {"ok": True, "file": file.name, "said": printed}
