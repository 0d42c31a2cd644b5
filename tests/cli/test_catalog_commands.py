"""The commands that say what there is, and the names by which models are called."""

import json

import pytest
from click.testing import CliRunner

from shardwright.cli.main import cli
from shardwright.config import catalog
from shardwright.config.base import PlanError
from shardwright.config.job_file import names_model
from shardwright.config.load import load_job
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.report.catalog_tables import CATALOG_TABLES, catalog_rows


def printed(*words: str) -> str:
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


@pytest.mark.parametrize("kind", CATALOG_TABLES)
def test_every_entry_has_a_row_that_fits_the_terminal(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = json.loads(printed(kind, "--json"))
    known = list(SCHEDULES.names) if kind == "schedules" else catalog.names(kind)  # type: ignore[arg-type]
    assert sorted(row["name"] for row in rows) == sorted(known)
    for columns in (80, 100, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = printed(kind).splitlines()
        assert max(map(len, lines)) <= columns and len(lines) >= len(rows) + 2
        assert all(any(line.startswith(row["name"]) for line in lines) for row in rows)


def test_figures_that_people_look_for() -> None:
    (h100,) = (row for row in catalog_rows("devices") if row["name"] == "h100-sxm")
    assert (h100["memory_gib"], h100["bf16_tflops"], h100["memory_gb_per_s"]) == (80, 989.4, 3350)
    assert h100["price_source"] == "CoreWeave, on-demand list price of February 2026"
    (moe,) = (row for row in catalog_rows("models") if row["name"] == "qwen3-30b-a3b")
    assert round(moe["parameters_b"], 1) == 30.5 and 3.3 < moe["active_parameters_b"] < 3.4


def test_software_says_in_words_what_it_is_and_is_listed_by_its_framework() -> None:
    rows = catalog_rows("software")
    titles = [row["title"] for row in rows]
    assert all(titles) and len(set(titles)) == len(titles) and max(map(len, titles)) <= 44  # all columns fit 100
    assert [row["name"] for row in catalog_rows("software", ["maxtext"])] == [
        row["name"] for row in rows if "maxtext" in row["frameworks"]
    ]


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("meta-llama/Meta-Llama-3-70B", "llama3-70b"), ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("qwen/qwen3-8b-base", "qwen3-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama2-7b"), ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("llama3-8b", "llama3-8b"), ("nobody/nothing", "nobody/nothing"),
    ],
)  # fmt: skip
def test_models_are_called_as_on_the_hub(name: str, model: str) -> None:
    assert catalog.model_name(name) == model
    assert names_model(name) == (model in catalog.names("models"))


def test_every_name_of_the_hub_is_a_job_and_a_model_of_one() -> None:
    for model, hub_names in catalog.hub_names().items():
        assert model in catalog.names("models")
        assert all(catalog.model_name(hub_name) == model for hub_name in hub_names)
    job = load_job("quickstart", ["model={name = 'Qwen/Qwen3-8B'}"])
    assert (job.model.name, job.model.layers) == ("qwen3-8b", 36)


def test_a_name_of_nothing_has_near_ones_of_the_hub() -> None:
    with pytest.raises(PlanError, match=r"did you mean Qwen/Qwen3-8B \(a model\)"):
        printed("plan", "Qwen/Qwen3-9B", "--devices", "8", "--device", "h100-sxm")
    with pytest.raises(PlanError, match="there is no file some/where/deep"):
        printed("plan", "some/where/deep")
