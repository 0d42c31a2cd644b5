"""The rows of frozen matrices in NF4: 4 bits an element, and a scale for each block (QLoRA: Dettmers et al. 2023, arXiv
2305.14314, section 3).

A block is 64 elements of a row, and its scale the greatest magnitude among them, in float32. If scales are quantised
too (double quantisation), each is 8 bits, and up to 256 of a row share the greatest of them, in float32. A row is
stored in whole words of 32 bits: the codes of its elements, two in a byte; the scales of its blocks; and the greatest
scales. So ZeRO cuts and gathers matrices in NF4 as it does others, between their rows.
"""

from dataclasses import dataclass
from typing import Any, Literal

BLOCK = 64  # elements that share a scale
GROUP = 256  # scales that share a greatest one
WORD_BYTES = 4
CODES = 8  # in a word

# "" for rows of numbers in the type of the computation.
RowFormat = Literal["", "nf4", "nf4-double"]


@dataclass(frozen=True)
class Nf4Row:
    """The words of a row, or of the part of a row that a rank holds: elements [first, stop) of `full`.

    A part of a row has the greatest scales of the whole row: they are as with one rank.
    """

    first: int
    stop: int
    full: int
    is_double: bool

    @property
    def num_elements(self) -> int:
        """Elements of the part."""
        return self.stop - self.first

    @property
    def num_blocks(self) -> int:
        """Blocks of the part."""
        return self.num_elements // BLOCK

    @property
    def code_words(self) -> int:
        """Words of the codes."""
        return self.num_elements // CODES

    @property
    def scale_words(self) -> int:
        """Words of the scales: one for each block, or for four, the last of which may have bytes without a scale."""
        return -(-self.num_blocks // WORD_BYTES) if self.is_double else self.num_blocks

    @property
    def group_words(self) -> int:
        """Words of the greatest scales of the whole row."""
        return num_groups(self.full) if self.is_double else 0

    @property
    def num_words(self) -> int:
        """Words of all."""
        return self.code_words + self.scale_words + self.group_words


def num_groups(full: int) -> int:
    """Groups of scales of a whole row of `full` elements."""
    return -(-full // (BLOCK * GROUP))


def row_bytes(num_elements: Any, full: int, is_double: bool) -> Any:
    """Bytes of a row of which a rank holds `num_elements`, a number or an array, of `full`."""
    blocks = num_elements // BLOCK
    scales = -(-blocks // WORD_BYTES) + num_groups(full) if is_double else blocks
    return WORD_BYTES * (num_elements // CODES + scales)


def element_bytes(is_double: bool) -> float:
    """Bytes of an element with its part of the scales, in rows of whole groups."""
    num_elements = BLOCK * GROUP
    return float(row_bytes(num_elements, num_elements, is_double)) / num_elements
