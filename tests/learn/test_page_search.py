"""The search of the pages: questions as people type them lead to the section that answers them."""

import pytest

from shardwright.learn.asked_words import asked, stem
from shardwright.learn.computed_answers import questions_of
from shardwright.learn.page_search import section_index, sections_with
from support.asked_pages import ASKED


def language_of_words(words: str) -> str:
    return "en" if words.isascii() else "zh"


@pytest.mark.parametrize(("words", "page", "heading"), ASKED)
def test_a_task_of_a_newcomer_comes_to_its_answer(words: str, page: str, heading: str) -> None:
    first = sections_with(words, language_of_words(words))[0]
    assert (first.page, first.heading[: len(heading)]) == (page, heading)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_each_question_of_the_pages_is_found_by_its_own_words(language: str) -> None:
    """Those with their answers on one page of thirty, and the two of each idea, but for such as "And in 16 bits?"."""
    alone = [section for section in section_index(language)[0] if section.question and not section.leans]
    assert len(alone) > 70 and len(alone) > 2 * len(questions_of(language))
    lists = [[one.heading for one in sections_with(section.heading, language)] for section in alone]
    places = [headings.index(section.heading) for headings, section in zip(lists, alone, strict=True)]
    assert places.count(0) >= 0.95 * len(alone) and max(places) <= 2


def test_numbers_models_and_devices_say_less_than_what_is_asked_of_them() -> None:
    weights = asked("bubble of a 70B llama on 64 H100").weights
    assert min(weights["bubbl"], 1.0) > 2 * max(weights[word] for word in ("70b", "llama", "64", "h100"))


@pytest.mark.parametrize("words", ["gradient", "gradients"])
def test_an_english_word_is_the_same_with_its_endings(words: str) -> None:
    assert stem(words) == "gradient"
    assert stem("training") == stem("trained") == stem("trains") == "train" and stem("loss") == "loss"


def test_a_half_word_stands_for_those_that_it_begins() -> None:
    assert sections_with("goodp", "en")[0].page == "failures"
