"""`shardwright dryrun --check`: all ranks of a plan, as on CUDA."""

import json

import pytest
from click.testing import CliRunner

from fuzz import checks
from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.config.phrase import say
from shardwright.measure.checks import plan_checks
from shardwright.measure.checks.plan_checks import PlanCheck, checks_text
from support.languages import assert_same_in_chinese

pytestmark = pytest.mark.long

SMALL = ("--set", "plan.dp=2", "--set", "plan.tp=1", "--set", "plan.pp=1", "--set", "plan.sequence_parallel=false")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(4))
def test_a_drawn_plan_has_no_fault(number: int) -> None:
    assert not checks.faults_of(2026, number)


def test_the_command_says_what_was_checked() -> None:
    done = CliRunner().invoke(cli, ["dryrun", "quickstart", "--check", *SMALL])
    assert done.exit_code == 0, done.output
    first, *checked = done.output.splitlines()
    assert "quickstart" in first
    assert [line.split(": right; ")[0] for line in checked] == ["messages", "kernels", "accesses", "waits"]


def test_the_checks_are_told_in_chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = (say("{number} steps", number=3),) * 9
    checks = [
        PlanCheck("messages", say("the host"), (), 1.5),
        PlanCheck("accesses", say("the host"), faults, 0.25),
    ]
    assert_same_in_chinese(lambda language: checks_text("quickstart", checks, language), monkeypatch, 40)


def test_a_fault_ends_the_command_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_checks, "message_faults", lambda records: ["ranks wait for each other"])
    done = CliRunner().invoke(cli, ["dryrun", "quickstart", "--check", *SMALL, "--json"])
    assert done.exit_code == 1
    assert [check["faults"] for check in json.loads(done.stdout)] == [["ranks wait for each other"], [], [], []]


def test_more_ranks_than_are_run_are_refused() -> None:
    done = CliRunner().invoke(cli, ["dryrun", "llama3-405b-16k", "--check"])
    assert isinstance(done.exception, PlanError) and "16,384 of them, more than 64" in str(done.exception)


def test_other_options_beside_it_are_refused() -> None:
    for words in (("--rank", "1"), ("--device", "cpu")):
        done = CliRunner().invoke(cli, ["dryrun", "quickstart", "--check", *words])
        assert isinstance(done.exception, PlanError) and "leave out --rank" in str(done.exception)
