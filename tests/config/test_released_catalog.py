"""Models of the catalog that are on the Hub have the parameters of their releases, the fields of their config.json, and
a predicted step."""

import tomllib
from pathlib import Path

import pytest

from config.test_public_configurations import READ, model_of
from shardwright.config import catalog
from shardwright.config.hugging_face.same_arithmetic import is_same
from shardwright.config.load import make_job, read_job
from shardwright.config.model import ModelSpec
from shardwright.cost.calibration import shipped
from shardwright.cost.from_job import run_of
from shardwright.sharding.stage_parameters import num_parameters
from shardwright.simulate.closed_form import step_time

RELEASED = tomllib.loads((Path(__file__).parent / "released_parameters.toml").read_text())
# Entries of pre-training, whose positions are not stretched yet.
BEFORE_STRETCHING = {"deepseek-v3"}


def count_of(name: str) -> int:
    """Parameters of an entry, with as many learned positions as the model is made for."""
    model = ModelSpec.model_validate(catalog.read("models", name))
    sequence = model.longest if model.positions == "learned" else model.sequence
    return num_parameters(model.model_copy(update={"mtp_layers": 0, "sequence": sequence}))


def test_there_are_150_models_of_the_hub_and_the_size_of_each_is_known() -> None:
    assert len(catalog.hub_names()) >= 150
    assert {*RELEASED["exact"], *RELEASED["billions"]} == set(catalog.hub_names())


@pytest.mark.parametrize("name", RELEASED["exact"])
def test_an_entry_has_the_parameters_of_its_release(name: str) -> None:
    assert count_of(name) == RELEASED["exact"][name]


@pytest.mark.parametrize("name", RELEASED["billions"])
def test_an_entry_has_about_the_parameters_of_its_release(name: str) -> None:
    published = RELEASED["billions"][name]
    assert round(count_of(name) / 1e9, 1 if isinstance(published, float) else 0) == published


@pytest.mark.parametrize("name", [name for name in READ if catalog.model_name(name) != name])
def test_an_entry_is_the_model_of_its_configuration(name: str) -> None:
    entry = catalog.model_name(name)
    model = ModelSpec.model_validate(catalog.read("models", entry))
    assert entry in BEFORE_STRETCHING or is_same(model, model_of(READ[name]["config"]))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", catalog.hub_names())
def test_an_entry_has_a_predicted_step(name: str) -> None:
    asked = ["cluster.device=h100-sxm", "cluster.devices_per_node=8", "cluster.nodes=8", "plan.dp=64", "plan.zero=3"]
    read = read_job(catalog.hub_names()[name][0], asked)
    job = make_job(read.fields)
    assert read.is_model and job.model.name == name
    assert step_time(run_of(job), shipped()).total > 0


def test_names_of_the_hub_stand_without_their_owners_too() -> None:
    for name, expected in (
        ("Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("Meta-Llama-3-70B-Instruct", "llama3-70b"),
        ("Llama3-8B", "llama3-8b"),
        ("Nowhere-8B", "Nowhere-8B"),
    ):
        assert catalog.model_name(name) == expected
    assert all(catalog.model_name(name) == name for name in catalog.names("models"))
