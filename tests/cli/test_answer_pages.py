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
    assert words == ("devices",) or data_in(page)["text"] == CliRunner().invoke(cli, words).stdout.rstrip("\n")


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
