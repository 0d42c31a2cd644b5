"""Counts text that a tokenizer drops silently, and refuses a tokenizer that drops too much.

A vocabulary of characters, or BPE that is not over bytes, has no token for characters that it has never seen, and
Hugging Face tokenizers leave them out if there is no unknown token. A model would be trained on the remaining text, and
nobody would notice.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwright.config.phrase import say

# The largest share of non-blank characters that may be dropped. Text from the web has some that no vocabulary holds.
MOST_SHARE = 0.01
# For each character: True if the tokenizer has a token for it.
HasToken = Callable[[Sequence[str]], Iterable[bool]]


@dataclass
class Dropped:
    """Counts of encoded text: non-blank characters, and those without a token, such as `example`. `has_token` tells
    for each character that occurred if it has a token."""

    num_characters: int = 0
    num_dropped: int = 0
    example: str = ""
    has_token: dict[str, bool] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The share of the characters that have no token."""
        return self.num_dropped / self.num_characters if self.num_characters else 0.0

    def add(self, texts: Sequence[str], has_token: HasToken) -> None:
        """Count texts. A character counts as dropped if it gives no token when it is encoded alone."""
        codes, counts = np.unique(np.frombuffer("".join(texts).encode("utf-32-le"), "<u4"), return_counts=True)
        characters = {chr(code): int(count) for code, count in zip(codes, counts, strict=True)}
        # Blanks separate words, and may have no token.
        characters = {character: count for character, count in characters.items() if not character.isspace()}
        new_characters = [character for character in characters if character not in self.has_token]
        self.has_token |= dict(zip(new_characters, has_token(new_characters), strict=True))
        self.num_characters += sum(characters.values())
        for character, count in characters.items():
            if not self.has_token[character]:
                self.num_dropped += count
                self.example = self.example or character

    def count(self, num_characters: int, num_dropped: int, example: str) -> None:
        """Add the counts of another process or batch."""
        self.num_characters += num_characters
        self.num_dropped += num_dropped
        self.example = self.example or example

    def fault(self, tokenizer: str) -> str:
        """The fault if too much text was dropped, else ""."""
        if self.share <= MOST_SHARE:
            return ""
        return say(
            "tokenizer {tokenizer} has no token for {num_dropped:,} of {num_characters:,} characters of the text, "
            "such as {example}, and no unknown token, so it drops them ({num_dropped:,} / {num_characters:,} = "
            "{share:.1%}, and at most {most_share:.0%} may be lost); use a tokenizer made from such text, one with "
            'an "unknown" token, or data.tokenizer = "bytes"',
            tokenizer=tokenizer,
            num_dropped=self.num_dropped,
            num_characters=self.num_characters,
            example=repr(self.example),
            share=self.share,
            most_share=MOST_SHARE,
        )


def may_drop(fields: dict[str, Any]) -> bool:
    """True if the tokenizer with these fields of tokenizer.json may drop text: it has no unknown token, and not a token
    for every byte."""
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
