"""A reader that leaves loses what it did not read, and nothing else: files that were asked for, and runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.forked_commands import SHARDWRIGHT, run_forked

COMMAND = (sys.executable, "-m", "shardwright")
PATIENCE_S = 300.0
MODEL = ("gpt2", "--devices", "2", "--device", "a100-sxm-80g")
NO_NOTES = ("yi-34b",)

# Files that commands write, and the option that names them; a model makes notes on standard output before.
WRITTEN: dict[str, tuple[tuple[str, ...], str]] = {
    "simulate page": (("simulate", *MODEL), "--html"),
    "simulate picture": (("simulate", *NO_NOTES), "--svg"),
    "simulate trace": (("simulate", *NO_NOTES), "--trace"),
    "simulate json": (("simulate", *NO_NOTES, "--json"), "--html"),
    "schedule": (("schedule", "1f1b"), "--svg"),
    "compare": (("schedule", "--compare"), "--html"),
    "plan": (("plan", *MODEL), "--toml"),
    "plan json": (("plan", *MODEL, "--json"), "--toml"),
    "layout": (("layout", *NO_NOTES), "--toml"),
    "scale": (("scale", *MODEL), "--svg"),
    "launch": (("launch", "quickstart", "--set", "cluster.devices_per_node=8", "--torchrun"), "--out"),
    "export": (("export", "gpt3-175b-1024", "--to", "megatron"), "--out"),
    "collective": (("collective", "all-reduce", "--ranks", "4"), "--svg"),
}


def unread(arguments: tuple[str, ...], folder: Path, both: bool = False) -> subprocess.CompletedProcess[str]:
    """A command whose standard output nobody reads, nor its standard error, if `both`."""
    here, there = os.pipe()
    os.close(here)
    try:
        return subprocess.run(
            [*COMMAND, *arguments], stdout=there, stderr=there if both else subprocess.PIPE, text=True, cwd=folder,
            timeout=PATIENCE_S, check=False,
        )  # fmt: skip
    finally:
        os.close(there)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", WRITTEN)
def test_file_is_written_though_nobody_reads(name: str, tmp_path: Path) -> None:
    arguments, option = WRITTEN[name]
    place = tmp_path / "asked"
    done = unread((*arguments, option, str(place)), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr and "Traceback" not in done.stderr
    files = list(place.iterdir()) if place.is_dir() else [place]
    assert files and all(file.stat().st_size for file in files)


def test_all_files_are_written_where_no_stream_is_read(tmp_path: Path) -> None:
    options = {"--html": "page", "--svg": "picture", "--trace": "trace"}
    words = tuple(word for option, name in options.items() for word in (option, str(tmp_path / name)))
    done = unread(("schedule", "zb-h1", *words), tmp_path, both=True)
    assert done.returncode == 0
    assert all((tmp_path / name).stat().st_size for name in options.values())


def test_refusal_keeps_its_status_where_nobody_reads(tmp_path: Path) -> None:
    assert unread(("estimate", "nope"), tmp_path, both=True).returncode == 2


def test_run_goes_on_though_nobody_reads(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one two three four five six seven eight nine ten\n" * 40)
    fields = {
        "model.layers": 1, "model.hidden": 32, "model.heads": 2, "model.kv_heads": 2, "model.vocab": 256,
        "model.sequence": 16,
        "plan.dp": 1, "plan.tp": 1, "plan.pp": 1, "batch.global_batch_size": 4, "optimizer.steps": 3,
        "run.log_every": 1, "data.path": str(tmp_path / "text.txt"), "run.folder": str(tmp_path / "run"),
    }  # fmt: skip
    sets = tuple(word for field, value in fields.items() for word in ("--set", f"{field}={value}"))
    unread_output = "import os; reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1)"
    done = run_forked(
        f"{unread_output}; os.close(writer); {SHARDWRIGHT}", "train", "quickstart", *sets, folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "grad_norm" in line] == [1, 2, 3]


def test_streams_that_were_closed_before_are_the_null_device_for_children_too() -> None:
    """Else the first socket of a run takes the place of standard output, and ranks write to it."""
    child = "import os; os.fstat(0), os.fstat(1), os.fstat(2); print('dropped')"
    code = (
        "import shardwright.__main__ as command, os, subprocess, sys\n"
        "command.ending_at_once = lambda run: None\n"
        "command.main()\n"
        "print('dropped'), print('dropped', file=sys.stderr)\n"
        "assert sys.stdin.read() == '' and os.open(os.devnull, os.O_RDONLY) > 2\n"
        f"sys.exit(subprocess.run([sys.executable, '-c', {child!r}]).returncode)\n"
    )
    closed = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code)
    assert subprocess.run(closed, timeout=PATIENCE_S, check=False).returncode == 0


def test_what_an_encoding_lacks_is_written_as_escapes() -> None:
    """An error of a strict encoding would end a run at its first line."""
    code = (
        "from shardwright.config.standard_streams import let_readers_leave\n"
        "let_readers_leave()\n"
        "print('l\\xe4uft \\udcf6')\n"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (0, b"l\\xe4uft \\udcf6\n"), done.stderr
