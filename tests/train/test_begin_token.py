"""Texts begin with the token that their tokenizer puts before them, in data as in prompts, and with none twice."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.train.data import document_files
from shardwright.train.data.prepare import prepare_tokens
from shardwright.train.data.prepared_tokens import TokenFiles
from shardwright.train.data.token_stream import TokenStream
from shardwright.train.prompt import prompt_of

pytestmark = pytest.mark.long

TEXTS = ["some words", "", "and more", "<s>begun already", "the last"]
PROMPTED = ("some words", "<s>begun already")  # each takes a process of its own


def tokenizer_folder(folder: Path, puts: str, config: dict[str, Any]) -> Path:
    """A tokenizer of bytes with `<s>`, 0, and `</s>`, 1, that puts something before texts, or does not."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=258, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    library.train_from_iterator(["a"], trainer)
    if puts:
        library.post_processor = processors.TemplateProcessing(single=puts, special_tokens=[("<s>", 0), ("</s>", 1)])
    (folder / "tokenizer").mkdir()
    library.save(str(folder / "tokenizer" / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"} | config
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer"


def job_of(folder: Path, **data: Any) -> JobSpec:
    answer = {"tokenizer": str(folder / "tokenizer"), "validation_share": 0.0, "separate_documents": True, **data}
    return make_job({"model": {"vocab": 258, "sequence": 8}, "data": answer})


def documents(job: JobSpec, folder: Path) -> list[list[int]]:
    tokens = prepare_tokens(job.data, job.model, 1, folder / "cache")
    assert isinstance(tokens, TokenFiles)
    ids, stream = np.empty(tokens.num_train_tokens, np.int64), TokenStream(tokens.train, marks=True)
    TokenStream(tokens.train).read(0, ids)
    return [ids[a:b].tolist() for a, b in pairwise(stream.documents().tolist())]


def write_texts(folder: Path) -> str:
    (folder / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return str(folder / "t.jsonl")


BOS = {"bos_token": "<s>"}
CASES: dict[str, tuple[str, dict[str, Any], str, bool]] = {
    "its post-processor": ("<s> $A", {}, "auto", True),
    "at both ends": ("<s> $A </s>", {}, "auto", True),
    "at the end": ("$A </s>", {}, "auto", False),
    "nothing": ("", BOS, "auto", False),
    "add_bos_token": ("", {**BOS, "add_bos_token": True}, "auto", True),
    "no add_bos_token": ("<s> $A", {**BOS, "add_bos_token": False}, "auto", False),
    "none": ("<s> $A", BOS, "none", False),
    "always": ("", BOS, "always", True),
    "always, by a usual name": ("", {}, "always", True),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_texts_and_prompts_begin_alike(name: str, tmp_path: Path) -> None:
    puts, config, field, begins = CASES[name]
    tokenizer_folder(tmp_path, puts, config)
    job = job_of(tmp_path, path=write_texts(tmp_path), begin_token=field)
    rows = documents(job, tmp_path)
    assert len(rows) == len([text for text in TEXTS if text])
    for row, text in zip(rows, filter(None, TEXTS), strict=True):
        assert row[-1] == 1 and row.count(1) == 1
        assert row.count(0) == (begins or text.startswith("<s>")) and (row[0] == 0) == bool(row.count(0))
        if text in PROMPTED:
            prompt = prompt_of(job, "", text, is_chat=False)
            assert list(prompt.ids) == row[:-1]
            assert prompt.num_hidden == (begins and not text.startswith("<s>"))


def test_they_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = tokenizer_folder(tmp_path, "<s> $A", BOS)
    library = AutoTokenizer.from_pretrained(folder)
    rows = documents(job_of(tmp_path, path=write_texts(tmp_path)), tmp_path)
    assert rows[0] == [*library(TEXTS[0])["input_ids"], 1]
    assert rows[1] == [*library(TEXTS[2])["input_ids"], 1]


def test_a_document_in_pieces_begins_once(tmp_path: Path) -> None:
    tokenizer_folder(tmp_path, "<s> $A", {})
    (tmp_path / "long.txt").write_text("a line of it\n" * 85_000)
    assert (tmp_path / "long.txt").stat().st_size > document_files._PIECE_BYTES
    (row,) = documents(job_of(tmp_path, path=str(tmp_path / "long.txt")), tmp_path)
    assert (row[0], row.count(0), row[-1]) == (0, 1, 1)


def test_what_was_made_without_is_not_taken_with(tmp_path: Path) -> None:
    tokenizer_folder(tmp_path, "<s> $A", {})
    path = write_texts(tmp_path)
    for field, number in (("none", 1), ("auto", 4), ("none", 1)):
        rows = documents(job_of(tmp_path, path=path, begin_token=field), tmp_path)
        assert sum(row.count(0) for row in rows) == number


@pytest.mark.parametrize(
    ("template", "field", "number"),
    [("{{ bos_token }}", "auto", 1), ("{{ bos_token }}", "always", 1), ("", "auto", 0), ("", "always", 1)],
)
def test_a_template_says_what_a_chat_begins_with(template: str, field: str, number: int, tmp_path: Path) -> None:
    template += "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    template += "{% endfor %}"
    tokenizer_folder(tmp_path, "<s> $A", {**BOS, "chat_template": template})
    talk = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two."}]
    (tmp_path / "c.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 3)
    job = job_of(tmp_path, path=str(tmp_path / "c.jsonl"), chats=True, begin_token=field, workers=1)
    rows = documents(job, tmp_path)
    assert [row.count(0) for row in rows] == [number] * 3
    assert all((row[0] == 0) == bool(number) for row in rows)
    prompt = prompt_of(job, "", "one?", is_chat=True)
    assert list(prompt.ids) == rows[0][: len(prompt.ids)]


def test_a_prompt_of_a_completion_begins_as_a_text(tmp_path: Path) -> None:
    tokenizer_folder(tmp_path, "<s> $A", {})
    (tmp_path / "c.jsonl").write_text((json.dumps({"prompt": "ab", "completion": "cd"}) + "\n") * 2)
    job = job_of(tmp_path, path=str(tmp_path / "c.jsonl"), chats=True, workers=1)
    rows = documents(job, tmp_path)
    assert [(len(row), row[0], row[-1]) for row in rows] == [(6, 0, 1)] * 2
    sample = prepare_tokens(job.data, job.model, 1, tmp_path / "cache").train_samples().batch(0, 1)[0]
    learned = [0 <= token < 258 for token in sample[:6].tolist()]
    assert learned == [False, False, False, True, True, True]


def test_a_token_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path, "", {})
    text = (folder / "tokenizer.json").read_text().replace('"<s>"', '"<x>"')
    (folder / "tokenizer.json").write_text(text)
    job = job_of(tmp_path, path=write_texts(tmp_path), begin_token="always")
    with pytest.raises(PlanError, match=r'data.begin_token is "always", and it has no token that begins a text'):
        documents(job, tmp_path)
    with pytest.raises(PlanError, match="bytes have no token that begins a text"):
        make_job({"data": {"begin_token": "always"}})
