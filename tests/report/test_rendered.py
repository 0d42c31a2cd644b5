"""Tables of a screen break Chinese between its characters, so that a line is not left half empty."""

import pytest

from shardwright.config.text_columns import num_columns
from shardwright.report.rendered import WideRows, rendered


def test_a_cell_of_chinese_fills_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    plan = "同 1，但 pp 2, dp 8, ep 8, dualpipev, mb 1, zero 1, recompute none，层数不等"
    text = rendered([WideRows(("", "步", "方案"), [("1", "2.0 s", plan), ("2", "2.1 s", "dp 8")])], language="zh")
    heading, *lines = text.split("\n")
    assert max(map(num_columns, lines)) <= 60
    start = heading.index("方案") + 1  # the heading before it has a character of two columns
    first, second = (line[start + 1 :] for line in lines[:2])
    assert "none，" in first + second and not second.startswith("none")
