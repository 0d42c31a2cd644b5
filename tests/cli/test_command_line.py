"""The command line answers at once, and its help tells everything."""

import json
import os
import re
import resource
import shlex
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from shardwright import __version__
from shardwright.cli.job_options import BriefCommand
from shardwright.cli.main import cli
from shardwright.config.attention_sections import LatentSpec
from shardwright.config.job import JobSpec
from shardwright.config.moe import MoeSpec
from shardwright.config.rotary_scaling import RotaryScalingSpec
from support.ranks import PATIENCE_S

# Each takes a tenth of a second or more to import.
HEAVY = ("torch", "numpy", "pydantic", "pyarrow", "tokenizers")


def shardwright(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardwright", *arguments]
    environment = os.environ | {"COLUMNS": "80"}  # the width of the help
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def cpu_seconds(*arguments: str) -> float:
    """CPU time of one command, user and system, which other programs on the machine disturb little."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    shardwright(*arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def imported_by(*arguments: str) -> set[str]:
    """Heavy libraries that a command imports."""
    code = (
        f"import sys, shardwright.cli.main; sys.argv = {['shardwright', *arguments]}\n"
        "try:\n    shardwright.cli.main.main()\nexcept SystemExit:\n    pass\n"
        f"print('imported', *[name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_help_is_there_at_once() -> None:
    assert min(cpu_seconds("--help") for _ in range(3)) < 0.5


@pytest.mark.parametrize(
    "arguments", [["--help"], ["-h"], ["--version"], [], ["nonsense"], ["train", "-h"], ["plan", "--help-all"]]
)
def test_help_needs_no_heavy_library(arguments: list[str]) -> None:
    assert imported_by(*arguments) == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ["fields"],
        ["train", "quickstart", "--set", "plan.tp=3"],
        ["estimate", "quickstart"],
        ["estimate", "quickstart", "--json"],
    ],
)
def test_a_job_is_read_without_torch(arguments: list[str]) -> None:
    """The right wing is loaded when there is something to run."""
    assert imported_by(*arguments) == {"pydantic"}


def test_version() -> None:
    done = shardwright("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert __version__ in done.stdout


def test_help_lists_the_commands() -> None:
    done = shardwright("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^  train +train a job", done.stdout, re.MULTILINE)
    assert re.search(r"^  verify +a plan against one rank", done.stdout, re.MULTILINE)


COMMANDS = sorted(set(cli.commands) - {"checkpoint"})


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_short(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Usage, the options that matter and examples, on one screen of any width; --help-all has all options."""
    for columns in (80, 100, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = helped(name, "--help").splitlines()
        assert len(lines) <= 50 and max(map(len, lines)) <= columns
    command = cli.commands[name]
    options = {
        word
        for option in command.params
        if isinstance(option, click.Option)
        for word in option.opts
        if not option.hidden
    }
    every = helped(name, "--help-all" if "--help-all" in options else "--help")
    assert all(re.search(rf"(^|[\s,]){option}\b", every) for option in options if option.startswith("--"))
    if isinstance(command, BriefCommand):
        assert command.brief <= options and len(command.brief) in (0, 5)
        assert all(re.search(rf"\s{option}\b", helped(name, "--help")) for option in command.brief)
        for example in command.examples:
            words = shlex.split(example)
            assert words[0] == name and {word for word in words if word.startswith("--")} <= options


def helped(*words: str) -> str:
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_every_command_is_in_a_section_of_help() -> None:
    text = helped("--help")
    assert "More:" not in text
    assert all(re.search(rf"^  {name} +\S", text, re.MULTILINE) for name in cli.commands)


def test_fields_tells_every_field() -> None:
    done = shardwright("fields")
    assert (done.returncode, done.stderr) == (0, "")
    help_text = " ".join(done.stdout.split())
    sections = {section: field.annotation for section, field in JobSpec.model_fields.items() if section != "name"}
    sections |= {"model.moe": MoeSpec, "model.latent": LatentSpec, "model.rotary_scaling": RotaryScalingSpec}
    for section, spec in sections.items():
        assert f"Fields of [{section}]:" in help_text
        for name in spec.model_fields:
            assert f" {name} = " in help_text or f"Fields of [{section}.{name}]:" in help_text
    assert 'name = "job" Name of the job; the run folder is called after it.' in help_text
    assert (
        'schedule = "1f1b" Order of forward and backward passes in the pipeline. One of sequential, gpipe' in help_text
    )
    assert "tp = 1 Tensor-parallel degree: ranks that share each layer's matrices." in help_text
    assert "sequence_parallel = false Also shard norms" in help_text
    assert max(map(len, done.stdout.splitlines())) <= 100
    plan = shardwright("fields", "plan").stdout
    assert plan.startswith("Fields of [plan]:") and "Fields of [plan.fallback" not in plan and "[model]" not in plan
    assert json.loads(shardwright("fields", "batch", "--json").stdout)["batch"]["global_batch_size = 8"]
    missing = shardwright("fields", "plna")
    assert missing.returncode == 2 and "did you mean plan?" in missing.stderr
