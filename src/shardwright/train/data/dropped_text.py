"""Text that a tokenizer without an unknown token drops in silence: how much of it, and whether that is too much.

A vocabulary of characters, or one of merges without bytes below them (BPE that is not over bytes), has no token for
what it has never seen, and Hugging Face tokenizers leave it out where no unknown token is named. A model would be
trained on what remains and nobody would know.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Of the characters that are not blank. Text from the web has some that no vocabulary holds.
MOST_SHARE = 0.01
# Says of each character whether a tokenizer makes a token of it.
HasToken = Callable[[Sequence[str]], Iterable[bool]]


@dataclass
class Dropped:
    """Counts of the encoded text: characters that are not blank, those without a token, one of these, and for each
    character that occurred whether it has a token."""

    num_characters: int = 0
    num_dropped: int = 0
    example: str = ""
    known: dict[str, bool] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The share of the characters that have no token."""
        return self.num_dropped / self.num_characters if self.num_characters else 0.0

    def add(self, texts: Sequence[str], has_token: HasToken) -> None:
        """Count texts. A character is dropped if it leaves nothing where it is encoded alone."""
        codes, counts = np.unique(np.frombuffer("".join(texts).encode("utf-32-le"), "<u4"), return_counts=True)
        characters = {chr(code): int(count) for code, count in zip(codes, counts, strict=True)}
        characters = {one: count for one, count in characters.items() if not one.isspace()}  # blanks are cut at
        new = [one for one in characters if one not in self.known]
        self.known |= dict(zip(new, has_token(new), strict=True))
        self.num_characters += sum(characters.values())
        for one, count in characters.items():
            if not self.known[one]:
                self.num_dropped += count
                self.example = self.example or one

    def count(self, num_characters: int, num_dropped: int, example: str) -> None:
        """Add what was counted elsewhere."""
        self.num_characters += num_characters
        self.num_dropped += num_dropped
        self.example = self.example or example

    def fault(self, tokenizer: str) -> str:
        """One sentence if too much was dropped, else nothing."""
        if self.share <= MOST_SHARE:
            return ""
        return (
            f"tokenizer {tokenizer} has no token for {self.num_dropped:,} of {self.num_characters:,} characters of the "
            f"text, such as {self.example!r}, and no unknown token, so it drops them ({self.num_dropped:,} / "
            f"{self.num_characters:,} = {self.share:.1%}, and at most {MOST_SHARE:.0%} may be lost); use a tokenizer "
            'made from such text, one with an "unknown" token, or data.tokenizer = "bytes"'
        )


def may_drop(fields: dict[str, Any]) -> bool:
    """True if the tokenizer with these fields of tokenizer.json can leave text out: it has no unknown token, and not
    every byte."""
    from tokenizers.pre_tokenizers import ByteLevel

    model = fields["model"]
    if model.get("unk_token") is not None or model.get("unk_id") is not None:
        return False
    names = set(model["vocab"]) if isinstance(model.get("vocab"), dict) else set()
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in names for byte in range(256)):
        return False
    return not (_splits_into_bytes(fields.get("pre_tokenizer")) and names.issuperset(ByteLevel.alphabet()))


def _splits_into_bytes(step: object) -> bool:
    if not isinstance(step, dict):
        return False
    return step.get("type") == "ByteLevel" or any(map(_splits_into_bytes, step.get("pretokenizers") or ()))
