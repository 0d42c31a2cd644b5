"""A bound on what a tokenizer.json makes of a text before it has tokens, and of tokens as text again.

Normalizers and decoders replace parts of a text by others, one after the other: six of them that write 64 letters for
one make 64^6 of each. Templates behind the model write the text's tokens as often as they name it, and the model puts a
prefix of any length before parts of words. Such a file has a kilobyte and ends the process that reads a line with it.
What a file can make is seen in the file, so it is refused before the library has it.
"""

import base64
import binascii
from collections.abc import Iterator
from typing import Any

# Characters for one, by a bound of each step: 18 of NFKD (U+FDFA), 18 of sentencepiece's table for the same, 2 of what
# is written small and 2 of a pattern, as ALBERT has them in a row, are 1,296.
MOST_GROWTH = 8192
# Of a token that is added to the vocabulary, with what normalizers make of it, and of all of them together.
_LONGEST_TOKEN, _MOST_ADDED = 1 << 16, 1 << 22
# Around a text: a beginning, an end, what says a language.
_FEW_TOKENS = 16
_UNICODE = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 2, "ByteLevel": 4, "BertNormalizer": 24}


def growth_faults(fields: dict[str, Any]) -> list[str]:
    """Faults of a tokenizer.json that would make texts grow too much, by its fields."""
    faults = []
    written = _growth(fields.get("normalizer"), "normalizers")
    read = _growth(fields.get("decoder"), "decoders")
    repeated, around = _repeated(fields.get("post_processor")), 1 + _affixes(fields.get("model"))
    parts = (
        ("normalizers", written),
        ("post-processors", repeated),
        ("prefixes and suffixes", around),
        ("decoders", read),
    )
    for kind, growth in parts:
        if growth > MOST_GROWTH:
            faults.append(f"its {kind} can make {growth:.3g} characters of one, and at most {MOST_GROWTH:,} are taken")
    if not faults and (growth := written * repeated * around) > MOST_GROWTH:
        together = ", ".join(f"{kind} {growth:,}" for kind, growth in parts[:3])
        faults.append(f"it can make {growth:,} characters of one ({together}), and at most {MOST_GROWTH:,} are taken")
    num_templates = _num_templates(fields.get("post_processor"))
    if not faults and num_templates > 1:  # where there are three parts, the library panics
        faults.append("its post-processors have more than one template, and at most one is taken")
    if faults:
        return faults
    lengths = [len(token) for token in _tokens(fields)]
    longest, added = max(lengths, default=0), sum(len(token) * written for token in _added(fields))
    if longest * read > _LONGEST_TOKEN:
        faults.append(
            f"it has a token of {longest:,} characters, of which its decoders make up to {longest * read:,}, and at "
            f"most {_LONGEST_TOKEN:,} are taken"
        )
    if added > _MOST_ADDED:
        faults.append(
            f"its normalizers can make {added:,} characters of the tokens that it adds, and at most {_MOST_ADDED:,} "
            "are taken"
        )
    return faults


def _growth(step: object, name: str) -> int:
    """How many characters a step, or a sequence of them, can make of one."""
    if not isinstance(step, dict):
        return 1
    growth = 1
    for one in _listed(step.get(name)):  # of a sequence
        growth = min(growth * _growth(one, name), 10**30)
    match step.get("type"):
        case "Replace":
            return growth * _replaced(step)
        case "Prepend":  # to each part between two tokens that are added: at most to each character
            return growth * (1 + _length(step.get("prepend")))
        case "Precompiled":
            return growth * _longest_mapped(step.get("precompiled_charsmap"))
    return growth * (_UNICODE.get(str(step.get("type")), 1) if name == "normalizers" else 1)


def _replaced(step: dict[str, Any]) -> int:
    """A pattern of a regular expression may be found in front of each character, where nothing is."""
    content, pattern = _length(step.get("content")), step.get("pattern")
    plain = _length(pattern.get("String")) if isinstance(pattern, dict) and "String" in pattern else 0
    return max(1, -(-content // plain)) if plain else 1 + content


def _longest_mapped(charsmap: object) -> int:
    """The longest text that a table of sentencepiece has for another: behind its length and a trie lie the texts, each
    with a zero byte behind it."""
    try:
        raw = base64.b64decode(charsmap) if isinstance(charsmap, str) else b""
    except (binascii.Error, ValueError):
        return 1  # the library will say so
    texts = raw[4 + int.from_bytes(raw[:4], "little") :]
    return max(1, *map(len, texts.split(b"\0")))


def _repeated(step: object) -> int:
    """How often post-processors write a text, or how many tokens they put around it."""
    if not isinstance(step, dict):
        return 1
    growth = 1
    for one in _listed(step.get("processors")):
        growth = min(growth * _repeated(one), 10**30)
    if step.get("type") != "TemplateProcessing":
        return growth
    known, times, num_tokens = step.get("special_tokens"), 0, 0
    for piece in _listed(step.get("single")):
        if isinstance(piece, dict) and isinstance(special := piece.get("SpecialToken"), dict):
            token = known.get(str(special.get("id"))) if isinstance(known, dict) else None
            num_tokens += len(_listed(token.get("ids"))) if isinstance(token, dict) else 0
        else:
            times += 1
    return growth * max(1, times, num_tokens if num_tokens > _FEW_TOKENS else 1)


def _num_templates(step: object) -> int:
    if not isinstance(step, dict):
        return 0
    own = step.get("type") in ("TemplateProcessing", "BertProcessing", "RobertaProcessing")
    return own + sum(map(_num_templates, _listed(step.get("processors"))))


def _affixes(model: object) -> int:
    """Characters that a model of parts of words puts around each of them."""
    if not isinstance(model, dict):
        return 0
    return sum(_length(model.get(name)) for name in ("continuing_subword_prefix", "end_of_word_suffix"))


def _tokens(fields: dict[str, Any]) -> Iterator[str]:
    """The vocabulary."""
    model = fields.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield from vocabulary
    for entry in _listed(vocabulary):  # of a unigram: pairs of a token and its logarithmic probability
        if isinstance(entry, list) and entry and isinstance(entry[0], str):
            yield entry[0]
    yield from _added(fields)


def _added(fields: dict[str, Any]) -> Iterator[str]:
    """The tokens beside the vocabulary."""
    for token in _listed(fields.get("added_tokens")):
        if isinstance(token, dict) and isinstance(content := token.get("content"), str):
            yield content


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _length(value: object) -> int:
    return len(value) if isinstance(value, str) else 0
