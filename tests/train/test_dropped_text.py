"""Text that a tokenizer without an unknown token drops is counted, told, and refused where it is much."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from shardwright.config.base import PlanError
from shardwright.config.data import DataSpec
from shardwright.config.model import ModelSpec
from shardwright.train.data.dropped_text import Dropped, may_drop
from shardwright.train.data.prepare import TokenFiles, prepare_tokens
from shardwright.train.data.tokenizer import FileTokenizer

LETTERS = "abcdefgh"


def letters(unk: str | None = None, **options: object) -> Tokenizer:
    vocab = {name: n for n, name in enumerate([*LETTERS, *([unk] if unk else [])])}
    return Tokenizer(models.BPE(vocab, [], unk_token=unk, **options))


def of_bytes() -> Tokenizer:
    made = Tokenizer(models.BPE({name: n for n, name in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return made


def prepared(tmp_path: Path, tokenizer: Tokenizer, text: str) -> TokenFiles:
    tokenizer.save(str(tmp_path / "t.json"))
    (tmp_path / "text.txt").write_text(text)
    data = DataSpec(path=str(tmp_path / "text.txt"), tokenizer=str(tmp_path / "t.json"), validation_share=0.0)
    return prepare_tokens(data, ModelSpec(sequence=4, vocab=300), 0, tmp_path / "cache")


@given(st.text(alphabet=LETTERS + "xyzä😀 \n", max_size=60))
def test_what_has_no_token_is_counted(text: str) -> None:
    tokenizer = FileTokenizer(letters().to_str())
    tokenizer.encode(text)
    solid = [character for character in text if not character.isspace()]
    assert tokenizer.dropped.num_characters == len(solid)
    assert tokenizer.dropped.num_dropped == sum(character not in LETTERS for character in solid)


def test_a_tokenizer_that_drops_most_of_the_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as refusal:
        prepared(tmp_path, letters(), "axxxxxxxxx" * 50)
    (fault,) = refusal.value.faults
    assert "no token for 450 of 500 characters of the text, such as 'x'" in fault
    assert "(450 / 500 = 90.0 %, and at most 1 % may be lost)" in fault
    assert 'data.tokenizer = "bytes"' in fault
    assert not list((tmp_path / "cache").glob("*.json"))


def test_a_little_is_told_again_from_the_cache(tmp_path: Path) -> None:
    text = "abcdefgh" * 50 + "x"
    assert prepared(tmp_path, letters(), text).dropped_share == pytest.approx(1 / 401)
    assert prepared(tmp_path, letters(), text).dropped_share == pytest.approx(1 / 401)


def test_with_an_unknown_token_or_all_bytes_nothing_is_dropped(tmp_path: Path) -> None:
    assert may_drop(json.loads(letters().to_str()))
    assert not may_drop(json.loads(letters("<unk>").to_str()))
    assert not may_drop(json.loads(of_bytes().to_str()))
    assert prepared(tmp_path, letters("<unk>"), "axxxxxxxxx" * 50).dropped_share == 0
    assert prepared(tmp_path, of_bytes(), "ä😀" * 100).dropped_share == 0


def test_blanks_are_not_text() -> None:
    dropped = Dropped()
    dropped.add(["a b\n c", ""], lambda characters: [one != "c" for one in characters])
    assert (dropped.num_characters, dropped.num_dropped, dropped.example) == (3, 1, "c")
    assert Dropped().share == 0.0
