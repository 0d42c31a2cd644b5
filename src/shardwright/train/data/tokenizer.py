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

from shardwright.config.base import PlanError, RunError, shortened
from shardwright.config.data import BeginToken, DataSpec
from shardwright.config.units import MIB, counted
from shardwright.config.user_file import FileFault, read_text
from shardwright.train.data.dropped_text import Dropped, may_drop
from shardwright.train.data.template_files import read_config, special_tokens
from shardwright.train.data.tokenizer_growth import growth_faults

if TYPE_CHECKING:
    import tokenizers


class Tokenizer(Protocol):
    """Text to token ids and back.

    `num_ids` is 1 + the largest id it can give, `begin_of_text` the ids that each text begins with, as data.begin_token
    says, `end_of_text` those that follow each document, and `fingerprint` tells tokenizers apart. `dropped` counts what
    of the text encoded so far has no token.
    """

    num_ids: int
    begin_of_text: tuple[int, ...]
    end_of_text: tuple[int, ...]
    fingerprint: str
    dropped: Dropped

    def encode(self, text: str) -> NDArray[np.int64]:
        """Ids of `text`: [n]. Raises ValueError for what it can't encode, such as a lone surrogate."""

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """`encode` of each text, in parallel where the tokenizer can."""

    def encode_with_places(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`encode`, and which characters of the text each id stands for: [n, 2], from one up to another."""

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Text of `ids`. What is no text (an unknown id, half a character) is replaced or left out."""

    def special_ids(self) -> dict[str, int]:
        """Tokens that stand for no text of their own, such as the end of a turn, by name."""


def missing_begin(ids: NDArray[np.integer], begin: NDArray[np.integer]) -> NDArray[np.integer]:
    """The tokens `begin` that a text with these ids lacks before it: none where it begins with them by itself."""
    return begin[:0] if np.array_equal(ids[: len(begin)], begin) else begin


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255.

    A newline follows each document: all 256 ids are bytes, so there is no id to spare for an end of text,
    and generated text stays printable. After a document that itself ends in a newline that is a blank line.
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
        # A byte that does not go on with a character begins one.
        characters = np.cumsum((ids & 0xC0) != 0x80)
        return ids, np.stack((characters - 1, characters), axis=1)

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        # 255 occurs in no UTF-8, so an id that is no byte comes out as the replacement character.
        return bytes(int(i) if 0 <= i < 256 else 255 for i in ids).decode(errors="replace")

    def special_ids(self) -> dict[str, int]:
        return {}


class FileTokenizer:
    """A tokenizer.json of Hugging Face tokenizers.

    Documents end with the token that is called an end of text; else with the `eos_token` that the configuration beside
    the file names, which in a tokenizer for chats may end a turn; else with one of the usual names; or with nothing.
    They begin with what the tokenizer itself puts before a text, unless data.begin_token says otherwise. Truncation and
    padding that the file may ask for are turned off: they would lose or invent text.
    """

    ends_of_text = ("<|endoftext|>", "<|end_of_text|>")
    usual_ends = ("</s>", "<eos>", "<|eos|>", "[EOS]", "<｜end▁of▁sentence｜>")

    usual_begins = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<｜begin▁of▁sentence｜>", "[BOS]")

    def __init__(
        self, text: str, config: Mapping[str, Any] = MappingProxyType({}), begin_token: BeginToken = "auto"
    ) -> None:
        """From the contents of the file, and of the `config` beside it (tokenizer_config.json). Raises ValueError if
        they are not a tokenizer, or one of which text grows without a bound."""
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
        own = _put_before(fields.get("post_processor"))
        self.begin_of_text = self._begin(begin_token, config, special.get("bos_token", ""), own)
        around = f"{self.begin_of_text or ''}{self.end_of_text}"
        self.fingerprint = blake2b(f"{around} {text}".encode(), digest_size=16).hexdigest()
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
        return [bool(alone.ids) for alone in encodings]

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        try:
            with _library_errors():
                return self._library.decode([int(i) for i in ids], skip_special_tokens=False)
        except ValueError as error:
            raise RunError(
                f"the tokenizer can't turn {counted(len(ids), 'token')} into text: {error}; mend its decoder, or name "
                "another with data.tokenizer"
            ) from None

    def _begin(
        self, begin_token: BeginToken, config: Mapping[str, Any], bos_token: str, own: tuple[int, ...]
    ) -> tuple[int, ...]:
        """The tokens that texts begin with, where the file itself puts `own` before one. Raises ValueError where they
        are asked for, and none is known."""
        adds = config.get("add_bos_token")
        if begin_token == "none" or (begin_token == "auto" and adds is False):
            return ()
        named = self._library.token_to_id(bos_token) if bos_token else None
        if begin_token == "auto":
            return own or ((named,) if adds is True and named is not None else ())
        usual = (self._library.token_to_id(name) for name in self.usual_begins)
        known = next((number for number in (named, *usual) if number is not None), None)
        if own or known is None:
            if not own:
                raise ValueError(
                    'data.begin_token is "always", and it has no token that begins a text: none is put before texts, '
                    "none is called bos_token beside it, and none has a usual name"
                )
            return own
        return (known,)

    def special_ids(self) -> dict[str, int]:
        added = self._library.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}


def _put_before(step: Any) -> tuple[int, ...]:
    """The tokens that post-processors put before a text, of a file that the library has taken. They are read, and not
    looked for in a text with its tokens: for that a stranger's patterns would run here, where nothing has limits."""
    match step["type"] if step else "":
        case "Sequence":  # each puts its own before what those in front of it made
            return tuple(number for one in reversed(step["processors"]) for number in _put_before(one))
        case "BertProcessing" | "RobertaProcessing":
            return (step["cls"][1],)
        case "TemplateProcessing":
            before = takewhile(lambda piece: "SpecialToken" in piece, step["single"])
            names = [piece["SpecialToken"]["id"] for piece in before]
            return tuple(number for name in names for number in step["special_tokens"][name]["ids"])
    return ()


def _fields_of(text: str) -> dict[str, Any]:
    """The fields of a tokenizer.json. Raises ValueError."""
    try:
        fields = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(fields, dict):
        raise ValueError("it is JSON, but no object")
    return fields


@contextmanager
def _library_errors() -> Iterator[None]:
    """Call the library. ValueError for whatever it raises: bare ones of Exception, as for a word outside a vocabulary
    without "unknown", and a panic of its Rust, as where a pattern takes too long, which is no Exception."""
    try:
        yield
    except ValueError:
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
            raise
        raise ValueError((str(error).splitlines() or [type(error).__name__])[0]) from None


# The largest of published ones, with a quarter of a million tokens, have 35 MB; reading takes thirty times as much.
_MOST_BYTES = 64 * MIB


def load_tokenizer(data: DataSpec) -> Tokenizer:
    """The tokenizer that `data` names. Raises PlanError if its file is missing or broken."""
    if data.tokenizer == "bytes":
        return ByteTokenizer()  # config/checks/check_data.py refuses a token that begins a text of bytes
    path = Path(os.path.expanduser(data.tokenizer))
    with suppress(OSError, ValueError):
        path = path / "tokenizer.json" if path.is_dir() and (path / "tokenizer.json").exists() else path
    way_out = 'name a tokenizer.json of Hugging Face tokenizers, or use data.tokenizer = "bytes"'
    try:
        text = read_text(path, _MOST_BYTES, "tokenizer.json", way_out)
    except FileNotFoundError:
        fault = f"there is no tokenizer file {data.tokenizer} (looked from {Path.cwd()}); {way_out}"
        raise PlanError("data", [fault]) from None
    except FileFault as fault_of_file:
        raise PlanError("data", [f"data.tokenizer {fault_of_file}"]) from None
    except OSError as error:
        raise PlanError("data", [f"tokenizer file {path} can't be read: {error.strerror}; {way_out}"]) from None
    try:
        return FileTokenizer(text, read_config(path.parent), data.begin_token)
    except FileFault as fault_of_file:
        raise PlanError("data", [f"data.tokenizer: {fault_of_file}"]) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # a field of another type
        reason = shortened((str(error).splitlines() or [type(error).__name__])[0], 300)
        raise PlanError("data", [f"{path} is not a tokenizer: {reason}; {way_out}"]) from None
