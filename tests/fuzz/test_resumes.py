"""A few draws of the fuzzer of runs that stop and go on; `make fuzz` runs more, with other seeds."""

import pytest
import torch

from fuzz import resumes
from fuzz.draw import draw
from shardwright.train.checkpoint.boxes import HeldBox

SEED, NUM_DRAWS = 2026, 5


@pytest.mark.sampled(2)
@pytest.mark.processes
@pytest.mark.parametrize("number", range(NUM_DRAWS))
def test_a_run_that_stops_goes_on_with_what_it_had(number: int) -> None:
    kind, reasons = resumes.run(SEED, number)
    assert kind in ("equal", "equal, and elsewhere", "refused"), f"{reasons}\n{draw(SEED, number)}"


def test_another_bit_a_gap_and_an_element_twice_are_found() -> None:
    def box(first: int, end: int) -> HeldBox:
        return HeldBox("weights.x", (4,), ((first, end),), torch.arange(4.0)[first:end].clone())

    whole, other = (resumes.put_together([[box(0, 2)], [box(2, 4)]]) for _ in range(2))
    assert resumes.moved_wrongly(whole, other) == []
    other["weights.x"][3] += 1e-6
    assert resumes.moved_wrongly(whole, other) == ["weights.x"]
    for boxes in ([box(0, 2), box(1, 4)], [box(0, 3)]):
        with pytest.raises(AssertionError, match="twice, or missing"):
            resumes.put_together([boxes])
