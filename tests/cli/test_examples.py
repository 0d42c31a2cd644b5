"""The examples run, and what the documents name is there."""

import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from shardwright.cli.main import cli
from support.forked_commands import SCRIPT, run_forked

pytestmark = pytest.mark.usefixtures("searched_once")

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md"]
SAYS = {
    "own_schedule": "bubble: 33 % of 18", "which_zero": "ZeRO 3: state", "one_rank": "step 40: loss",
    "resnet": "step 30: loss 0.0", "encoder": "step 30: loss 3.4",
}  # fmt: skip


def test_every_example_is_run() -> None:
    assert {file.stem for file in (ROOT / "examples").glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_example(name: str) -> None:
    done = run_forked(SCRIPT, str(ROOT / "examples" / f"{name}.py"), folder=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert SAYS[name] in done.stdout
    if name == "one_rank":
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
        assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] / 2


HELPED = [(words, command) for command in cli.commands.values() for words in getattr(command, "examples", ())]
QUICK = ("export", "fields", "launch", "schedule", "check", "import")  # commands that neither search nor train


@pytest.mark.parametrize(("words", "command"), HELPED, ids=[words for words, _ in HELPED])
def test_what_help_shows_runs(words: str, command: click.Command, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *_ = words.split()
    assert command.name == name
    monkeypatch.chdir(ROOT)
    if name in QUICK and "chosen.toml" not in words and "--out" not in words:  # a file that `plan --toml` writes
        assert CliRunner().invoke(cli, shlex.split(words)).exit_code == 0


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_in_documents_exist(document: Path) -> None:
    source = ROOT / "src" / "shardwright"
    for path in re.findall(r"`((?:\.\./)?[\w.-]+(?:/[\w.-]+)+)`", document.read_text(encoding="utf-8")):
        if re.search(r"\.(py|md|toml|csv|svg)$", path) or path.startswith(("src/", "tests/", "docs/", "benchmarks/")):
            places = (ROOT / path, source / path, document.parent / path)
            assert any(place.exists() for place in places), f"{document.name} names {path}"
