"""One job with other software: `--as NAME`, and all of it side by side."""

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shardwright.cli.main import cli
from shardwright.config import catalog
from shardwright.config.base import PlanError

PRICED = ("quickstart", "--set", "cluster.device=h100-sxm", "--set", "precision.compute=bf16")


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, words)


@pytest.mark.parametrize("words", [("--as", "megatron-core"), ("--as=megatron-core",)])
def test_as_stands_for_the_field(words: tuple[str, ...]) -> None:
    printed = run("estimate", *PRICED, *words, "--json")
    assert printed.exit_code == 0
    assert printed.stdout == run("estimate", *PRICED, "--set", "cluster.software=megatron-core", "--json").stdout
    assert printed.stdout != run("estimate", *PRICED, "--json").stdout


@pytest.mark.parametrize("command", ["estimate", "explain", "simulate", "layout", "plan"])
def test_every_prediction_takes_it(command: str) -> None:
    assert "--as NAME" in run(command, "--help-all").stdout
    assert run(command, *PRICED, "--as").exit_code == 2


def test_side_by_side() -> None:
    result = json.loads(run("estimate", *PRICED, "--beside", "--json").stdout)
    own, *others = result["beside"]
    assert own["software"] == "shardwright" and own["lacks"] == []
    assert own["step_s"] == pytest.approx(result["step_s"])
    assert own["process_bytes"] == pytest.approx(result["process_bytes"], abs=1)
    assert {row["software"] for row in result["beside"]} == set(catalog.names("software"))
    assert [row["step_s"] for row in others] == sorted(row["step_s"] for row in others)
    lines = run("estimate", *PRICED, "--beside").stdout.splitlines()
    assert [line.split()[0] for line in lines[-len(others) - 1 :]] == [row["software"] for row in result["beside"]]


def job_of(folder: Path, model: str, plan: str, batch: int) -> str:
    """A job with a plan of its own, of which nothing is chosen."""
    file = folder / "job.toml"
    sections = {"model": f'name = "{model}"', "plan": plan, "batch": f"global_batch_size = {batch}"}
    sections["precision"] = 'compute = "bf16"'
    file.write_text("\n".join(f"[{name}]\n{fields}" for name, fields in sections.items()))
    return str(file)


def test_whether_it_fits_and_what_would_is_of_the_software_that_is_asked_for(tmp_path: Path) -> None:
    """Its processes decide, as they do in `plan`; so a nearest plan fits when it is followed."""
    job = job_of(tmp_path, "llama2-70b", "zero = 3\ntp = 2\ndp = 16", 1024)
    asked = ("estimate", job, "--devices", "32", "--device", "h100-sxm", "--as", "fsdp-2024")
    result = json.loads(run(*asked, "--json").stdout)
    assert not result["fits"] and result["process_bytes"] > result["device_memory_bytes"]
    for near in result["nearest"]:
        followed = json.loads(run(*asked, *shlex.split(near["set"]), "--json").stdout)
        assert followed["fits"] and not followed["nearest"]
        assert followed["process_bytes"] == pytest.approx(near["process_bytes"])
    assert result["nearest"]
    printed = " ".join(run(*asked).stdout.split())
    assert "It does not fit one h100-sxm, which shows 79.1 GiB of its 80.0 GiB, under the cluster's" in printed


def test_what_this_runtime_has_no_room_for_may_fit_with_other_software(tmp_path: Path) -> None:
    job = job_of(tmp_path, "llama3-8b", "zero = 3\ndp = 8", 64)
    asked = ("estimate", job, "--devices", "8", "--device", "h100-sxm", "--set", "model.sequence=12288")
    result, reference = (
        json.loads(run(*asked, *software, "--json").stdout) for software in ((), ("--as", "megatron-core"))
    )
    assert result["memory"] == reference["memory"]
    assert (result["fits"], reference["fits"]) == (False, True)
    fits = " ".join(run(*asked, "--as", "megatron-core").stdout.split())
    assert "It fits one h100-sxm, which shows 79.1 GiB of its 80.0 GiB, under the cluster's software" in fits
    asked = ("explain", *asked[1:])
    own = "A device, h100-sxm, shows 79.1 GiB: the process of pipeline rank 0, the fullest, needs 1.3 GiB more than"
    assert own in " ".join(run(*asked).stdout.split())
    reference = " ".join(run(*asked, "--as", "megatron-core").stdout.split())
    assert re.search(
        r"the process of megatron-core on pipeline rank 0, the fullest, needs [\d.]+ .iB less than that\.", reference
    )


def test_side_by_side_needs_a_device() -> None:
    with pytest.raises(PlanError, match=r"cluster\.device is unknown, so no software has a price"):
        CliRunner().invoke(cli, ["estimate", "quickstart", "--beside"], catch_exceptions=False)
