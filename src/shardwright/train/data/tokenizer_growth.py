"""A bound on how much a tokenizer.json can grow a text while it encodes or decodes.

Normalizers and decoders replace parts of a text, one after the other: six of them that write 64 letters for one make
64^6 letters of each. Templates of post-processors repeat the text's tokens as often as they name it, and the model puts
a prefix of any length before parts of words. Such a file has a kilobyte, and ends the process that encodes a line with
it. The growth is computed from the file's fields, so the file is refused before the library loads it.
"""

import base64
import binascii
from collections.abc import Iterator
from typing import Any

from shardwright.config.phrase import say

# The most characters that one may become. ALBERT's steps, by their bounds, make 1,296: 18 by NFKD (for U+FDFA), 18 by
# sentencepiece's table, 2 by lower case, and 2 by a pattern.
MOST_GROWTH = 8192
# The most characters of a token after the decoders, and of all added tokens after the normalizers.
_LONGEST_TOKEN, _MOST_ADDED = 1 << 16, 1 << 22
# Tokens that a template may usually put around a text: a beginning, an end, a language.
_FEW_TOKENS = 16
# The growth by each step of Unicode.
_UNICODE = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 2, "ByteLevel": 4, "BertNormalizer": 24}


def growth_faults(fields: dict[str, Any]) -> list[str]:
    """Faults of a tokenizer.json, given as its fields, that would make texts grow too much."""
    return _faults_of_steps(fields) or _faults_of_tokens(fields)  # tokens are looked at once their steps are sound


def _faults_of_steps(fields: dict[str, Any]) -> list[str]:
    """Faults of the steps that a text goes through: alone, and one after the other."""
    faults = list[str]()
    normalized = _growth(fields.get("normalizer"), "normalizers")
    decoded = _growth(fields.get("decoder"), "decoders")
    repeated, with_affixes = _repeated(fields.get("post_processor")), 1 + _affixes(fields.get("model"))
    parts = (
        ("normalizers", normalized),
        ("post-processors", repeated),
        (say("prefixes and suffixes"), with_affixes),
        ("decoders", decoded),
    )
    for kind, growth in parts:
        if growth > MOST_GROWTH:
            faults.append(
                say(
                    "its {kind} can make {growth:.3g} characters of one, and at most {most_growth:,} are taken",
                    kind=kind,
                    growth=growth,
                    most_growth=MOST_GROWTH,
                )
            )
    if not faults and (growth := normalized * repeated * with_affixes) > MOST_GROWTH:
        together = tuple(say("{kind} {growth:,}", kind=kind, growth=growth) for kind, growth in parts[:3])
        faults.append(
            say(
                "it can make {growth:,} characters of one ({together}), and at most {most_growth:,} are taken",
                growth=growth,
                together=together,
                most_growth=MOST_GROWTH,
            )
        )
    num_templates = _num_templates(fields.get("post_processor"))
    if not faults and num_templates > 1:  # the library panics at three parts
        faults.append(say("its post-processors have more than one template, and at most one is taken"))
    return faults


def _faults_of_tokens(fields: dict[str, Any]) -> list[str]:
    """Faults of the tokens: of the longest when it is decoded, and of all that are added when they are normalized."""
    faults = list[str]()
    normalized = _growth(fields.get("normalizer"), "normalizers")
    decoded = _growth(fields.get("decoder"), "decoders")
    lengths = [len(token) for token in _tokens(fields)]
    longest, added = max(lengths, default=0), sum(len(token) * normalized for token in _added(fields))
    if longest * decoded > _LONGEST_TOKEN:
        faults.append(
            say(
                "it has a token of {longest:,} characters, of which its decoders make up to {decoded:,}, and at most "
                "{longest_token:,} are taken",
                longest=longest,
                decoded=longest * decoded,
                longest_token=_LONGEST_TOKEN,
            )
        )
    if added > _MOST_ADDED:
        faults.append(
            say(
                "its normalizers can make {added:,} characters of the tokens that it adds, and at most "
                "{most_added:,} are taken",
                added=added,
                most_added=_MOST_ADDED,
            )
        )
    return faults


def _growth(step: object, name: str) -> int:
    """The most characters that a step can make of one. `name` is the field of a sequence that holds its steps."""
    if not isinstance(step, dict):
        return 1
    growth = 1
    for part in _listed(step.get(name)):  # if the step is a sequence
        growth = min(growth * _growth(part, name), 10**30)
    match step.get("type"):
        case "Replace":
            return growth * _replaced(step)
        case "Prepend":  # to each part between two added tokens: at most to each character
            return growth * (1 + _length(step.get("prepend")))
        case "Precompiled":
            return growth * _longest_mapped(step.get("precompiled_charsmap"))
    return growth * (_UNICODE.get(str(step.get("type")), 1) if name == "normalizers" else 1)


def _replaced(step: dict[str, Any]) -> int:
    """The most characters that a `Replace` step can make of one. A regular expression may match the empty text before
    each character."""
    content, pattern = _length(step.get("content")), step.get("pattern")
    plain = _length(pattern.get("String")) if isinstance(pattern, dict) and "String" in pattern else 0
    return max(1, -(-content // plain)) if plain else 1 + content


def _longest_mapped(charsmap: object) -> int:
    """The longest replacement text in sentencepiece's table of characters: 4 bytes with the size of a trie, the trie,
    and then the texts, each followed by a zero byte."""
    try:
        raw = base64.b64decode(charsmap) if isinstance(charsmap, str) else b""
    except (binascii.Error, ValueError):
        return 1  # the library will raise the error
    texts = raw[4 + int.from_bytes(raw[:4], "little") :]
    return max(1, *map(len, texts.split(b"\0")))


def _repeated(step: object) -> int:
    """The number of times that post-processors repeat a text, or of tokens that they put around it, if that is more
    than a few."""
    if not isinstance(step, dict):
        return 1
    growth = 1
    for processor in _listed(step.get("processors")):
        growth = min(growth * _repeated(processor), 10**30)
    if step.get("type") != "TemplateProcessing":
        return growth
    special_tokens, times, num_tokens = step.get("special_tokens"), 0, 0
    for piece in _listed(step.get("single")):
        if isinstance(piece, dict) and isinstance(special := piece.get("SpecialToken"), dict):
            token = special_tokens.get(str(special.get("id"))) if isinstance(special_tokens, dict) else None
            num_tokens += len(_listed(token.get("ids"))) if isinstance(token, dict) else 0
        else:
            times += 1
    return growth * max(1, times, num_tokens if num_tokens > _FEW_TOKENS else 1)


def _num_templates(step: object) -> int:
    if not isinstance(step, dict):
        return 0
    is_template = step.get("type") in ("TemplateProcessing", "BertProcessing", "RobertaProcessing")
    return is_template + sum(map(_num_templates, _listed(step.get("processors"))))


def _affixes(model: object) -> int:
    """The number of characters that a model puts around each part of a word."""
    if not isinstance(model, dict):
        return 0
    return sum(_length(model.get(name)) for name in ("continuing_subword_prefix", "end_of_word_suffix"))


def _tokens(fields: dict[str, Any]) -> Iterator[str]:
    """All tokens of a tokenizer.json: the vocabulary and the added tokens."""
    model = fields.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield from vocabulary
    for entry in _listed(vocabulary):  # of a unigram model: pairs of a token and its log probability
        if isinstance(entry, list) and entry and isinstance(entry[0], str):
            yield entry[0]
    yield from _added(fields)


def _added(fields: dict[str, Any]) -> Iterator[str]:
    """The tokens added to the vocabulary."""
    for token in _listed(fields.get("added_tokens")):
        if isinstance(token, dict) and isinstance(content := token.get("content"), str):
            yield content


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _length(value: object) -> int:
    return len(value) if isinstance(value, str) else 0
