"""The option --html of every command that predicts: a page of the same answer that --json prints."""

import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import shardwright as sw
from shardwright.cli import catalog_commands, predict, searching
from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.plan import PlanSpec
from shardwright.report.answer_names import ANSWER_NAMES
from shardwright.sharding.mesh import expert_axis_sizes

ON_H100 = ("--set", "cluster.device=h100-sxm")


def answer_in(page: str) -> Any:
    """The answer that a page has in it."""
    return data_in(page)["answer"]


def data_in(page: str) -> Any:
    """All that a page shows."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1])


@pytest.mark.parametrize("command", [*predict.COMMANDS, *searching.COMMANDS, *catalog_commands.COMMANDS])
def test_every_command_that_predicts_has_the_option_once(command: click.Command) -> None:
    assert [option.name for option in command.params].count("html") == 1


@pytest.mark.usefixtures("searched_once")
@pytest.mark.parametrize(
    "words",
    [
        ("estimate", "quickstart", *ON_H100),
        ("explain", "quickstart", *ON_H100),
        ("layout", "quickstart", *ON_H100),
        ("devices",),
    ],
)
def test_the_page_has_the_answer_of_json(words: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "answer.html"
    done = CliRunner().invoke(cli, [*words, "--html", str(file)])
    assert done.exit_code == 0 and done.stdout == f"the answer is in {file}\n"
    page = file.read_text(encoding="utf-8")
    assert answer_in(page) == json.loads(CliRunner().invoke(cli, [*words, "--json"]).stdout)
    text, lines = data_in(page)["text"], data_in(page)["lines"]
    assert words == ("devices",) or text == CliRunner().invoke(cli, words).stdout.rstrip("\n")
    assert {*lines.split()} == {*text.split()}, "the same words, in lines that nothing has broken"
    assert len(lines.splitlines()) < len(text.splitlines())


def test_a_bad_answer_is_a_page_too_and_keeps_its_status(tmp_path: Path) -> None:
    file = tmp_path / "answer.html"
    words = ["plan", "llama3-70b", "--devices", "1", "--device", "h100-sxm"]
    done = CliRunner().invoke(cli, [*words, "--html", str(file), "--json"])
    assert done.exit_code == 1 and answer_in(file.read_text(encoding="utf-8")) == json.loads(done.stdout)


def test_a_file_that_is_no_page_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('name = "mine"\n', encoding="utf-8")
    done = CliRunner().invoke(cli, ["devices", "--html", str(file)])
    assert isinstance(done.exception, PlanError) and file.read_text(encoding="utf-8") == 'name = "mine"\n'


def test_a_notebook_shows_the_page_in_a_frame() -> None:
    shown = sw.load("quickstart", "cluster.device=h100-sxm").estimate()._repr_html_()
    assert shown.startswith('<iframe srcdoc="&lt;!doctype html&gt;') and shown.count("<") == 2
    assert "Of the tensor-parallel rank that holds most" in shown, "an answer stands there in words, too"


@pytest.mark.parametrize("name", ["-", "notes.txt"])
def test_a_file_that_no_page_may_replace_is_refused_before_the_answer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("mine", encoding="utf-8")
    asked: list[str] = []
    monkeypatch.setattr("shardwright.report.catalog_tables.catalog_rows", asked.append)
    assert CliRunner().invoke(cli, ["devices", "--html", name]).exit_code != 0
    assert not asked
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_chinese_page_names_values_and_tells_sentences_in_chinese(tmp_path: Path) -> None:
    file = tmp_path / "answer.html"
    words = ["estimate", "llama3-8b", "--devices", "8", "--device", "h100-pcie", "--lang", "zh", "--html", str(file)]
    few = [word for degree in ("cp", "tp", "pp") for word in ("--set", f"plan.{degree}=1")]  # plans, soon found
    assert CliRunner().invoke(cli, [*words, *few]).exit_code == 0
    data = data_in(file.read_text(encoding="utf-8"))
    assert data["names"]["step_range_s"] == "一步的范围" and data["names"]["mfu"] == "MFU"
    sentences = [text for text in data["answer"]["gaps"] if text]
    assert sentences and all(re.search("[一-鿿]", text) for text in sentences)


_PREDICTING = (*predict.COMMANDS, *searching.COMMANDS, *catalog_commands.COMMANDS)


@pytest.mark.parametrize("name", sorted({command.name for command in _PREDICTING} - {"validate"}))
def test_every_value_of_an_answer_has_a_name(name: str) -> None:
    """Or is a field of a job or an axis, which have one name in every language."""
    schema = json.loads((Path(sw.__file__).parent / "cli" / "schemas" / f"{name}.json").read_text(encoding="utf-8"))
    sections = [section.annotation for section in JobSpec.model_fields.values()]
    fields = {key for section in sections for key in getattr(section, "model_fields", ())}
    axes = set(expert_axis_sizes(PlanSpec()))
    unnamed = _keys_in(schema) - ANSWER_NAMES.keys() - fields - set(JobSpec.model_fields) - axes
    assert not unnamed


def _keys_in(schema: Any) -> set[str]:
    """The keys of all objects that a schema describes."""
    if isinstance(schema, list):
        return set().union(*map(_keys_in, schema))
    if not isinstance(schema, dict):
        return set()
    return set(schema.get("properties", {})).union(*map(_keys_in, schema.values()))
