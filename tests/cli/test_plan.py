"""The command `plan`, as it is typed: what it takes, what it refuses, and what it answers."""

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shardwright.cli.main import cli
from shardwright.config.base import PlanError

# Few plans, which are soon priced.
QUICK = tuple(
    word
    for field in ("cp=1", "recompute=full", "schedule=1f1b", "microbatch_size=1")
    for word in ("--keep", f"plan.{field}")
)
OTHER_SIZE = ("--set", "cluster.nodes=16")


def typed(*words: str) -> Result:
    done = CliRunner().invoke(cli, [*words], catch_exceptions=False)
    assert done.exit_code == 0
    return done


def said(*words: str) -> str:
    """What is printed, with its lines joined."""
    return " ".join(typed(*words).stdout.split())


def plans(*words: str) -> list[dict[str, Any]]:
    return list(json.loads(typed(*words, "--json").stdout))


def refusal(*words: str) -> PlanError:
    with pytest.raises(PlanError) as refused:
        typed(*words)
    return refused.value


# --- a plan of its own that the cluster does not allow ---


def test_degrees_of_another_cluster_do_not_matter() -> None:
    found = plans("plan", "yi-34b", *OTHER_SIZE, *QUICK)
    assert found and all(plan["num_devices"] == 128 for plan in found)
    text = said("plan", "yi-34b", *OTHER_SIZE, *QUICK)
    assert "The job's own plan (tp 8, pp 2, dp 32, 1f1b, mb 1, zero 1, sequence_parallel) is not legal here" in text
    assert "512 ranks, and cluster 'a800-512' has 16 nodes x 8 devices = 128; use dp 8" in text
    legal = plans("plan", "yi-34b", *OTHER_SIZE, "--set", "plan.dp=8", *QUICK)
    assert [plan["plan"] for plan in legal] == [plan["plan"] for plan in found]


@pytest.mark.parametrize(
    "override", ["plan.tp=3", "plan.pp=61", "plan.layout=[1]", "plan.zero_ranks=7", "plan.expert_tp=8", "plan.ep=2"]
)
def test_no_fault_of_the_own_plan_keeps_others_from_being_found(override: str) -> None:
    assert "is not legal here" in said("plan", "yi-34b", "--set", override, *QUICK)


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("model.hidden=30", "does not split into 56 heads"),
        ("cluster.device=h1000", "not in the catalog of devices"),
        ("plan.tp=0", "it should be greater than 0"),
        ("plan.compress_rank=3", "has no rank"),  # every plan that is found would have it
        ("optimizer.warmup_steps=10000000", "never reached"),
    ],
)
def test_what_is_wrong_with_the_rest_is_refused(override: str, fault: str) -> None:
    assert fault in str(refusal("plan", "yi-34b", "--set", "plan.tp=3", "--set", override, *QUICK))
