"""Tokenizers: text to token ids and back."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardwright.config.base import PlanError, RunError, error_text, shortened
from shardwright.config.data import BeginToken, DataSpec
from shardwright.config.phrase import say
from shardwright.config.units import MIB, counted
from shardwright.config.user_file import FileFault, read_text, system_reason
from shardwright.train.data.dropped_text import Dropped, may_drop
from shardwright.train.data.template_files import read_config, special_tokens
from shardwright.train.data.tokenizer_growth import growth_faults

if TYPE_CHECKING:
    import tokenizers


class Tokenizer(Protocol):
    """Turns text into token ids and back.

    `num_ids` is 1 + the largest possible id. `begin_of_text` are the ids before each text, according to
    data.begin_token, and `end_of_text` those after each document. `fingerprint` differs between tokenizers. `dropped`
    counts the characters encoded so far that have no token.
    """

    num_ids: int
    begin_of_text: tuple[int, ...]
    end_of_text: tuple[int, ...]
    fingerprint: str
    dropped: Dropped

    def encode(self, text: str) -> NDArray[np.int64]:
        """The ids of `text`: [n]. Raises ValueError for text it can't encode, such as a lone surrogate."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """`encode` of each text, in parallel if the tokenizer can."""

    def encode_with_places(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids of `text`, [n], and the range of characters that each stands for, [n, 2]: begin and end."""

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """The text of `ids`. An unknown id or half a character is replaced or left out."""

    def special_ids(self) -> dict[str, int]:
        """The ids of special tokens by name: those that stand for no text, such as the end of a turn."""


def missing_begin(ids: NDArray[np.integer], begin: NDArray[np.integer]) -> NDArray[np.integer]:
    """The tokens to put before a text so that it begins with `begin`: none if its ids begin with them already."""
    return begin[:0] if np.array_equal(ids[: len(begin)], begin) else begin


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255.

    A newline follows each document: all 256 ids are bytes, so none is left for an end of text, and generated text stays
    printable. A document that itself ends in a newline is followed by a blank line.
    """

    num_ids = 256
    begin_of_text: tuple[int, ...] = ()
    end_of_text: tuple[int, ...] = (ord("\n"),)
    fingerprint = "bytes"

    def __init__(self) -> None:
        self.dropped = Dropped()

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        return [self.encode(text) for text in texts]

    def encode_with_places(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        ids = self.encode(text)
        # A byte that is no continuation byte of UTF-8 begins a character.
        characters = np.cumsum((ids & 0xC0) != 0x80)
        return ids, np.stack((characters - 1, characters), axis=1)

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        # 255 never occurs in UTF-8, so an id that is no byte becomes the replacement character.
        return bytes(int(i) if 0 <= i < 256 else 255 for i in ids).decode(errors="replace")

    def special_ids(self) -> dict[str, int]:
        return {}


class FileTokenizer:
    """A tokenizer.json of Hugging Face tokenizers.

    A document ends with the first of these that the tokenizer has: a token whose name says end of text; the `eos_token`
    of the configuration beside the file, which for chats may be the end of a turn; a token with a usual name of an end;
    or nothing. A document begins with the tokens that the file itself puts before a text, unless data.begin_token says
    otherwise. Truncation and padding in the file are turned off: they would lose or invent text.
    """

    ends_of_text = ("<|endoftext|>", "<|end_of_text|>")
    usual_ends = ("</s>", "<eos>", "<|eos|>", "[EOS]", "<｜end▁of▁sentence｜>")

    usual_begins = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<｜begin▁of▁sentence｜>", "[BOS]")

    def __init__(
        self, text: str, config: Mapping[str, Any] = MappingProxyType({}), begin_token: BeginToken = "auto"
    ) -> None:
        """Make a tokenizer from the contents of the file, and the `config` beside it (tokenizer_config.json). Raises
        ValueError if they are no tokenizer, or one that can make texts grow without a bound."""
        from tokenizers import Tokenizer as Library

        fields = _fields_of(text)
        if faults := growth_faults(fields):
            raise ValueError(faults[0])
        with _library_errors():
            self._library: tokenizers.Tokenizer = Library.from_str(text)
            self._library.no_truncation()
            self._library.no_padding()
        ids = self._library.get_vocab(with_added_tokens=True)
        self.num_ids = 1 + max(ids.values(), default=-1)  # ids may have gaps, so not the number of entries
        special = special_tokens(config)
        names = (*self.ends_of_text, special.get("eos_token", ""), *self.usual_ends)
        self.end_of_text = tuple(ids[name] for name in names if name in ids)[:1]
        prefix = _prefix_tokens(fields.get("post_processor"))
        self.begin_of_text = self._begin(begin_token, config, special.get("bos_token", ""), prefix)
        bounds = f"{self.begin_of_text or ''}{self.end_of_text}"
        self.fingerprint = blake2b(f"{bounds} {text}".encode(), digest_size=16).hexdigest()
        self.dropped = Dropped()
        self._may_drop = may_drop(fields)

    def encode(self, text: str) -> NDArray[np.int64]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        with _library_errors():
            encodings = self._library.encode_batch(list(texts), add_special_tokens=False)
        if self._may_drop:
            self.dropped.add(texts, self._has_token)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def encode_with_places(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        with _library_errors():
            encoding = self._library.encode(text, add_special_tokens=False)
        if self._may_drop:
            self.dropped.add([text], self._has_token)
        places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return np.array(encoding.ids, np.int64), places

    def _has_token(self, characters: Sequence[str]) -> list[bool]:
        with _library_errors():
            encodings = self._library.encode_batch(list(characters), add_special_tokens=False)
        return [bool(encoding.ids) for encoding in encodings]

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        try:
            with _library_errors():
                return self._library.decode([int(i) for i in ids], skip_special_tokens=False)
        except ValueError as error:
            raise RunError(
                say(
                    "the tokenizer can't turn {tokens} into text: {reason}; mend its decoder, or name another with "
                    "data.tokenizer",
                    tokens=counted(len(ids), "token"),
                    reason=error_text(error),
                )
            ) from None

    def _begin(
        self, begin_token: BeginToken, config: Mapping[str, Any], bos_token: str, prefix: tuple[int, ...]
    ) -> tuple[int, ...]:
        """The tokens that texts begin with. The file itself puts `prefix` before a text. Raises ValueError if
        `begin_token` is "always" and no such token is known."""
        adds = config.get("add_bos_token")
        if begin_token == "none" or (begin_token == "auto" and adds is False):
            return ()
        bos_id = self._library.token_to_id(bos_token) if bos_token else None
        if begin_token == "auto":
            return prefix or ((bos_id,) if adds is True and bos_id is not None else ())
        usual_ids = (self._library.token_to_id(name) for name in self.usual_begins)
        begin_id = next((token_id for token_id in (bos_id, *usual_ids) if token_id is not None), None)
        if prefix or begin_id is None:
            if not prefix:
                raise ValueError(
                    say(
                        'data.begin_token is "always", and it has no token that begins a text: none is put before '
                        "texts, none is called bos_token beside it, and none has a usual name"
                    )
                )
            return prefix
        return (begin_id,)

    def special_ids(self) -> dict[str, int]:
        added = self._library.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}


def _prefix_tokens(step: Any) -> tuple[int, ...]:
    """The tokens that the post-processors of a valid tokenizer.json put before a text. They are read from its fields:
    encoding a text to see them would run a stranger's patterns in this process, which has no limits."""
    match step["type"] if step else "":
        case "Sequence":  # each processor puts its tokens before the result of the previous ones
            return tuple(
                token_id for processor in reversed(step["processors"]) for token_id in _prefix_tokens(processor)
            )
        case "BertProcessing" | "RobertaProcessing":
            return (step["cls"][1],)
        case "TemplateProcessing":
            prefix_pieces = takewhile(lambda piece: "SpecialToken" in piece, step["single"])
            names = [piece["SpecialToken"]["id"] for piece in prefix_pieces]
            return tuple(token_id for name in names for token_id in step["special_tokens"][name]["ids"])
    return ()


def _fields_of(text: str) -> dict[str, Any]:
    """The fields of a tokenizer.json. Raises ValueError."""
    try:
        fields = json.loads(text)
    except RecursionError:
        raise ValueError(say("it is nested too deep")) from None
    if not isinstance(fields, dict):
        raise ValueError(say("it is JSON, but no object"))
    return fields


@contextmanager
def _library_errors() -> Iterator[None]:
    """Turn whatever the library raises into ValueError: a bare Exception, as for a word outside a vocabulary without an
    "unknown" token, and a panic of its Rust code, as when a pattern takes too long, which is no Exception."""
    try:
        yield
    except ValueError:
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
            raise
        raise ValueError((str(error).splitlines() or [type(error).__name__])[0]) from None


# The largest published files, with a quarter of a million tokens, have 35 MB; reading takes 30 times as much memory.
_MOST_BYTES = 64 * MIB


def load_tokenizer(data: DataSpec) -> Tokenizer:
    """The tokenizer that `data` names. Raises PlanError if its file is missing or broken."""
    if data.tokenizer == "bytes":
        return ByteTokenizer()  # config/checks/check_data.py refuses a begin token with bytes
    path = Path(os.path.expanduser(data.tokenizer))
    with suppress(OSError, ValueError):
        path = path / "tokenizer.json" if path.is_dir() and (path / "tokenizer.json").exists() else path
    way_out = say('name a tokenizer.json of Hugging Face tokenizers, or use data.tokenizer = "bytes"')
    try:
        text = read_text(path, _MOST_BYTES, "tokenizer.json", way_out)
    except FileNotFoundError:
        fault = say(
            "there is no tokenizer file {tokenizer} (looked from {current}); {way_out}",
            tokenizer=data.tokenizer,
            current=Path.cwd(),
            way_out=way_out,
        )
        raise PlanError("data", [fault]) from None
    except FileFault as fault_of_file:
        raise PlanError("data", [f"data.tokenizer {fault_of_file}"]) from None
    except OSError as error:
        raise PlanError(
            "data",
            [
                say(
                    "tokenizer file {path} can't be read: {reason}; {way_out}",
                    path=path,
                    reason=system_reason(error),
                    way_out=way_out,
                )
            ],
        ) from None
    try:
        return FileTokenizer(text, read_config(path.parent), data.begin_token)
    except FileFault as fault_of_file:
        raise PlanError("data", [f"data.tokenizer: {fault_of_file}"]) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # also a field of a wrong type
        reason = shortened((str(error).splitlines() or [type(error).__name__])[0], 300)
        raise PlanError(
            "data", [say("{path} is not a tokenizer: {reason}; {way_out}", path=path, reason=reason, way_out=way_out)]
        ) from None
