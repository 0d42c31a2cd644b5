"""`shardwright calibrate` measures here, and what it writes prices what runs here."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardwright.cli.main import cli
from shardwright.config.catalog_entry import read_entry
from shardwright.config.cluster import DeviceSpec
from support.forked_commands import SHARDWRIGHT, ForkedCommand, run_forked

SMALL = (
    "--set", "plan.dp=2", "--set", "plan.tp=1", "--set", "plan.pp=1", "--set", "plan.sequence_parallel=false",
)  # fmt: skip


def test_a_quick_calibration_prices_a_job(tmp_path: Path) -> None:
    done = run_forked(
        SHARDWRIGHT, "calibrate", "--quick", "--ranks", "2", "--out", "mine.toml", "--json", folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["file"] == "mine.toml" and "2 ranks busy" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]
    device = read_entry("devices", str(tmp_path / "mine.toml"), DeviceSpec)
    works = {(table.work, table.busy) for table in device.measured if table.number == "float32"}
    assert {("product", 1), ("product", 2), ("update", 2), ("loss", 1), ("all_reduce", 1), ("message", 1)} <= works
    assert device.peak_tflops["float32"] > 1e-4 and device.memory_gb_per_s > 0.1
    assert device.constants is not None and 0 <= device.constants.leak <= 1
    for command in ("estimate", "plan", "explain"):
        arguments = [command, "quickstart", *SMALL, "--set", f"cluster.device={tmp_path / 'mine.toml'}", "--json"]
        if command == "plan":
            arguments += ["--set", "cluster.devices_per_node=2"]
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, result.output
    asked = ["--device", str(tmp_path / "mine.toml"), "--devices", "2", "--devices-per-node", "2", "--json"]
    priced = CliRunner().invoke(cli, ["estimate", "quickstart", *SMALL, *asked])
    assert 1e-3 < json.loads(priced.stdout)["step_s"] < 1e3


def test_a_file_of_another_kind_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[model]\nlayers = 2\n")
    done = CliRunner().invoke(cli, ["calibrate", "--out", str(tmp_path / "job.toml")])
    assert done.exit_code != 0 and "would be lost" in str(done.exception)
    assert (tmp_path / "job.toml").read_text() == "[model]\nlayers = 2\n"


@pytest.mark.parametrize("out", ["", "missing/mine.toml"])
def test_where_nothing_can_be_written_nothing_is_measured(tmp_path: Path, out: str) -> None:
    start_s = time.monotonic()
    done = CliRunner().invoke(cli, ["calibrate", "--out", str(tmp_path / out)])
    assert done.exit_code != 0 and time.monotonic() - start_s < 60
    assert list(tmp_path.iterdir()) == []


def test_a_machine_that_cannot_start_ranks_says_so(tmp_path: Path) -> None:
    done = run_forked(SHARDWRIGHT, "calibrate", "--ranks", "100000", "--out", "mine.toml", folder=tmp_path)
    assert done.returncode == 2 and "--ranks" in done.stderr and "hosts at most" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    arguments = ("calibrate", "--quick", "--ranks", "2", "--out", str(out))
    process = ForkedCommand(SHARDWRIGHT, *arguments, environment=os.environ | {"TMPDIR": str(scratch)})
    process.first_error_line()  # it measures
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate()
    assert process.returncode != 0 and "Traceback" not in printed
    assert [path.name for path in tmp_path.iterdir()] == ["scratch"] and list(scratch.iterdir()) == []
