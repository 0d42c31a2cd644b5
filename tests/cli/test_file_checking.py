"""The command `check`: one line a file of any system, and an exit status for CI."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardwright.cli.main import cli
from shardwright.config.base import PlanError

ROOT = Path(__file__).parents[2]
PEOPLE = ROOT / "tests/interchange/as_people_have"
TRAINERS = ROOT / "tests/interchange/other_trainers"
SCRIPT = str(ROOT / "docs/pretrain.sh")
A100 = ("--set", "NUM_NODES=4", "--device", "a100-sxm-80g")


def checked(*words: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit status and the values of `check --json`."""
    result = CliRunner().invoke(cli, ["check", *words, "--json"])
    return result.exit_code, json.loads(result.stdout)


def test_a_script_that_is_fine_has_status_0() -> None:
    status, (check,) = checked(SCRIPT, *A100)
    assert (status, check["system"], check["legal"], check["fits"], check["findings"]) == (
        0,
        "megatron",
        True,
        True,
        [],
    )
    assert (check["batch"], check["microbatches"]) == (512, 512)
    assert check["step_s"] > 0


@pytest.mark.usefixtures("searched_once")
def test_memory_that_lacks_is_told_with_a_way_out(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(Path(SCRIPT).read_text().replace("size 8 --pipeline-model-parallel-size 4", "size 1"))
    status, (check,) = checked(str(script), *A100)
    assert (status, check["legal"], check["fits"]) == (1, True, False)
    assert check["missing_bytes"] > 80 * 2**30
    lines = CliRunner().invoke(cli, ["check", str(script), *A100]).output.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["legal", "fits", "divides", "slack", "time"]
    assert "GiB too much; the nearest plan that does: --set" in lines[2]


def test_every_finding_of_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[model]\nhiden = 4\n[plan]\ntp = 0\ntpp = 2\n")
    lines = CliRunner().invoke(cli, ["check", str(tmp_path / "job.toml")]).output.splitlines()
    _, (check,) = checked(str(tmp_path / "job.toml"))
    assert [line[:10].strip() for line in lines[1:]] == ["legal", "also", "also"]
    assert [line[10:].removeprefix("no: ") for line in lines[1:]] == check["findings"]


def test_a_batch_that_does_not_divide_is_a_finding(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    text = Path(SCRIPT).read_text().replace("--global-batch-size 512", "--global-batch-size 511")
    script.write_text(text.replace("--pipeline-model-parallel-size 4", "--pipeline-model-parallel-size 2"))
    status, (check,) = checked(str(script), *A100)
    assert (status, check["legal"]) == (1, False)
    assert "511" in check["findings"][0]
    lines = CliRunner().invoke(cli, ["check", str(script), *A100]).output.splitlines()
    assert lines[1].startswith("  legal   no:") and lines[2].startswith("  divides no:") and "511" in lines[2]


def test_experts_that_leave_their_domain_are_a_finding() -> None:
    plan = ("plan.dp=64", "plan.tp=1", "plan.pp=1", "plan.ep=64", "plan.zero=1", "plan.schedule=1f1b")
    sets = [word for value in plan for word in ("--set", value)]
    status, (check,) = checked("qwen3-30b-a3b", *sets, "--devices", "64", "--device", "h100-sxm")
    assert (status, check["expert_nodes"]) == (1, 8)
    assert "plan.ep" in " ".join(check["findings"])
    words = ["check", "qwen3-30b-a3b", *sets, "--devices", "64", "--device", "h100-sxm"]
    (line,) = [line for line in CliRunner().invoke(cli, words).output.splitlines() if line.startswith("  experts")]
    assert "over 8 domains" in line and "lower plan.ep" in line


@pytest.mark.parametrize(
    ("name", "system"),
    [("l1-shards.json", "deepspeed"), ("l2-titan.toml", "torchtitan-0.2"), ("b1-mpirun.sh", "megatron")],
)
def test_the_system_is_recognised_from_the_file(name: str, system: str) -> None:
    assert checked(str(PEOPLE / name))[1][0]["system"] == system


def test_a_file_that_no_system_writes_has_status_2_and_the_others_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("no job\n")
    status, checks = checked(str(file), str(tmp_path / "absent.sh"), "quickstart")
    assert status == 2
    assert [check["readable"] for check in checks] == [False, False, True]


def test_import_recognises_the_system_of_a_file() -> None:
    result = CliRunner().invoke(cli, ["import", str(TRAINERS / "nanotron.yaml"), "--device", "h100-sxm"])
    assert result.exit_code == 0 and "layers = 22" in result.output
    unknown = CliRunner().invoke(cli, ["import", "nosuch.yaml"])
    assert isinstance(unknown.exception, PlanError) and "one of megatron" in str(unknown.exception)


def test_a_variable_goes_to_the_files_that_have_it(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(Path(SCRIPT).read_text())
    status, checks = checked(str(script), str(TRAINERS / "nanotron.yaml"), *A100)
    assert (status, [check["legal"] for check in checks]) == (0, [True, True])
    assert not checked(str(TRAINERS / "nanotron.yaml"), *A100)[1][0]["legal"]


def test_files_of_further_trainers_are_checked_each_alone() -> None:
    files = [str(TRAINERS / name) for name in ("nanotron.yaml", "neox.yml")]
    status, checks = checked(*files, "--set", "model.vocab=50432", "--devices", "16", "--device", "h100-sxm")
    assert (status, [check["system"] for check in checks]) == (0, ["nanotron", "gpt-neox"])
    assert all(check["legal"] and check["fits"] and check["step_s"] > 0 for check in checks)


def test_a_config_json_beside_is_the_model_of_a_file_that_lacks_one(tmp_path: Path) -> None:
    file, model = tmp_path / "a.yaml", str(TRAINERS / "config.json")
    file.write_text("base_model: me/mine\nsequence_len: 512\nmicro_batch_size: 1\nlearning_rate: 1e-5\nbf16: true\n")
    _, (alone,) = checked(str(file), "--devices", "8")
    assert not alone["legal"] and "config.json" in alone["findings"][0]
    _, (beside, _) = checked(str(file), model, "--devices", "8")
    assert beside["legal"]
