"""The command line answers at once, and its help tells everything."""

import os
import re
import resource
import subprocess
import sys

import pytest

from shardwright import __version__
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


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--version"], [], ["nonsense"]])
def test_help_needs_no_heavy_library(arguments: list[str]) -> None:
    assert imported_by(*arguments) == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "-h"],
        ["verify", "-h"],
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
    assert re.search(r"^  train +Train JOB", done.stdout, re.MULTILINE)
    assert re.search(r"^  verify +Run JOB", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("command", ["train", "verify"])
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_of_a_command_tells_every_field(command: str, option: str) -> None:
    done = shardwright(command, option)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: python -m shardwright {command} [OPTIONS] JOB\n")
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
    assert max(map(len, done.stdout.splitlines())) <= 80
