"""Every command's text fits a terminal of 80 columns, and 100 in a pipe, but for words and names that can't be broken;
and amounts are written alike."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardwright.cli.main import cli

pytestmark = pytest.mark.usefixtures("searched_once")

_ON_8 = "--devices 8 --device h100-sxm"
COMMANDS = (
    f"estimate tiny-llama {_ON_8} --set plan.tp=2 --set plan.dp=4 --beside",
    "estimate quickstart",
    "explain quickstart-deepseek --set cluster.device=h100-sxm",
    f"plan tiny-llama {_ON_8} --keep plan.pp=1 --keep plan.tp=2 --details",
    "scale tiny-llama --devices 8,16 --device h100-sxm --keep plan.pp=1 --keep plan.tp=2",
    "compare tiny-llama --on h100-sxm:8 --on b200-sxm:8 --on h200-sxm:8 --keep plan.pp=1 --keep plan.tp=2",
    "layout gemma2-27b-tpu",
    "simulate quickstart --set cluster.device=h100-sxm",
    "schedule zb-v --stages 4",
    "schedule --compare",
    "collective all-reduce --ranks 16 --device h100-sxm",
    "dryrun quickstart",
    "check {folder}/job.toml",
    "validate {folder}/runs.csv",
    "models",
    "devices",
    "clusters",
    "schedules",
    "software",
    "fields plan",
    "learn",
    "plan --help-all",
    "calibrate --help",
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("said", "columns"), [("80", 80), ("", 100)], ids=("terminal", "pipe"))
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[0])
def test_no_line_is_longer_than_the_terminal(
    command: str, said: str, columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.toml").write_text("[model]\nname = 'tiny-llama'\n")
    runs = Path(__file__).parents[2] / "benchmarks" / "truth" / "runs.csv"
    (tmp_path / "runs.csv").write_text("".join(runs.read_text().splitlines(keepends=True)[:12]))
    monkeypatch.setenv("COLUMNS", said)
    words = shlex.split(command.format(folder=tmp_path))
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines and [line for line in lines if len(line) > columns and max(map(len, line.split())) < 60] == []
    assert [line for line in lines if re.search(r"\d%|^ *%", line)] == [], (
        "a percentage has a space, and no line within"
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [("", "steps of this runtime, Shardwright's own"), ("--as megatron-core", "steps of megatron-core.")],
)
def test_every_prediction_of_a_step_names_its_software(options: str, named: str) -> None:
    one_plan = f"{_ON_8} --set plan.tp=2 --set plan.dp=4 {options}"
    clusters = f"--on h100-sxm:8 --on h200-sxm:8 --keep plan.pp=1 --keep plan.tp=2 {options}"
    for command in (f"estimate tiny-llama {one_plan}", f"compare tiny-llama {clusters}"):
        text = " ".join(CliRunner().invoke(cli, shlex.split(command), catch_exceptions=False).stdout.split())
        assert f"Predicted, not measured: {named}" in text


@pytest.mark.parametrize("options", ["--set plan.tp=2 --set plan.pp=2", "--keep plan.pp=1 --keep plan.tp=2"])
def test_the_told_parts_of_a_step_are_all_of_it(options: str) -> None:
    done = CliRunner().invoke(cli, shlex.split(f"plan tiny-llama {_ON_8} {options}"), catch_exceptions=False)
    (told,) = re.findall(r"Of the step: (.*?)[.]\s", done.stdout, re.DOTALL)
    shares = [float(share) for share in re.findall(r"([\d.]+) %", told)]
    assert len(shares) > 1 and sum(shares) == pytest.approx(100, abs=0.05 * len(shares) + 0.05)


def test_one_device_has_all_of_its_host() -> None:
    words = ["estimate", "llama3-8b", "--devices", "1", "--device", "h100-sxm"]
    text = " ".join(CliRunner().invoke(cli, words, catch_exceptions=False).stdout.split())
    assert "and its node's are 256.0 GiB, which leaves" in text and "1 devices" not in text
