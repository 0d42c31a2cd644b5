"""Times of runs in a table have one unit, in which the shortest of them is no fraction."""

import pytest

from shardwright.config.units import days_column


@pytest.mark.parametrize(
    ("days", "heading", "cells"),
    [
        ((167.4, 2.0), "days", ["167", "2"]),
        ((0.5, 40.0), "hours", ["12", "960"]),
        ((0.0427,), "hours", ["1.02"]),
        ((0.025, 0.01), "minutes", ["36", "14.4"]),
        ((1e-6, 0.0), "minutes", ["0.00144", "0"]),
        ((), "days", []),
    ],
)
def test_times_of_runs_have_the_unit_of_the_shortest(days: tuple[float, ...], heading: str, cells: list[str]) -> None:
    assert days_column(days) == (heading, cells)
