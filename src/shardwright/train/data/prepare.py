"""The data of a run: from data.path to two streams of token ids, prepared once and cached.

`prepare_tokens` finds, checks, tokenizes and splits. Samples are windows of a stream (samples.py), chats packed into
sequences (packed_samples.py), or mixed from several sources (mixed_samples.py). Text is tokenized to files in a cache
folder; files that are token ids already are used in place.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from shardwright.config.base import PlanError
from shardwright.config.data import DataSpec
from shardwright.config.model import ModelSpec
from shardwright.config.phrase import Phrase, any_of, say
from shardwright.config.units import counted
from shardwright.train.data.encoding_process import EncodingSetup
from shardwright.train.data.packed_samples import is_unlearned
from shardwright.train.data.prepared_tokens import MixedTokens, TokenFiles
from shardwright.train.data.progress import Tell
from shardwright.train.data.source_files import IN_PLACE, SourceFile, find_files
from shardwright.train.data.template_files import find_template
from shardwright.train.data.token_cache import Cache, Sides, Summary, cache_key, cached_spans, tokenize
from shardwright.train.data.token_files import Starts, check_token_files, open_token_files
from shardwright.train.data.token_stream import TokenSpan, TokenStream, cut, num_tokens
from shardwright.train.data.tokenizer import Tokenizer, load_tokenizer


def prepare_tokens(
    data: DataSpec, model: ModelSpec, seed: int, folder: Path, tell: Tell = lambda _: None
) -> TokenFiles | MixedTokens:
    """Find the documents that `data` names, turn them into token ids, and split them into a training and a held-out
    side.

    A document is held out if a hash of its name and beginning falls under data.validation_share. The split is the same
    on every machine and for every seed, and new documents do not change the side of old ones. If a side has no whole
    window then, and for a single document or token files, the last validation_share of all tokens is held out instead,
    and at least a window.

    Token files of text are cached in data.cache, or else in `folder`, which is made if needed. Their name depends on
    the text files, their sizes and times, and the settings that decide their tokens. They appear under that name only
    when complete, so any number of processes may prepare the same data at once, or be killed meanwhile: one process
    makes them, and others wait for it. Slow work reports its progress to `tell`.

    Raises PlanError with every fault that shows before any text is read (paths, tokenizer, sizes), or if there are
    none, with every fault in the text.
    """
    folder = Path(os.path.expanduser(data.cache)) if data.cache else folder
    if not data.sources:
        return _prepare_source(data, model, seed, folder, tell=tell)
    faults: list[str] = []
    prepared: list[TokenFiles] = []
    for number, source in enumerate(data.each):
        # A seed for each source: sources of the same size must not have the same order.
        own_seed = int.from_bytes(blake2b(f"{seed}:{number}".encode(), digest_size=7).digest(), "big")
        try:
            prepared.append(_prepare_source(source, model, own_seed, folder, tell=tell))
        except PlanError as error:
            faults += [say("{place}: {fault}", place=f"data.sources[{number}]", fault=fault) for fault in error.faults]
    if faults:
        raise PlanError("data", faults)
    return MixedTokens(
        tuple(prepared), tuple(source.path for source in data.sources), tuple(source.weight for source in data.sources)
    )


def refuse_missing(data: DataSpec, model: ModelSpec) -> None:
    """Raises PlanError if files of a source, or of a set of data.validation, are missing or unreadable, with every
    fault that shows before any text is read. Called early, since tokenizing the other sources can take an hour."""
    specs = [(f"data.sources[{number}]" if data.sources else "", spec) for number, spec in enumerate(data.each)]
    sets = zip(data.validation, data.each_validation, strict=True)
    specs += [(f"data.validation {validation_set.name!r}", spec) for validation_set, spec in sets]
    missing: list[str] = []
    for _, spec in specs:
        find_files(spec, missing)
    if not missing:
        return
    faults: list[str] = []
    for place, spec in specs:
        try:
            _open_source(spec, model)
        except PlanError as error:
            faults += [say("{place}: {fault}", place=place, fault=fault) if place else fault for fault in error.faults]
    raise PlanError("data", faults)


def prepare_validation(
    data: DataSpec, model: ModelSpec, folder: Path, tell: Tell = lambda _: None
) -> dict[str, TokenFiles]:
    """Prepare the sets of data.validation, as `prepare_tokens` prepares a source. Returns them by name; all tokens of a
    set are on its `train` side.

    Raises PlanError with every fault.
    """
    folder = Path(os.path.expanduser(data.cache)) if data.cache else folder
    faults: list[str] = []
    sets: dict[str, TokenFiles] = {}
    for validation_set, spec in zip(data.validation, data.each_validation, strict=True):
        try:
            sets[validation_set.name] = _prepare_source(spec, model, 0, folder, tell=tell)
        except PlanError as error:
            faults += [
                say("{place}: {fault}", place=f"data.validation {validation_set.name!r}", fault=fault)
                for fault in error.faults
            ]
    if faults:
        raise PlanError("data", faults)
    return sets


@dataclass(frozen=True)
class _Source:
    """A source before its text is read: its files, and if these are token files, their spans and document starts."""

    files: list[SourceFile]
    tokenizer: Tokenizer
    spans: list[TokenSpan]
    starts: Starts
    notes: list[str]


def _open_source(data: DataSpec, model: ModelSpec) -> _Source:
    """Find and check the files of a source. Raises PlanError with every fault that shows before any text is read."""
    faults: list[str] = []
    notes: list[str] = []
    files = find_files(data, faults, notes)
    in_place = [file for file in files if file.format in IN_PLACE]
    if in_place and len(in_place) < len(files):
        tokens, text = in_place[0], next(file for file in files if file.format not in IN_PLACE)
        faults.append(
            say(
                "data.path {path} has token files ({name}) beside text ({text}), and a run reads one or the other; "
                "name one kind by a glob such as FOLDER/*{suffix}, or set data.format",
                path=data.path,
                name=tokens.name,
                text=text.name,
                suffix=tokens.path.suffix,
            )
        )
    faults += _faults_of_chats(files, data)
    tokenizer = _load_checked(data, model, bool(in_place), faults)
    spans, starts = open_token_files(in_place, data, model.vocab, faults, notes)
    if tokenizer is None or faults:
        raise PlanError("data", faults)
    return _Source(files, tokenizer, spans, starts, notes)


def _prepare_source(data: DataSpec, model: ModelSpec, seed: int, folder: Path, tell: Tell) -> TokenFiles:
    source = _open_source(data, model)
    files, tokenizer, spans, notes = source.files, source.tokenizer, source.spans, source.notes
    template = find_template(data, model.weights) if data.chats else None
    key = cache_key(files, data, tokenizer, template, [span.dtype for span in spans])
    if spans:
        spans, summary = check_token_files(spans, source.starts, data, model.vocab, folder / key)
        sides: Sides = (tuple(spans), ())
    else:
        summary = tokenize(files, EncodingSetup(data, template), tokenizer, Cache(folder, key, tell))
        sides = cached_spans(summary, folder, key)
    if data.answers_only and summary.num_answers and summary.num_lost == summary.num_answers:
        raise PlanError("data", [_all_lost(summary.num_lost)])
    if summary.num_lost and data.answers_only:
        notes.append(
            say(
                "{num_lost:,} of {num_answers:,} answers of {path} have no loss: the chat template shows these turns "
                "otherwise once later ones are there, or their chat is too long to look for all of them",
                num_lost=summary.num_lost,
                num_answers=summary.num_answers,
                path=data.path,
            )
        )
    return replace(_split(summary, sides, data, model, seed), notes=tuple(notes))


def _all_lost(number: int) -> str:
    return say(
        "none of {number:,} answers can be told from what stands before it: the chat template shows a chat otherwise "
        "once an answer is added; name one in data.chat_template that marks answers by {{% generation %}}, or set "
        "data.answers_only to false",
        number=number,
    )


def _faults_of_chats(files: Sequence[SourceFile], data: DataSpec) -> list[str]:
    if not data.chats or all(file.format in ("jsonl", "parquet", "arrow") for file in files):
        return []
    file = next(file for file in files if file.format not in ("jsonl", "parquet", "arrow"))
    return [
        say(
            "data.chats is true, and {path} is no file of rows of messages but of {format}; name JSONL, parquet or "
            "Arrow files by a glob, or set data.format",
            path=file.path,
            format=file.format,
        )
    ]


def _load_checked(data: DataSpec, model: ModelSpec, in_place: bool, faults: list[str]) -> Tokenizer | None:
    try:
        tokenizer = load_tokenizer(data)
    except PlanError as error:
        faults.extend(error.faults)
        return None
    if model.weights and "tokenizer" not in data.model_fields_set and not in_place:
        faults.append(
            say(
                "model.weights {weights} has no tokenizer.json beside it, and text as bytes is not what these "
                "weights were trained on; name their tokenizer in data.tokenizer, put token files in data.path, or "
                'write data.tokenizer = "bytes" if bytes it is',
                weights=model.weights,
            )
        )
    # The tokenizer of token files is unknown; their ids are checked one by one.
    if tokenizer.num_ids > model.vocab and not in_place:
        num_ids, vocab = tokenizer.num_ids, model.vocab
        faults.append(
            say(
                "tokenizer {tokenizer} gives ids 0 to {last}, and model.vocab is {vocab} ({num_ids} > {vocab}); use "
                "model.vocab = {num_ids} or another tokenizer",
                tokenizer=data.tokenizer,
                last=num_ids - 1,
                vocab=vocab,
                num_ids=num_ids,
            )
        )
    return tokenizer


def _split(summary: Summary, sides: Sides, data: DataSpec, model: ModelSpec, seed: int) -> TokenFiles:
    """The training and held-out sides, each with at least a window. Raises PlanError if there is too little data."""
    if data.chats and not data.answers_only:
        sides = (
            tuple(replace(span, answers=None) for span in sides[0]),
            tuple(replace(span, answers=None) for span in sides[1]),
        )
    train, validation = sides
    window, total = model.sequence + 1, num_tokens(train) + num_tokens(validation)
    split: Literal["none", "documents", "tail"] = "documents"
    if data.chats:
        train, validation, split = _split_chats(train, validation, data)
        _refuse_unlearned(train, data, model)
    elif total < window * (2 if data.validation_share else 1):
        raise PlanError("data", [_too_little(total, data, model)])
    elif not data.validation_share:
        split = "none"
    elif min(num_tokens(train), num_tokens(validation)) < window:
        split = "tail"
        num_tail = min(max(round(total * data.validation_share), window), total - window)
        stream = train + validation
        train, validation = cut(stream, 0, total - num_tail), cut(stream, total - num_tail, total)
    return TokenFiles(
        train=train,
        validation=validation or None,
        split=split,
        num_documents=summary.num_documents,
        num_train_tokens=num_tokens(train),
        num_validation_tokens=num_tokens(validation),
        largest_id=summary.largest_id,
        unigram_entropy=summary.unigram_entropy,
        sequence=model.sequence,
        seed=seed,
        separate_documents=data.separate_documents,
        dropped_share=summary.dropped_share,
        packed=data.chats,
    )


def _split_chats(
    train: tuple[TokenSpan, ...], validation: tuple[TokenSpan, ...], data: DataSpec
) -> tuple[tuple[TokenSpan, ...], tuple[TokenSpan, ...], Literal["none", "documents", "tail"]]:
    """The training and held-out sides of chats, each with at least one chat, and how they are split. Raises PlanError
    if there are too few chats."""
    if train and (validation or not data.validation_share):
        return train, validation, "documents" if data.validation_share else "none"
    bounds = TokenStream(stream := train + validation, marks=True).documents()
    num_chats, needed = len(bounds) - 1, 2 if data.validation_share else 1
    if num_chats < needed:
        raise PlanError("data", [_too_few_chats(num_chats, needed, data.path)])
    num_tail = min(max(round(num_chats * data.validation_share), 1), num_chats - 1) if data.validation_share else 0
    boundary = int(bounds[num_chats - num_tail])
    return cut(stream, 0, boundary), cut(stream, boundary, int(bounds[-1])), "tail"


def _too_few_chats(num_chats: int, needed: int, path: str) -> Phrase:
    """The fault of data with too few chats, where 1 or 2 are needed."""
    if needed == 1:
        return say("data.path {path} holds {count} chats, and 1 are needed; use more chats", path=path, count=num_chats)
    if num_chats == 0:
        return say(
            "data.path {path} holds 0 chats, and 2 are needed to train on one and hold one out; use more chats",
            path=path,
        )
    return say(
        "data.path {path} holds {count} chats, and 2 are needed to train on one and hold one out; use more chats or "
        "data.validation_share = 0",
        path=path,
        count=num_chats,
    )


def _refuse_unlearned(train: tuple[TokenSpan, ...], data: DataSpec, model: ModelSpec) -> None:
    """Raises PlanError if nothing would be learned, because every sample ends before its first answer begins."""
    stream = TokenStream(train, marks=True)
    unlearned = is_unlearned(stream, model.sequence + 1)
    if unlearned.all():
        begin = int(stream.first_learned().min())
        fault = say(
            "of none of {chats} of data.path {path} an answer is left: they are cut to model.sequence {sequence} + 1 "
            "tokens, and the first answer begins behind {begin:,}; use a longer model.sequence, or shorter chats",
            chats=counted(len(unlearned), "chat"),
            path=data.path,
            sequence=model.sequence,
            begin=begin,
        )
        raise PlanError("data", [fault])


def _too_little(total: int, data: DataSpec, model: ModelSpec) -> str:
    window, num_sides = model.sequence + 1, 2 if data.validation_share else 1
    arithmetic = f"model.sequence {model.sequence} + 1 = {window}"
    needed = say("training needs {arithmetic} tokens", arithmetic=arithmetic)
    if num_sides == 2:
        needed = say(
            "train and validation each need {arithmetic} tokens, together {together}",
            arithmetic=arithmetic,
            together=2 * window,
        )
    ways_out: list[str] = [say("more text")]
    if total // num_sides > 1:
        ways_out.append(say("model.sequence = {most} or less", most=total // num_sides - 1))
    if num_sides == 2 and total >= window:
        ways_out.append("data.validation_share = 0")
    return say(
        "data.path {path} holds {total} tokens, and {needed}; use {ways_out}",
        path=data.path,
        total=total,
        needed=needed,
        ways_out=any_of(ways_out),
    )
