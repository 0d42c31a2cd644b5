"""docs/extrapolation.md shows what its commands print: predictions far from what constants were fitted to."""

import pytest

from support.extrapolation_page import HEAD, PAGE, ROW, figure

LINES = PAGE.read_text(encoding="utf-8").splitlines()


def _rows() -> list[tuple[str, str]]:
    rows, command = [], ""
    for line in LINES:
        if head := HEAD.match(line):
            command = head["command"]
        elif row := ROW.match(line):
            rows.append((f"{command} {row['options']}", row["figure"]))
    return rows


@pytest.mark.long
@pytest.mark.parametrize(("command", "shown"), _rows())
def test_a_figure_of_the_page_is_what_its_command_prints(command: str, shown: str) -> None:
    assert figure(command) == shown, "run tests/support/extrapolation_page.py"
