"""The command `estimate`: the account as JSON and as a table, and whether it fits."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

import shardwright as sw
from shardwright.cli.main import cli
from support.ranks import PATIENCE_S

pytestmark = pytest.mark.usefixtures("searched_once")

PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers", "working")
KINDS = [f"{kind}_bytes" for kind in PARTS]
BF16 = ["precision.compute=bf16", "precision.gradients=compute"]


def words(*overrides: str) -> list[str]:
    return ["estimate", "quickstart", *(part for override in overrides for part in ("--set", override))]


def estimate(*overrides: str, options: tuple[str, ...] = ()) -> Result:
    return CliRunner().invoke(cli, [*words(*overrides), *options], catch_exceptions=False)


def as_json(*overrides: str) -> dict:
    done = estimate(*overrides, options=("--json",))
    assert (done.exit_code, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.mark.parametrize(("model", "published"), [("gpt2", 124_439_808), ("llama3-8b", 8_030_261_248)])
def test_the_account_of_a_known_model(model: str, published: int) -> None:
    result = as_json(f"model.name={model}", "plan.pp=1", "plan.tp=1", *BF16)
    assert result["parameters"] == published
    (rank,) = result["memory"]
    # A tied table on one rank is one memory with two gradients.
    tied = 50257 * 768 if model == "gpt2" else 0
    assert [rank[kind] for kind in KINDS[:3]] == [2 * published, 2 * (published + tied), 12 * published]
    assert rank["total_bytes"] == sum(rank[kind] for kind in KINDS)
    assert result["fits"] is None


def test_one_entry_a_pipeline_rank() -> None:
    result = as_json("plan.pp=4", "plan.zero=1")
    assert len(result["memory"]) == 4
    kept = [rank["activations_bytes"] for rank in result["memory"]]
    assert kept[1] > kept[2]  # earlier ranks hold more microbatches


def test_whether_it_fits() -> None:
    small, large = (
        ("cluster.device=h100-sxm", "model.name=tiny-llama"),
        ("cluster.device=h100-sxm", "model.name=llama3-8b"),
    )
    assert as_json(*small)["fits"] is True
    result = as_json(*large)
    assert result["fits"] is False
    most = max(rank["total_bytes"] for rank in result["memory"])
    over = (most - result["device_room_bytes"]) / 2**30
    assert result["device_memory_bytes"] - result["device_room_bytes"] > 3.7 * 2**30  # for it has many communicators
    assert f"which is {over:,.1f} GiB too much" in " ".join(estimate(*large).stdout.split())
    fits = " ".join(estimate(*small).stdout.split())
    assert "It fits one h100-sxm, which shows 79.1 GiB of its 80.0 GiB: the process of pp rank" in fits


def test_the_table_shows_the_same() -> None:
    result, shown = as_json("plan.pp=2"), estimate("plan.pp=2").stdout
    rows = [line for line in shown.splitlines() if line[:1].isdigit()]
    assert len(rows) == 2
    for row, rank in zip(rows, result["memory"], strict=True):
        for kind in [*KINDS, "total_bytes"]:
            assert f" {rank[kind] / 2**20:,.1f} MiB" in row
    assert "803,968 parameters" in shown


def test_every_fault_in_one_message() -> None:
    command = [sys.executable, "-m", "shardwright", *words("plan.tp=3", "plan.zero_ranks=3"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "plan.tp 3 does not divide 8 heads" in done.stderr
    assert "plan.zero_ranks 3 does not divide plan.dp 2" in done.stderr
    assert "Traceback" not in done.stderr


def test_tokens_in_place_of_the_steps_of_the_run() -> None:
    """Of a job and of a model, and in Python; the note on tokens that nobody states is then left out."""
    run = estimate("cluster.device=h100-sxm", options=("--tokens", "1B", "--json"))
    seconds = json.loads(run.stdout)["money"]["run"]["seconds"]
    step = json.loads(run.stdout)["step_s"]
    assert seconds == pytest.approx(step * round(1e9 / 4096), rel=1e-6)
    on_h100 = ["estimate", "tiny-llama", "--devices", "8", "--device", "h100-sxm", "--set", "plan.tp=1"]
    unstated, stated = (CliRunner().invoke(cli, [*on_h100, *more]).output for more in ((), ("--tokens", "3B")))
    assert "a run has 1e12 tokens where nobody states their number (--tokens N" in " ".join(unstated.split())
    assert "nobody states" not in stated and "the run, 3e9 tokens" in " ".join(stated.split())
    job = sw.load("quickstart", "cluster.device=h100-sxm")
    assert job.estimate(tokens=1e9).to_dict()["money"]["run"]["seconds"] == pytest.approx(seconds)
    with pytest.raises(sw.PlanError, match="--tokens is -1, and it must be from 0"):
        job.estimate(tokens=-1)
    refused = estimate(options=("--tokens", "1e30"))
    assert refused.exit_code == 2 and "Invalid value for --tokens: 1e+30 is not within 0" in refused.stderr
