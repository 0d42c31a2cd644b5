"""A slice of the fuzzer of hostile input, and that it sees what it looks for."""

import mmap
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fuzz import inputs
from fuzz.hostile import Case
from fuzz.kinds import KINDS, case_of
from support.ranks import PATIENCE_S

pytestmark = pytest.mark.long

FUZZER = Path(inputs.__file__)


def test_a_hundred_inputs(tmp_path: Path) -> None:
    """No traceback, hang or contradiction, and no refusal without a way out."""
    command = [sys.executable, str(FUZZER), "--seed", "14", "--count", "100", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "100 cases" in done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_case_is_a_function_of_seed_and_number(kind: str) -> None:
    case = case_of(3, 7, [kind])
    assert case == case_of(3, 7, [kind]) == Case.from_json(case.as_json())
    assert case != case_of(3, 8, [kind])


def _raise() -> int:
    raise ZeroDivisionError("division by zero")


def _spin() -> int:
    while True:
        pass


def _grow() -> int:
    held = mmap.mmap(-1, 1 << 26)  # pages of its own: an allocator may have as much memory that was freed
    for place in range(0, len(held), mmap.PAGESIZE):
        held[place] = 1
    return 0


def _say(output: str, errors: str, status: int) -> int:
    print(output, end="")
    print(errors, end="", file=sys.stderr)
    return status


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("work", "wrong"),
    [
        (_raise, "a traceback: ZeroDivisionError: division by zero"),
        (_spin, "more than 1 s of CPU time"),
        (lambda: time.sleep(60) or 0, "it waits: 3 s"),
        (_grow, "more than 32 MiB of memory"),
        (lambda: _say("", "job x: 1 fault\n  1. it is wrong", 2), "a refusal without a way out"),
        (lambda: _say("half", "use another", 2), "a refusal that prints on standard output"),
        (lambda: _say("", "", 1), "a failure without a word"),
        (lambda: _say("", "", 7), "exit status 7"),
        (lambda: _say('{"bubble_fraction": NaN}', "", 0), "no JSON: NaN in JSON"),
        (lambda: _say('{"bubble_fraction": 1.5}', "", 0), "a bubble of 1.5"),
        (lambda: _say('{"bubble_fraction": 0.5}', "", 0), ""),
        (lambda: _say("", "use another", 2), ""),
    ],
)
def test_what_must_not_be_is_seen(monkeypatch: pytest.MonkeyPatch, work: object, wrong: str) -> None:
    # A second of CPU time may take a machine that has much else to do far longer; only what waits is to reach 3 s.
    wall_s = 3 if wrong.startswith("it waits") else 120
    for name, limit in (("CPU_S", 1), ("WALL_S", wall_s), ("MEMORY_BYTES", 1 << 25)):
        monkeypatch.setattr(inputs, name, limit)
    monkeypatch.setattr(inputs, "_command_status", lambda _: work())  # type: ignore[operator]
    outcome = inputs.run_case(Case("option", ["schedule", "--json"]))
    assert outcome.wrong.startswith(wrong) and bool(outcome.wrong) == bool(wrong), outcome
