"""Steps that a run does again after it has resumed."""

import json
from pathlib import Path

import pytest

from shardwright.train.metrics import _keep_until
from shardwright.train.steps_done_again import StepsDoneAgain


@pytest.mark.parametrize(
    ("again", "is_exact", "difference", "words"),
    [
        ([2.0, 1.5], True, 0.0, "steps 3 to 4 done again: the loss of 2 steps is equal, bit for bit"),
        ([2.0, 1.25], False, 0.25, "not bit for bit: losses differ by up to 2.50e-01"),
        ([2.0, None], False, None, "not bit for bit: one of two has no loss"),
    ],
)
def test_losses_before_and_after_a_resume_are_compared(
    again: list[float | None], is_exact: bool, difference: float | None, words: str
) -> None:
    steps = StepsDoneAgain({3: 2.0, 4: 1.5})
    assert steps.see(2, 9.0) is None and steps.see(3, again[0]) is None
    compared = steps.see(4, again[1])
    assert compared is not None and words in str(compared)
    assert (compared.bit_exact, compared.largest_loss_difference) == (is_exact, difference)
    assert steps.see(5, 1.0) is None and steps.compared() is None


def test_a_run_that_stops_before_the_last_of_them_compares_those_that_it_did() -> None:
    steps = StepsDoneAgain({3: 2.0, 4: 1.5})
    steps.see(3, 2.0)
    assert (compared := steps.compared()) is not None and (compared.first, compared.last) == (3, 3)


def test_lines_of_later_steps_are_dropped_and_their_losses_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "loss": 5.0 - step} for step in (1, 2, 3)] + [{"step": 3, "validation_loss": 1.0}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "lo', encoding="utf-8")
    assert _keep_until(path, 1) == {2: 3.0, 3: 2.0}
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == rows[:1]
