"""The time that it takes to find the answers of a chat, and templates that write the date."""

import json
import sys
import time
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.base import PlanError
from shardwright.config.data import DataSpec
from shardwright.config.load import make_job
from shardwright.config.model import ModelSpec
from shardwright.train.data import chat_template, encoding_process
from shardwright.train.data.chat_rows import Chat
from shardwright.train.data.chat_template import ChatTemplate, TemplateError
from shardwright.train.data.encoding_process import BoundedTemplate
from shardwright.train.data.prepare import prepare_tokens
from shardwright.train.data.prepared_tokens import TokenFiles
from shardwright.train.data.template_files import TemplateFiles

CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
TEMPLATES = (
    CHATML,
    # Thoughts of earlier turns are left out; one that ends differently; one that refuses; one without a prompt.
    "{% for m in messages %}<{{ m.role }}>{% if loop.last %}{{ m.content }}{% else %}{{ m.content[1:] }}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}",
    "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}{% if not add_generation_prompt %}</s>{% endif %}",
    "{% for m in messages %}{% if loop.first and m.role != 'user' %}{{ raise_exception('no') }}{% endif %}"
    "{{ m.content }}{% endfor %}",
    "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
)


def template_of(text: str, kind: type[ChatTemplate] = ChatTemplate, today: str = "") -> ChatTemplate:
    return kind(TemplateFiles(text, Path("t.jinja"), {}), today)


def chat_of_turns(num_messages: int, text: str) -> Chat:
    roles = ("user", "assistant")
    return Chat("line 1", tuple({"role": roles[i % 2], "content": text} for i in range(num_messages)))


def places_one_by_one(template: ChatTemplate, messages: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Where answers are, by the rule as it is written down: three texts for each."""

    def text(number: int, asks: bool = False) -> str:
        return template._render(Chat("a"), messages[:number], {}, asks)

    whole, results = text(len(messages)), []
    for i in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
        try:
            asked, before, after = text(i, asks=True), text(i), text(i + 1)
        except TemplateError:
            continue
        begin = len(commonprefix((asked, whole)))  # noqa: RUF071 (texts, not paths)
        if whole.startswith(after) and whole.startswith(before) and len(before) <= begin < len(after):
            results.append((begin, len(after)))
    return results


@given(
    template=st.sampled_from(TEMPLATES),
    messages=st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "assistant"]), "content": st.text("ab<", max_size=4)}
        ),
        min_size=1, max_size=7,
    ),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_answers_are_where_the_rule_says(template: str, messages: list[dict[str, Any]]) -> None:
    made = template_of(template)
    try:
        expected = places_one_by_one(made, messages)
    except TemplateError:
        return
    assert list(made.write(Chat("a", tuple(messages))).answers) == expected


@given(first=st.text("ab", max_size=300), second=st.text("ab", max_size=300), same=st.integers(0, 200_000))
@settings(max_examples=100, deadline=None)
def test_how_much_two_texts_have_in_common(first: str, second: str, same: int) -> None:
    first, second = "x" * same + first, "x" * same + second
    assert chat_template._num_common(first, second) == len(commonprefix((first, second)))  # noqa: RUF071


def test_a_long_chat_is_written_within_its_time() -> None:
    begun_s = time.process_time()
    written = template_of(CHATML, BoundedTemplate).write(chat_of_turns(320, "word " * 1600))
    assert len(written.answers) == written.num_answers == 160
    assert time.process_time() - begun_s < 5


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts the CPU time of a limit by ticks")
def test_a_limit_leaves_its_seconds_where_more_was_counted_than_used(monkeypatch: pytest.MonkeyPatch) -> None:
    counted_s, limits = 1000.0, list[int]()
    monkeypatch.setattr(encoding_process.time, "clock_gettime", lambda _: counted_s)
    monkeypatch.setattr(encoding_process.resource, "setrlimit", lambda _, limit: limits.append(limit[0]))
    with encoding_process.bounded(2.5, "a text", "none"):
        assert limits[0] >= counted_s + 2.5


def test_the_end_of_an_answer_is_the_beginning_of_the_next() -> None:
    made, asked = template_of(CHATML), []
    write = made._render
    made._render = lambda *given, **named: asked.append(given) or write(*given, **named)  # type: ignore[method-assign]
    answers = tuple({"role": "assistant", "content": text} for text in "abcd")
    assert len(made.write(Chat("a", ({"role": "user", "content": "?"}, *answers))).answers) == 4
    assert len(asked) == 1 + 4 + 4  # the whole, each beginning, and each with what asks


def test_answers_of_an_endless_chat_are_lost_by_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MOST_WORK", 200_000)
    chat = chat_of_turns(100, "a word")
    written = template_of(CHATML).write(chat)
    assert 0 < len(written.answers) < 50 and written.num_lost == 50 - len(written.answers)
    assert written == template_of(CHATML).write(chat)
    monkeypatch.undo()
    assert template_of(CHATML).write(chat).answers[: len(written.answers)] == written.answers


DATED = "{{ strftime_now('%d %b %Y') }}" + CHATML
GUARDED = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}26 Jul 2024{% endif %}" + CHATML


def prepared(tmp_path: Path, template: str, today: str = "") -> TokenFiles:
    (tmp_path / "t.jinja").write_text(template)
    rows = ({"messages": list(chat_of_turns(2, f"word {number}").messages)} for number in range(20))
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    data = DataSpec(
        path=str(tmp_path / "a.jsonl"), chats=True, separate_documents=True, workers=1, validation_share=0.0,
        chat_template=str(tmp_path / "t.jinja"), today=today,
    )  # fmt: skip
    files = prepare_tokens(data, ModelSpec(sequence=128, vocab=256), 1, tmp_path / "cache")
    assert isinstance(files, TokenFiles)
    return files


def text_of(files: TokenFiles) -> str:
    ids = np.fromfile(files.train[0].path, files.train[0].dtype)
    return bytes(ids.astype(np.uint8)).decode()


def test_a_template_that_writes_the_date_is_told_that_of_the_job(tmp_path: Path) -> None:
    assert text_of(prepared(tmp_path, DATED, "2026-07-26")).startswith("26 Jul 2026<|im_start|>user")
    assert text_of(prepared(tmp_path, DATED, "2026-07-27")).startswith("27 Jul 2026")
    assert text_of(prepared(tmp_path, GUARDED)).startswith("26 Jul 2024")


@pytest.mark.parametrize("place", ["{{ strftime_now('%Y') }}", ""])
def test_a_date_that_nobody_says_is_one_fault(tmp_path: Path, place: str) -> None:
    late = CHATML.replace("{%- if add_generation_prompt %}", "{%- if add_generation_prompt %}{{ strftime_now('%Y') }}")
    with pytest.raises(PlanError) as caught:
        prepared(tmp_path, place + CHATML if place else late)
    (fault,) = caught.value.faults
    assert "writes the date of the day (strftime_now)" in fault and 'data.today = "2026-07-26"' in fault
    assert "mend that chat" not in fault


def test_what_is_no_date() -> None:
    chats = {"chats": True, "separate_documents": True}
    for today in ("2026-7-1", "today", "20260726", "2026-02-30", "2026-W30-7"):
        with pytest.raises(PlanError, match=r"data.today = .*it should be a date such as 2026-07-26"):
            make_job({"data": chats | {"today": today}})
    assert make_job({"data": chats | {"today": "2026-07-26"}}).data.today == "2026-07-26"
    with pytest.raises(PlanError, match=r"data.today '2026-07-26' is what templates of chats are told"):
        make_job({"data": {"today": "2026-07-26"}})
