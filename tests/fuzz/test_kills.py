"""A few runs that are harmed; tests/fuzz/kills.py does many."""

import subprocess
import time
from pathlib import Path

import pytest

from fuzz.kills import HARMS, command, harmed, losses

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[int, float]], float]:
    """The losses of the run, and how long it takes."""
    folder = tmp_path_factory.mktemp("unharmed")
    start_s = time.monotonic()
    subprocess.run(command(folder), check=True, stdout=subprocess.DEVNULL)
    return losses(folder), time.monotonic() - start_s


@pytest.mark.parametrize("number", range(len(HARMS)), ids=[harm.replace(" ", "-") for harm in HARMS])
def test_a_harmed_run_ends_as_an_unharmed_one(
    number: int, unharmed: tuple[list[tuple[int, float]], float], tmp_path: Path
) -> None:
    expected, seconds = unharmed
    assert harmed(17, number, expected, seconds) == ""
