"""Names and options as people type them: addresses, missing hyphens, models in place of jobs, several faults."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shardwright.api import tool_server
from shardwright.cli.main import cli
from shardwright.config import catalog
from shardwright.config.base import PlanError
from shardwright.config.cluster import PartSpec
from shardwright.config.job_file import names_model
from shardwright.config.load import read_job, validate_fields
from shardwright.interchange.foreign_job import job_of_texts
from shardwright.interchange.imported import Asked
from shardwright.interchange.system import SYSTEMS

pytestmark = pytest.mark.usefixtures("searched_once")


def run(words: str) -> Result:
    return CliRunner(env={"COLUMNS": "10000"}).invoke(cli, words.split())  # each sentence is one line


def refusal(words: str) -> PlanError:
    error = run(words).exception
    assert isinstance(error, PlanError)
    return error


@pytest.mark.parametrize(
    ("typed", "model"),
    [
        ("https://huggingface.co/Qwen/Qwen3-8B", "qwen3-8b"),
        ("huggingface.co/Qwen/Qwen3-8B/tree/main", "qwen3-8b"),
        ("https://huggingface.co/gpt2?library=transformers", "gpt2"),
        ("llama38b", "llama3-8b"),
        ("Llama_3_8B", "llama3-8b"),
        ("Qwen3_30B_A3B", "qwen3-30b-a3b"),
    ],
)
def test_a_model_is_known_as_people_type_it(typed: str, model: str) -> None:
    assert catalog.asked_model_name(typed) == model
    assert read_job(typed, ["cluster.name=h100-node"]).fields["model"]["name"] == model


def test_a_part_of_a_name_is_no_model() -> None:
    assert catalog.asked_model_name("llama") == "llama" and not names_model("llama")


def test_the_model_of_a_jobs_own_fields_keeps_its_name() -> None:
    fields = {"model": {"name": "llama3_8b", "layers": 2, "hidden": 64, "heads": 2}}
    model = read_job(fields, []).fields["model"]
    assert (model["name"], "kv_heads" in model) == ("llama3_8b", False)


def test_an_address_of_no_known_model_is_not_called_a_missing_file() -> None:
    error = refusal("estimate https://huggingface.co/some/thing --devices 8 --device h100-sxm")
    assert "nothing is loaded from the network" in str(error)


@pytest.mark.parametrize(
    ("words", "faults"),
    [
        ("plan nosuch --device none --keep plan.tp=x --set batch.size=1", ["plan.tp", "nosuch", "none", "batch.size"]),
        ("scale nosuch --devices 8,x --keep plan.tp=x --set plan.pp=2", ["plan.tp", "nosuch", "'x'", "plan.pp=2"]),
        ("compare nosuch --on h100-sxm --on b200-sxm:8 --keep plan.tp=x", ["plan.tp", "nosuch", "--on 'h100-sxm'"]),
        ("layout nosuch --search --keep plan.tp=x", ["plan.tp", "nosuch"]),
    ],
)
def test_faults_of_what_is_kept_stand_beside_those_of_the_job(words: str, faults: list[str]) -> None:
    error = refusal(words)
    assert len(error.faults) == len(faults)
    assert all(fault in str(error) for fault in faults)


def test_a_tool_of_an_agent_has_them_in_one_list() -> None:
    with pytest.raises(PlanError) as refused:
        tool_server.plan("nosuch", device="none", keep=["plan.tp=x"])
    assert len(refused.value.faults) == 3


@pytest.mark.parametrize("option", ["--devices eight", "--memory-gib 80GB"])
def test_a_number_that_is_none_is_told_without_words_of_libraries(option: str) -> None:
    answer = run(f"estimate llama3-8b --device h100-sxm {option}")
    assert answer.exit_code == 2 and "range" not in answer.stderr and "number." in answer.stderr


@pytest.mark.parametrize("system", ["megatron", "torchtitan"])
def test_a_model_is_exported_under_the_best_plan_that_the_system_has(system: str) -> None:
    words = "qwen3-0.6b --devices 4 --device h100-sxm"
    exported = json.loads(run(f"export {words} --to {system} --json").stdout)
    best = json.loads(run(f"plan {words} --for {system} --json").stdout)[0]
    back = job_of_texts(SYSTEMS[system], exported["files"], Asked(), "job").job.plan
    degrees = ("tp", "pp", "cp", "ep", "zero", "schedule", "virtual_stages", "microbatch_size")
    assert {name: getattr(back, name) for name in degrees} == {name: best["plan"][name] for name in degrees}


def test_a_model_is_laid_out_and_run_dry_under_its_best_plan() -> None:
    words = "tiny-llama --devices 4 --device h100-sxm --set batch.global_batch_size=8"
    best = json.loads(run(f"plan {words} --json").stdout)[0]["plan"]
    for command in ("layout", "dryrun"):
        answer = run(f"{command} {words} --json")
        assert answer.exit_code == 0 and f"tp {best['tp']}, pp {best['pp']}, dp {best['dp']}" in answer.stderr
    assert json.loads(answer.stdout)["device"] == "cuda"


def test_a_kind_of_device_is_no_device_of_the_cluster() -> None:
    assert json.loads(run("dryrun quickstart --device cpu --json").stdout)["device"] == "cpu"
    assert "'gpu9'" in str(refusal("dryrun quickstart --device gpu9"))


def test_lists_of_the_catalog_take_words() -> None:
    names = [row["name"] for row in json.loads(run("models QWEN3 30b --json").stdout)]
    assert names == ["qwen3-30b-a3b", "qwen3-30b-a3b-2507"]
    assert [row["name"] for row in json.loads(run("schedules zbv --json").stdout)] == ["zb-v"]
    assert "did you mean h100-sxm" in str(refusal("devices h100sxn"))


@pytest.mark.parametrize("typed", ["h100", "NVIDIA H100 80GB HBM3", "H100 SXM5"])
def test_a_device_is_known_in_a_field_as_in_an_option(typed: str, tmp_path: Path) -> None:
    """In a file of TOML or JSON, too, and so in the parts of a cluster."""
    words = "estimate tiny-llama --devices 8 --json"
    asked = CliRunner().invoke(cli, [*words.split(), "--device", typed])
    in_field = CliRunner().invoke(cli, [*words.split(), "--set", f"cluster.device={typed}"])
    assert asked.exit_code == 0 and in_field.stdout == asked.stdout
    fields = {"cluster": {"device": typed, "devices_per_node": 8}}
    part = {"device": typed, "devices_per_node": 4}
    (tmp_path / "job.toml").write_text(f'[cluster]\ndevice = "{typed}"\ndevices_per_node = 8\n')
    for job in (json.loads(json.dumps(fields)), str(tmp_path / "job.toml")):
        spec, faults = validate_fields(read_job(job, ()).fields)
        assert not faults and spec.cluster.device == "h100-sxm"
    assert PartSpec.model_validate(part).device == "h100-sxm"


@pytest.mark.parametrize("command", ["launch", "train"])
def test_a_command_that_takes_the_cluster_of_its_job_says_how_to_get_one(command: str) -> None:
    answer = run(f"{command} llama3-8b --devices 16")
    assert answer.exit_code == 2
    assert "plan JOB --devices N --device NAME --toml chosen.toml" in answer.stderr
    assert f"then shardwright {command} chosen.toml" in answer.stderr
    assert "chosen.toml" not in run(f"{command} llama3-8b --devise 16").stderr


@pytest.mark.parametrize(
    ("typed", "fault"),
    [
        ("chosn.toml", "did you mean chosen.toml?"),
        ("chosen.tml", "did you mean chosen.toml (a file)?"),
        ("{folder}/chosne.toml", "did you mean {folder}/chosen.toml?"),
        ("quickstrt", "did you mean quickstart2.toml (a file), quickstart (a job), "),
        ("unlike.toml", "check the path"),
        ("none/chosen.toml", "check the path"),
    ],
)
def test_a_file_that_is_nearly_there_is_proposed(
    typed: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("chosen.toml", "quickstart2.toml", "run.sh"):
        (tmp_path / name).write_text("")
    (told,) = refusal(f"estimate {typed.format(folder=tmp_path)}").faults
    assert fault.format(folder=tmp_path) in told
