"""A few runs that are harmed; tests/fuzz/kills.py does many. And that it sees what it looks for."""

import json
from pathlib import Path

import pytest

from fuzz import kills
from fuzz.harms import HARMS, Run
from fuzz.kills import Harmed, Unharmed, began_at, told_as_saved
from support.forked_commands import SCRIPT, run_forked

SAID = """\
quickstart: tiny-llama, 2 layers
pp rank 0 will hold 3.8 MiB
step  1/20  loss 5.0
step 2 is saved: the run waited 0.001 s, all was durable after 0.02 s
failed: rank 1 was killed by SIGKILL
restart 1 of 9 within 3600 s, in 0.5 s
quickstart: tiny-llama, 2 layers
quickstart: tiny-llama, 2 layers
pp rank 0 will hold 3.8 MiB
going on after step 2 from runs/quickstart/checkpoints/step-00000002
step  3/20  loss 5.0
step 20 is saved: the run waited 0.001 s, all was durable after 0.02 s
"""


@pytest.mark.processes
def test_some_harmed_runs_end_as_unharmed_ones() -> None:
    """Of one plan, whose unharmed run is made once. All kinds of harm and all plans are met by `make kills`."""
    done = run_forked(SCRIPT, kills.__file__, "--seed", "42", "--count", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(harm in done.stdout for harm in HARMS) >= 2


def test_where_ranks_went_on_from_is_read() -> None:
    assert began_at(SAID) == [0, None, 2]
    assert told_as_saved(SAID) == 20


@pytest.mark.parametrize(
    ("steps", "printed", "fault"),
    [
        ([1, 2, 2, 3], "", "other losses"),
        ([1, 3], "", "other losses"),
        ([1, 2, 3], "Traceback (most recent call last):", "a traceback"),
        ([1, 2, 3], "step-00000002 is not whole: rank-00000.json", "nobody damaged"),
        ([1, 2, 3], "", "are left"),
    ],
)
def test_what_is_wrong_at_the_end_is_seen(steps: list[int], printed: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in steps))
    (tmp_path / "said").write_text(printed)
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    run = Run(None, tmp_path, tmp_path / "checkpoints", tmp_path / "said")
    unharmed = Unharmed([(step, 1.0) for step in (1, 2, 3)], 1.0)
    assert fault in " ".join(Harmed([], False, "kill a rank", run, unharmed).faults_at_the_end())
