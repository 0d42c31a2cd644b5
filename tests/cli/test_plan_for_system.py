"""`plan --for SYSTEM`: plans that the system has, priced as its software, which `export` writes as they are."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.config.load import load_job
from shardwright.interchange.exported import exported
from shardwright.interchange.system import SYSTEMS

pytestmark = pytest.mark.usefixtures("searched_once")

ON_8 = ("qwen3-0.6b", "--devices", "8", "--device", "h100-sxm")
QUICK = ("plan.pp=1", "plan.cp=1", "plan.recompute=none", "plan.microbatch_size=1")
KEEP = tuple(word for field in QUICK for word in ("--keep", field))


def planned(name: str, *words: str) -> Result:
    model = "llama3.2-1b" if name == "nanotron" else ON_8[0]  # which has no norms of heads
    return CliRunner().invoke(cli, ["plan", model, *ON_8[1:], *KEEP, "--for", name, *words], catch_exceptions=False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SYSTEMS)
def test_what_is_recommended_is_exported_as_it_is(name: str, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    done = planned(name, "--toml", str(file), "--json")
    assert done.exit_code == 0
    job = load_job(str(file))
    assert job.cluster.software == SYSTEMS[name].software
    assert job.plan.model_dump() == json.loads(done.stdout)[0]["plan"]
    assert exported(SYSTEMS[name], job).files


def test_software_that_is_asked_for_is_kept_and_said() -> None:
    text = planned("megatron", "--as", "megatron-2023").stdout
    assert text.startswith("Predicted, not measured: steps of megatron-2023.")
    text = " ".join(planned("megatron").stdout.split())
    assert text.startswith("Predicted, not measured: steps of megatron-core.")
    assert "every plan is one that Megatron-LM has" in text and "export FILE --to megatron" in text


def test_a_model_that_the_system_has_not_is_refused_with_the_reason() -> None:
    words = ["plan", "tiny-llama", *ON_8[1:], *KEEP, "--for", "torchtitan"]
    with pytest.raises(PlanError, match="can be written as it is: torchtitan has no such job: it names its models"):
        CliRunner().invoke(cli, words, catch_exceptions=False)
