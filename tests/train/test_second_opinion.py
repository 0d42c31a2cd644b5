"""Trainings that are drawn at random are what transformers' model in float64, and plain loops, make of them."""

import pytest

from fuzz.opinions import draw, in_words, run

pytestmark = pytest.mark.long

SEED, DRAWS = 4, 30


def _draws() -> list[object]:
    ranks = [max(draw(SEED, number).ranks) for number in range(DRAWS)]
    marks = [[pytest.mark.processes] if most > 1 else [] for most in ranks]
    return [pytest.param(number, marks=marks[number]) for number in range(DRAWS)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("number", _draws())
def test_a_draw_is_what_the_opinion_says(number: int) -> None:
    drawn = draw(SEED, number)
    outcome = run(drawn)
    assert outcome.kind == "equal", in_words(drawn, outcome)
