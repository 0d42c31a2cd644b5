"""One reader of values that others wrote: a value of the wrong kind is a fault, and the default stands in for it."""

from typing import Any

import pytest

from shardwright.config.fault_gathering_reader import FaultGatheringReader, is_finite, is_whole, signed, whole
from shardwright.config.hugging_face.config_reader import ConfigReader
from shardwright.config.plain_values import GivenOptions
from shardwright.interchange.reading.settings import Settings


def readers() -> list[tuple[FaultGatheringReader, int, str]]:
    """A reader of each kind, what it makes of a wrong number, and its fault."""
    settings, keys, options = Settings({"tp": "x"}, "--"), ConfigReader({"tp": "x"}), GivenOptions()
    return [
        (settings, settings.count("tp", 1), "--tp x: it should be a number"),
        (keys, keys.count("tp", 1), "tp is 'x', and should be a whole number, not negative, below 2^63"),
        (options, options.whole("tp", "x", 1), "tp is 'x'; use a whole number, 1 or more"),
    ]


@pytest.mark.parametrize("kind", range(3))
def test_a_wrong_value_is_a_fault_in_the_words_of_its_reader(kind: int) -> None:
    reader, value, fault = readers()[kind]
    assert value == 1 and reader.faults == [fault]


def test_names_that_nothing_reads_are_known() -> None:
    reader = FaultGatheringReader({"a": 0, "b": 1, "c": None, "d": False, "e": [], "f": "", "g": 2})
    assert reader.raw("c", "b") == 1
    reader.ignore("g")
    assert reader.unread() == ["a"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, (True, True)), (True, (False, False)), (1.5, (False, True)), (float("inf"), (False, False)),
     (float("nan"), (False, False)), (10**400, (True, False)), ("1", (False, False)), (None, (False, False))],
)  # fmt: skip
def test_numbers_are_whole_or_finite(value: Any, expected: tuple[bool, bool]) -> None:
    assert (is_whole(value), is_finite(value)) == expected


def test_digits_are_of_ascii_and_fit_64_bits() -> None:
    texts = ("12", "-12", "²", "--5", "1_000", "+7", "9" * 19, "")
    assert [whole(text) for text in texts] == [12, None, None, None, None, None, None, None]
    assert [signed(text) for text in texts] == [12, -12, None, None, None, None, None, None]
