"""Columns of a packed timeline, as the page reads them."""

from base64 import b64decode
from typing import Any

import numpy as np

Columns = dict[str, list[int]]


def unpacked_column(text: str) -> list[int]:
    """The numbers of a column, as unpack.js reads them."""
    numbers: list[int] = np.frombuffer(b64decode(text[1:]), f"<i{text[0]}").tolist()
    return numbers


def unpacked_columns(packed: dict[str, str]) -> Columns:
    """Columns of numbers by name."""
    return {name: unpacked_column(text) for name, text in packed.items()}


def unpacked_ranks(section: dict[str, Any]) -> list[dict[str, Columns]]:
    """The lists of each rank of a timeline, by name."""
    ranks: list[dict[str, Columns]] = [{} for _ in range(section["num_ranks"])]
    for name, packed in section["lists"].items():
        columns = unpacked_columns({key: text for key, text in packed.items() if key != "lengths"})
        ends = np.cumsum(packed["lengths"]).tolist()
        assert len(ends) == len(ranks) and {len(column) for column in columns.values()} == {ends[-1]}
        for rank, (end, length) in enumerate(zip(ends, packed["lengths"], strict=True)):
            ranks[rank][name] = {key: column[end - length : end] for key, column in columns.items()}
    return ranks
