"""Files of tokenizers from strangers: what makes a text grow is refused, and the rest has so much memory and time."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, processors

from shardwright.config.base import PlanError, RunError
from shardwright.config.data import DataSpec
from shardwright.train.data.encoding_pool import EncodingPool, HereAndNow, encoders
from shardwright.train.data.encoding_process import EncodingSetup
from shardwright.train.data.tokenizer import FileTokenizer, load_tokenizer
from shardwright.train.data.tokenizer_growth import MOST_GROWTH, growth_faults


def fields_of(**changed: Any) -> dict[str, Any]:
    """A tokenizer of two letters, changed."""
    plain = Tokenizer(models.BPE({"a": 0, "b": 1}, [])).to_str()
    return {**json.loads(plain), **changed}


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def normalizers(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def added(content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    return {"id": 2, "content": content, "normalized": True, **flags}


def charsmap(texts: bytes) -> dict[str, Any]:
    """A table of sentencepiece with an empty trie, and these texts behind it."""
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(4) + texts).decode()}


def template(single: str) -> Any:
    return processors.TemplateProcessing(single=single, special_tokens=[("a", 0), ("b", 1)])


def written_by(*steps: Any) -> dict[str, Any]:
    """Post-processors as they stand in a file."""
    library = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    library.post_processor = processors.Sequence(list(steps))
    return fields_of(post_processor=json.loads(library.to_str())["post_processor"])


SIX = [replace("a", "a" * 64)] * 6
BOMBS = {
    "normalizers": (fields_of(normalizer=normalizers(*SIX)), r"normalizers can make 6\.87e\+10 characters of one"),
    "nested": (fields_of(normalizer=normalizers(normalizers(*SIX[:3]), normalizers(*SIX[3:]))), "can make 6.87e"),
    "patterns": (fields_of(normalizer=normalizers(*[replace("", "a", "Regex")] * 40)), r"can make 1\.1e\+12"),
    "ligatures": (fields_of(normalizer=normalizers(*[replace(".", "ﷺ", "Regex"), {"type": "NFKD"}] * 6)), "can make"),
    "beginnings": (fields_of(normalizer=normalizers(*[{"type": "Prepend", "prepend": "a" * 99}] * 3)), "can make"),
    "a table": (fields_of(normalizer=charsmap(b"x" * 9000 + b"\0")), "can make 9e"),
    "decoders": (
        fields_of(decoder={"type": "Sequence", "decoders": SIX}),
        r"decoders can make 6\.87e\+10 characters of one",
    ),
    "an added token": (
        fields_of(normalizer=normalizers(*SIX[:2]), added_tokens=[added("a" * 1200)]),
        "its normalizers can make 4,915,200 characters of the tokens that it adds",
    ),
    "a text again and again": (written_by(template("$A" + " $A" * 8999)), "post-processors can make 9e"),
    "templates of templates": (written_by(*[template("$A" + " $A" * 63)] * 6), r"post-processors can make 6\.87e\+10"),
    "two templates": (written_by(template("a $A b"), template("a $A")), "more than one template"),
    "tokens around a text": (
        fields_of(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "a", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}] * 99,
                "special_tokens": {"a": {"id": "a", "ids": [0] * 100, "tokens": ["a"] * 100}},
            }
        ),
        "post-processors can make 9.9e",
    ),
    "a prefix": (
        fields_of(model={"type": "BPE", "vocab": {}, "continuing_subword_prefix": "#" * 9000}),
        "prefixes and suffixes can make 9e",
    ),
    "all together": (
        fields_of(
            normalizer=SIX[0],
            post_processor=written_by(template("$A" + " $A" * 63))["post_processor"],
            model={"type": "BPE", "vocab": {}, "end_of_word_suffix": "###"},
        ),
        r"can make 16,384 characters of one \(normalizers 64, post-processors 64, prefixes and suffixes 4\)",
    ),
    "a long word": (
        fields_of(model={"type": "WordLevel", "vocab": {"a" * 70_000: 0}, "unk_token": "a"}),
        "has a token of 70,000 characters",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_makes_a_text_grow_is_seen(name: str) -> None:
    fields, answer = BOMBS[name]
    (fault,) = growth_faults(fields)
    assert re.search(answer, fault)


def test_what_makes_a_text_grow_is_refused_before_the_library_has_it(tmp_path: Path) -> None:
    doubled = normalizers(*[replace("a", "aa")] * 14)
    (tmp_path / "t.json").write_text(json.dumps(fields_of(normalizer=doubled)))
    answer = r"t\.json is not a tokenizer: its normalizers can make 1\.64e\+04 characters of one, .*; name a tokenizer"
    with pytest.raises(PlanError, match=answer):
        load_tokenizer(DataSpec(tokenizer=str(tmp_path / "t.json")))


def test_published_ones_are_taken() -> None:
    """The steps of ALBERT, which has most: its table of sentencepiece writes 18 characters for one."""
    albert = normalizers(
        replace("``", '"'), replace("''", '"'), {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"},
        charsmap("صلى الله عليه وسلم\0".encode()), replace(" {2,}", " ", "Regex"),
    )  # fmt: skip
    decoder = {"type": "Sequence", "decoders": [replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}]}
    assert growth_faults(fields_of(normalizer=albert, decoder=decoder)) == []


steps = st.one_of(
    st.builds(replace, st.sampled_from(["a", "ab", "b"]), st.text("ab", max_size=3)),
    st.builds(replace, st.sampled_from(["", "a*", ".", "b|"]), st.text("abﷺ", max_size=2), st.just("Regex")),
    st.builds(lambda text: {"type": "Prepend", "prepend": text}, st.text("ab", min_size=1, max_size=3)),
    st.sampled_from([{"type": name} for name in ("NFD", "NFKD", "NFKC", "Lowercase")]),
)


@given(st.lists(steps, max_size=4), st.text("abİﷺΰ", max_size=5))
def test_no_text_grows_beyond_the_bound(chosen: list[dict[str, Any]], text: str) -> None:
    fields = fields_of(normalizer=normalizers(*chosen))
    if growth_faults(fields):
        return
    try:
        written = Tokenizer.from_str(json.dumps(fields)).normalizer.normalize_str(text)
    except BaseException as error:  # the library has a defect of its own at patterns that are found where nothing is
        if type(error).__name__ != "PanicException":
            raise
        return
    assert len(written) <= MOST_GROWTH * (len(text) + 1)


@pytest.mark.parametrize("fields", [[], {"model": 1}, {"normalizer": {"type": "Replace"}}, {"added_tokens": [1]}])
def test_what_is_no_tokenizer_has_one_fault(fields: Any, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(fields))
    with pytest.raises(PlanError, match=r"1 fault\n.*is not a tokenizer"):
        load_tokenizer(DataSpec(tokenizer=str(tmp_path / "t.json")))


def test_a_panic_of_the_library_is_a_fault(tmp_path: Path) -> None:
    """As it is read, and at a text: a pattern that goes back and forth until the library's limit."""
    broken = {"type": "Precompiled", "precompiled_charsmap": "//////////////////8="}
    (tmp_path / "t.json").write_text(json.dumps(fields_of(normalizer=broken)))
    with pytest.raises(PlanError, match="is not a tokenizer"):
        load_tokenizer(DataSpec(tokenizer=str(tmp_path / "t.json")))
    split = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
    (tmp_path / "t.json").write_text(json.dumps(fields_of(pre_tokenizer=split)))
    with pytest.raises(ValueError, match="retry-limit"):
        load_tokenizer(DataSpec(tokenizer=str(tmp_path / "t.json"))).encode("a" * 40)


def test_a_decoder_that_gives_up_is_told_in_a_sentence(tmp_path: Path) -> None:
    decoders = [{"type": "Fuse"}, replace("(?:.|.)+$(?<=z)", "x", kind="Regex")]
    (tmp_path / "t.json").write_text(json.dumps(fields_of(decoder={"type": "Sequence", "decoders": decoders})))
    with pytest.raises(RunError, match=r"can't turn 60 tokens into text: .*retry-limit.*; mend its decoder, or name"):
        load_tokenizer(DataSpec(tokenizer=str(tmp_path / "t.json"))).decode([0] * 60)


def test_a_tokenizer_of_a_file_never_encodes_here() -> None:
    small = EncodingSetup(DataSpec(tokenizer="t.json", workers=1), None)
    with encoders(small, load_tokenizer(DataSpec()), 100) as encoding:
        assert isinstance(encoding, EncodingPool)
    with encoders(EncodingSetup(DataSpec(), None), load_tokenizer(DataSpec()), 100) as encoding:
        assert isinstance(encoding, HereAndNow)


@pytest.mark.processes
def test_what_grows_within_the_bound_has_so_much_memory(tmp_path: Path) -> None:
    """4,096 characters of each of 3,000: more than a text of that length may take."""
    doubled = normalizers(*[replace("a", "aa")] * 12)
    (tmp_path / "t.json").write_text(json.dumps(fields_of(normalizer=doubled)))
    setup = EncodingSetup(DataSpec(tokenizer=str(tmp_path / "t.json")), None)
    with (
        EncodingPool(setup, 1) as pool,
        pytest.raises((RunError, PlanError), match=r"\bMiB\b.*; name another tokenizer"),
    ):
        pool.submit(["a" * 3000]).result()


@pytest.mark.parametrize(
    "puts",
    [
        None, processors.ByteLevel(), processors.BertProcessing(("b", 1), ("a", 0)),
        processors.RobertaProcessing(("b", 1), ("a", 0)), template("$A"), template("a $A b"), template("b a $A a"),
        processors.Sequence([processors.ByteLevel(), template("b $A")]),
    ],
)  # fmt: skip
def test_what_is_put_before_texts_is_read_and_not_tried(puts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library says the same; it is not asked, for its patterns could take minutes."""
    library = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2}, []))
    if puts is not None:
        library.post_processor = puts
    before, *_ = f" {' '.join(map(str, library.encode('c').ids))} ".partition(" 2 ")
    text_of_file = library.to_str()

    class Untried:
        def __init__(self, text: str) -> None:
            self._library = library

        from_str = classmethod(lambda cls, text: cls(text))

        def encode(self, *_: object, **__: object) -> None:
            raise AssertionError("a text was tried")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._library, name)

    monkeypatch.setattr("tokenizers.Tokenizer", Untried)
    assert FileTokenizer(text_of_file).begin_of_text == tuple(map(int, before.split()))
