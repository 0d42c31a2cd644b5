"""Each way out that `export` names is one: with it the job goes through, or has another fault than before."""

import re
import shlex

import pytest
from click.testing import CliRunner

from shardwright.cli.main import cli
from shardwright.config import catalog
from shardwright.config.base import PlanError
from shardwright.interchange.system import SYSTEMS


def refusal(*words: str) -> PlanError | None:
    """Why a job is not exported; None where it is."""
    done = CliRunner().invoke(cli, ["export", *words])
    if done.exit_code == 0:
        return None
    assert isinstance(done.exception, PlanError), done.output
    return done.exception


def ways_out(refused: PlanError) -> list[str]:
    """The words `--set FIELD=VALUE` of a refusal."""
    words = shlex.split(" ".join(re.findall(r"--set (?:'[^']*'|\S+)", str(refused))))
    assert not any(word.endswith("=NAME") for word in words), refused
    return words


@pytest.mark.sampled(5)
@pytest.mark.parametrize("system", SYSTEMS)
def test_way_out_of_a_refusal_is_one(system: str) -> None:
    for job in catalog.names("jobs"):
        first = refusal(job, "--to", system)
        if first is None:
            continue
        if not (ways := ways_out(first)):
            assert "take another --to" in str(first)
            continue
        second = refusal(job, "--to", system, *ways)
        assert second is None or not set(second.faults) & set(first.faults), (job, ways, second)
        assert second is None, (job, ways, second)


def test_layout_with_stages_without_layers_goes_there_and_back() -> None:
    refused = refusal("llama3-405b-16k", "--to", "megatron")
    assert refused is not None and refused.faults == ["plan.zero = 2 can't be said to Megatron-LM; the nearest is 1"]
    assert refusal("llama3-405b-16k", "--to", "megatron", "--set", "plan.zero=1") is None
