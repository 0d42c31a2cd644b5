"""Paragraphs and tables in a language: Chinese has no spaces between sentences, and its characters take two columns."""

from shardwright.config.phrase import say
from shardwright.config.text_columns import num_columns, page_width
from shardwright.report.document import AlignedRows, Lines, Paragraph, Title, document_text, paragraph

SENTENCES = (
    say("There is one replica."),
    "",
    say("The account is the runtime's, exact in calls and bytes."),
    say("Gradients travel in {number}.", number="float32"),
)


def test_sentences_are_joined_as_the_language_does() -> None:
    part = paragraph(*SENTENCES[:3])
    assert part.text("en") == "There is one replica. The account is the runtime's, exact in calls and bytes."
    assert part.text("zh") == "只有一个副本。这是本项目运行时的账目，次数和字节都是精确值。"


def test_no_line_is_wider_than_the_page() -> None:
    part = Paragraph(SENTENCES * 5, "- ", "  ")
    for language in ("en", "zh"):
        lines = part.text(language).splitlines()
        assert len(lines) > 2 and lines[0].startswith("- ") and all(line.startswith("  ") for line in lines[1:])
        assert all(num_columns(line) <= page_width() for line in lines)
        assert not any(line.strip()[0] in "，。；：" for line in lines)


def test_columns_are_as_wide_as_they_look() -> None:
    rows = [[say("axis"), say("size")], ["dp", "8"], [say("end of step"), "1,024"]]
    lines = AlignedRows(rows).text("zh").splitlines()
    assert lines == ["轴         大小", "dp            8", "一步结束  1,024"]
    assert {num_columns(line) for line in lines} == {15}


def test_a_document_is_its_parts() -> None:
    parts = [Title(say("Forward"), 4), Lines((say("time"), "a line")), say("bubble")]
    assert document_text(parts) == "4. Forward\n----------\n\ntime\na line\n\nbubble"
    assert document_text(parts, "zh") == "4. 前向\n-------\n\n时间\na line\n\n气泡"
