"""One job with other software: `--as NAME`, and all of it side by side."""

import json

import pytest
from click.testing import CliRunner, Result

from shardwright.cli.main import cli
from shardwright.config import catalog

PRICED = ("quickstart", "--set", "cluster.device=h100-sxm", "--set", "precision.compute=bf16")


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, words)


@pytest.mark.parametrize("words", [("--as", "megatron-core"), ("--as=megatron-core",)])
def test_as_stands_for_the_field(words: tuple[str, ...]) -> None:
    said = run("estimate", *PRICED, *words, "--json")
    assert said.exit_code == 0
    assert said.stdout == run("estimate", *PRICED, "--set", "cluster.software=megatron-core", "--json").stdout
    assert said.stdout != run("estimate", *PRICED, "--json").stdout


@pytest.mark.parametrize("command", ["estimate", "explain", "simulate", "layout", "plan"])
def test_every_prediction_takes_it(command: str) -> None:
    assert "--as NAME" in run(command, "--help").stdout
    assert run(command, *PRICED, "--as").exit_code == 2


def test_side_by_side() -> None:
    found = json.loads(run("estimate", *PRICED, "--beside", "--json").stdout)
    own, *others = found["beside"]
    assert own["software"] == "shardwright" and own["lacks"] == []
    assert own["step_s"] == pytest.approx(found["step_s"])
    assert own["process_bytes"] == pytest.approx(found["process_bytes"], abs=1)
    assert {row["software"] for row in found["beside"]} == set(catalog.names("software"))
    assert [row["step_s"] for row in others] == sorted(row["step_s"] for row in others)
    lines = run("estimate", *PRICED, "--beside").stdout.splitlines()
    assert [line.split()[0] for line in lines[-len(others) - 1 :]] == [row["software"] for row in found["beside"]]
