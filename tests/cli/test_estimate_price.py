"""The command `estimate` on clusters: time, money, energy, failures, and what is not known of them."""

import json
import re
import shlex
from dataclasses import fields
from typing import Any

import pytest
from click.testing import CliRunner

from shardwright.cli.checked_job import load
from shardwright.cli.main import cli
from shardwright.config.load import read_job
from shardwright.report.nearest_text import set_line
from shardwright.simulate.closed_form import StepTime

pytestmark = pytest.mark.usefixtures("searched_once")


def shown(job: str, *overrides: str, options: tuple[str, ...] = ()) -> str:
    words = [part for override in overrides for part in ("--set", override)]
    done = CliRunner().invoke(cli, ["estimate", job, *words, *options], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def found_of(job: str, *overrides: str) -> dict[str, Any]:
    return json.loads(shown(job, *overrides, options=("--json",)))


def test_time_money_and_failures_of_a_known_cluster() -> None:
    result = found_of("llama3-405b-16k")
    assert sum(result["time"].values()) == pytest.approx(result["step_s"])
    assert set(result["time"]) == {field.name for field in fields(StepTime)} - {
        "total",
        "slower",
        "mfu",
        "hfu",
        "low",
        "high",
    }
    low, high = result["step_range_s"]
    assert low < result["step_s"] < high
    assert result["tokens_per_s_per_device"] == pytest.approx(2048 * 8192 / result["step_s"] / 16384)
    step, many, run = (result["money"][key] for key in ("step", "1e12_tokens", "run"))
    assert result["cost_per_step"] == step["usd"] == pytest.approx(6.16 * 16384 * result["step_s"] / 3600)
    steps = 1e12 / (2048 * 8192)
    training = result["goodput"]["training"]
    assert many["usd"] == pytest.approx(step["usd"] * steps / training)
    assert many["seconds"] == pytest.approx(result["step_s"] * steps / training)
    assert run["kwh"] == pytest.approx(step["kwh"] * 1_200_000 / training)
    assert (result["gaps"], result["notes"]) == ([], [])
    text = " ".join(shown("llama3-405b-16k").split())
    assert f"MFU {100 * result['mfu']:.1f} %" in text and f"{100 * training:.1f} % of the time trains" in text
    assert "Money is counted at $6.16 a device and hour (CoreWeave, on-demand list price of February 2026)." in text


@pytest.mark.parametrize(
    ("job", "overrides", "columns"),
    [
        ("quickstart", ("cluster.device=h100-sxm",), ["a step", "1e12 tokens", "the run, 8.19e5 tokens"]),
        ("quickstart", ("cluster.device=h100-sxm", "model.adapter.rank=4"), ["a step", "the run, 8.19e5 tokens"]),
        (
            "quickstart",
            ("cluster.device=h100-sxm", "batch.global_batch_size=8192", "optimizer.steps=953674"),
            ["a step", "the run, 1e12 tokens"],
        ),
    ],
)
def test_1e12_tokens_are_priced_beside_another_run_of_a_whole_model(
    job: str, overrides: tuple[str, ...], columns: list[str]
) -> None:
    text = shown(job, *overrides)
    heading = next(line for line in text.split("\n") if " a step " in f"{line} " and "the run" in line)
    assert re.split(r" {2,}", heading.strip()) == columns


def test_what_is_not_known_is_said_and_not_counted() -> None:
    result = found_of("quickstart")
    assert "step_s" not in result and "set cluster.device" in result["not_priced"]
    assert "set cluster.device" in shown("quickstart")
    without_price = ("cluster.device=a800-sxm-80g", "precision.compute=bf16")
    result = found_of("quickstart", *without_price)
    assert result["cost_per_step"] is None and result["goodput"] is None and result["step_s"] > 0
    assert [gap.split(" is not said")[0] for gap in result["gaps"]] == ["money", "time lost to failures"]
    text = shown("quickstart", *without_price)
    assert "Money is not said" in text and "Money is counted" not in text
    result = found_of("quickstart", "cluster.device=v100-sxm-32g", "precision.compute=bf16")
    assert "add peak_tflops.bfloat16" in result["not_priced"]


def test_the_often_told_plan_does_not_fit_and_the_told_size_is_checked() -> None:
    text = shown("gpt-100b-32xa100", "model.hidden=12288", "model.heads=96")
    assert "It does not fit one a100-sxm-80g, which shows 79.1 GiB of its 80.0 GiB" in " ".join(text.split())
    assert "Note: model.told_parameters_b says 100 billion parameters" in text


def test_memory_is_that_of_the_process_as_plan_tells_it() -> None:
    for options in ((), ("--as", "megatron-core")):
        result = json.loads(shown("gpt3-175b-1024", options=(*options, "--json")))
        text = " ".join(shown("gpt3-175b-1024", options=options).split())
        assert f"the process of pp rank 0 needs {result['process_bytes'] / 2**30:.1f} GiB" in text
        assert "which shows 79.1 GiB of its 80.0 GiB" in text


def test_a_plan_that_does_not_fit_names_others_that_do() -> None:
    """Each is the same job with what is to be added: its memory and its step are those that the command then says."""
    large = ("model.name=llama3-8b", "cluster.device=h100-sxm", "precision.compute=bf16")
    result = found_of("quickstart", *large)
    assert result["fits"] is False and 1 <= len(result["nearest"]) <= 3
    for near in result["nearest"]:
        added = [word for word in shlex.split(near["set"]) if word != "--set"]
        other = found_of("quickstart", *large, *added)
        assert other["fits"] is True and other["nearest"] == []
        assert other["process_bytes"] == pytest.approx(near["process_bytes"])
        assert near["process_bytes"] <= result["device_memory_bytes"]
        assert other["step_s"] == pytest.approx(near["step_s"])
    text = shown("quickstart", *large)
    assert all(near["set"] in text for near in result["nearest"])
    assert [near["step_s"] for near in result["nearest"]] == sorted(near["step_s"] for near in result["nearest"])


def test_a_set_line_is_what_differs_and_is_read_again() -> None:
    job, other = load("yi-34b", ()), load("llama3-405b-16k", ())
    line = set_line(job, other)
    added = tuple(word for word in shlex.split(line) if word != "--set")
    there = read_job("yi-34b", list(added)).fields["plan"]
    assert there["layout"] == other.plan.layout and there["schedule"] == "interleaved-1f1b"
    assert set_line(job, job) == "" and "plan.sequence_parallel" not in line
