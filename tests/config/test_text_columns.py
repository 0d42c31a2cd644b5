"""Texts as wide as the terminal: tables and paragraphs at 80 columns, and 100 in a pipe."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.config.text_columns import aligned, fitting, fitting_errors, logged, num_columns, wrapped

ROWS = [
    ["operator", "work", "bytes of the state", "what it communicates"],
    ["attention norm", "reads and writes 256 KiB", "1.3 MiB", ""],
    ["out", "8,192 x 2,048 x 16,384", "13.3 GiB", "reduce_scatter over tp of 256 MiB: 675 us, exposed"],
]


def test_a_pipe_has_a_hundred_columns_where_nobody_says_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert max(map(len, aligned(ROWS, left=(0, 1, 3)).split("\n"))) <= 100
    assert max(map(len, fitting("x " * 80).split("\n"))) <= 100
    assert logged("x " * 80) == "x " * 80  # a line of a log is one record
    monkeypatch.setenv("COLUMNS", "112")
    assert max(map(len, aligned(ROWS, left=(0, 1, 3)).split("\n"))) == 112
    assert max(map(len, fitting("x " * 80).split("\n"))) > 100
    assert max(map(len, logged("x " * 80).split("\n"))) <= 112


def test_a_table_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert aligned(ROWS, left=(0, 1, 3)).split("\n") == [
        "operator        work                      bytes of the state  what it",
        "                                                              communicates",
        "attention norm  reads and writes 256 KiB             1.3 MiB",
        "out             8,192 x 2,048 x 16,384              13.3 GiB  reduce_scatter",
        "                                                              over tp of 256",
        "                                                              MiB: 675 us,",
        "                                                              exposed",
    ]


def test_headings_of_numbers_are_broken_and_their_units_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert aligned([["pp rank", *["bytes of it"] * 5], ["0", *["13.3 GiB"] * 5]]).split("\n") == [
        "pp rank  bytes of  bytes of   bytes of   bytes of   bytes of",
        "               it        it         it         it         it",
        "0        13.3 GiB  13.3 GiB   13.3 GiB   13.3 GiB   13.3 GiB",
    ]


def test_columns_are_nearer_before_words_of_a_cell_are_parted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    rows = [["when", *["bytes"] * 4], ["between them", *["1,234.5 MiB"] * 4]]
    assert aligned(rows).split("\n") == ["when".ljust(12) + "bytes".rjust(12) * 4, "between them" + " 1,234.5 MiB" * 4]


def test_a_row_of_one_cell_stands_above_those_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no part in the widths of columns; what is indented below it stays so where it is broken."""
    monkeypatch.setenv("COLUMNS", "60")
    rows = [["state", "DTensor"], ["a " * 50 + "end"], ["  in use, between uses", "dp Replicate(), tp Shard(0) of all"]]
    assert aligned(rows, left=(0, 1)).split("\n") == [
        "state                   DTensor",
        *["a " * 29 + "a", "a " * 20 + "end"],
        "  in use, between uses  dp Replicate(), tp Shard(0) of all",
    ]
    rows[2][0] += ", and for ever after that"
    *_, first, second = aligned(rows, left=(0, 1)).split("\n")
    assert first.startswith("  in use, between uses,") and second.startswith("  ")


def test_what_does_not_fit_beside_the_first_column_follows_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    first, second = aligned([["rank", *["parameters"] * 8], ["12", *["1,234 MiB"] * 8]]).split("\n\n")
    assert [table.split("\n")[1].count("1,234 MiB") for table in (first, second)] == [4, 4]
    assert all(table.split("\n")[1].startswith("12 ") for table in (first, second))


def test_rows_with_nothing_in_further_columns_are_left_out_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row without a name goes on with the row above, whose name stays."""
    monkeypatch.setenv("COLUMNS", "60")
    seconds, exposed = "1" * 30, "2" * 30
    rows = [
        ["operator", "seconds", "exposed"],
        ["norm", seconds, ""],
        ["A layer"],
        ["out", seconds, ""],
        ["", seconds, exposed],
        ["", seconds, ""],
        ["join", seconds, exposed],
    ]
    first, second = aligned(rows).split("\n\n")
    assert [line.split()[0] for line in first.split("\n")] == ["operator", "norm", "A", "out", seconds, seconds, "join"]
    assert [line.split()[0] for line in second.split("\n")] == ["operator", "A", "out", exposed, "join"]


@given(st.lists(st.lists(st.text("ab 1", max_size=40), min_size=4, max_size=4), min_size=1, max_size=4))
def test_no_line_of_a_table_is_longer_than_the_terminal_and_no_word_is_lost(rows: list[list[str]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "60")
        words = [[(cell.replace(" ", "") and cell) or "-" for cell in row] for row in rows]
        table = aligned(words, left=(0, 1, 2, 3))
        longest = max(len(word) for row in words for cell in row for word in cell.split())
        if longest <= 20:
            assert max(map(len, table.split("\n"))) <= 60
        for row in words:
            for cell in row:
                assert all(word in table for word in cell.split())


def test_a_long_line_goes_on_under_its_first_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert fitting("  " + "word " * 14) == "  " + "word " * 10 + "word\n    word word word"


def test_an_item_of_a_list_goes_on_under_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert fitting_errors("  2. " + "word " * 14) == "  2. " + "word " * 10 + "word\n     word word word"


def test_errors_in_a_pipe_are_as_wide_as_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert max(map(len, fitting_errors("  1. " + "word " * 60).split("\n"))) in range(95, 101)


def test_no_line_of_chinese_begins_or_ends_with_the_wrong_mark() -> None:
    """A line does not begin with what closes, nor end with what opens; all of the text is there."""
    text = (
        "这是同等规模模型的常见取值（Brown et al. 2020, table 2.1；可用 --set 修改），需要 72 GiB，还剩（约）2.9 GiB。"
    )
    for width in range(16, 60):
        lines = list(wrapped(text, width))
        assert "".join(lines).replace(" ", "") == text.replace(" ", "")
        assert all(line[0] not in "，。；：、！？）」”" and line[-1] not in "（「“" for line in lines)
        assert all(num_columns(line) <= width for line in lines)
