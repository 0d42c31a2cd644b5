"""Parts that a text in Chinese has to share with the English one: every template, number and unit."""

import re
from collections import Counter
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from shardwright.config import phrase

UNITS = "[KMGT]i?B|B|us|ms|s|h|min|days|%|[MGT]?FLOP|kWh"
NUMBER = re.compile(rf"(?<![\w.])\d+(?:,\d{{3}})*(?:\.\d+)?(?:e\d+)?(?: (?:{UNITS})(?![a-zA-Z\d]))?")


def assert_same_in_chinese(text_in: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, least: int = 100) -> None:
    """Assert that `text_in("zh")` has a template for each of `text_in("en")`, its numbers with their units, and at
    least so many Chinese characters."""
    english, missing = text_in("en"), set[str]()
    catalog, template_in = phrase.catalog_of("zh"), phrase.template_in

    def noted(template: str, language: str) -> str:
        other = template_in(template, language)
        if other == template and template not in catalog and re.search("[a-z]", re.sub(r"\{[^}]*\}", "", template)):
            missing.add(template)
        return other

    monkeypatch.setattr(phrase, "template_in", noted)
    chinese = text_in("zh")
    assert not missing, missing
    different = differing(english, chinese)
    assert not different, different
    assert num_chinese(chinese) >= least > num_chinese(english)


def words_of_picture(svg: str) -> str:
    """The texts and titles of an SVG picture, a line each."""
    elements = ElementTree.fromstring(svg).iter()
    return "\n".join(element.text or "" for element in elements if element.tag.endswith(("text", "title")))


def num_chinese(text: str) -> int:
    """The number of Chinese characters."""
    return len(re.findall("[\u4e00-\u9fff]", text))


def differing(english: str, chinese: str) -> Counter[str]:
    """The numbers, with their units, that are not as often in one text as in the other. Sentences may be turned."""
    first, second = numbers(english), numbers(chinese.replace(" 天", " days"))
    return (first - second) + (second - first)


def numbers(text: str) -> Counter[str]:
    """All numbers of a text, with their units, which may stand in the next line of a paragraph."""
    paragraphs = re.split(r"\n\s*\n", text)
    return Counter(number for lines in paragraphs for number in NUMBER.findall(re.sub(r"\s*\n\s*", " ", lines)))
