"""The beginning of a text that a model goes on with, as tokens, and the tokens at which it ends."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.user_file import FileFault
from shardwright.train.data.chat_rows import ASSISTANT, Chat, question
from shardwright.train.data.encoding_pool import EncodingPool, encoders
from shardwright.train.data.encoding_process import EncodingSetup
from shardwright.train.data.template_files import find_template, folders_beside, read_config, special_tokens_of
from shardwright.train.data.tokenizer import Tokenizer, load_tokenizer, missing_begin

_CONFIGURATIONS = ("generation_config.json", "config.json")


@dataclass(frozen=True)
class Prompt:
    """Tokens that a text begins with; the first `num_hidden` of them are not shown with what follows. It ends before
    one of `ends`."""

    ids: tuple[int, ...]
    num_hidden: int
    ends: frozenset[int]


def prompt_of(job: JobSpec, weights: str, text: str, is_chat: bool) -> Prompt:
    """The tokens of a text, or of a chat that begins with it as what a user says and is to be answered. Raises
    PlanError where the tokenizer or the chat template can't write it, or the model has no such tokens.

    `weights` is the folder of the released model that the job's weights come from, or nothing. A text begins with the
    tokens that documents begin with (data.begin_token).
    """
    if job.model.weights and "tokenizer" not in job.data.model_fields_set:
        raise PlanError(
            "data.tokenizer",
            [
                f"{job.model.weights} has no tokenizer.json beside its weights; name their tokenizer by --set "
                "data.tokenizer=PATH, or bytes if it is that"
            ],
        )
    tokenizer = load_tokenizer(job.data)
    try:
        text.encode()  # half a character has no tokens, and tokenizers say so in words of their own
        ends = _end_tokens(list(folders_beside(job.data, weights)), tokenizer)
        if is_chat:
            prompt = _of_chat(job, weights, tokenizer, question(text, "--chat"), ends)
        else:
            ids, num_hidden = begun(tokenizer, _ids_of(job, tokenizer, text))
            prompt = Prompt(ids, num_hidden, ends)
    except FileFault as fault:
        raise PlanError("generate", [str(fault)]) from None
    except PlanError:
        raise
    except OSError as error:
        raise PlanError("generate", [f"{error.filename} can't be read: {error.strerror}; check it"]) from None
    except ValueError as error:
        raise PlanError("--prompt", [f"it can't be made tokens: {error}; write it otherwise"]) from None
    if (largest := max(prompt.ids)) >= job.model.vocab:
        raise PlanError(
            "data.tokenizer",
            [
                f"{job.data.tokenizer} writes the text with token {largest}, and model.vocab is {job.model.vocab} "
                f"(tokens 0 to {job.model.vocab - 1}); name the tokenizer that the model was trained with"
            ],
        )
    return prompt


def _ids_of(job: JobSpec, tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text, from a process whose time and memory are bounded. Raises PlanError, RunError."""
    with encoders(EncodingSetup(job.data, None), tokenizer, len(text)) as encoding:
        return [int(i) for i in encoding.submit([text]).result().ids]


def begun(tokenizer: Tokenizer, text: Iterable[int]) -> tuple[tuple[int, ...], int]:
    """The ids of a text that is to be gone on with, with the tokens before it that documents begin with, and how many
    of these were put there. Nothing at all is token 0."""
    ids = np.array(list(text), np.int64)
    first = missing_begin(ids, np.array(tokenizer.begin_of_text, np.int64))
    return tuple(np.concatenate((first, ids)).tolist()) or (0,), len(first)


def _of_chat(job: JobSpec, weights: str, tokenizer: Tokenizer, asked: Chat, ends: frozenset[int]) -> Prompt:
    """The tokens that ask for an answer. It ends as well before the special token that ends answers in the template."""
    answered = Chat(asked.where, (*asked.messages, {"role": ASSISTANT, "content": "."}))
    with EncodingPool(EncodingSetup(job.data, find_template(job.data, weights)), 1) as pool:
        ids = pool.submit([asked]).result().ids
        try:
            example = pool.submit([answered]).result()
        except PlanError:  # a template may want more of an answer than a text: then the files alone say where one ends
            return Prompt(tuple(map(int, ids)), len(ids), ends)
    special = {*tokenizer.special_ids().values()}
    ranges = example.answers.reshape(-1, 2)
    marks = [int(i) for begin, end in ranges for i in example.ids[begin:end] if int(i) in special]
    return Prompt(tuple(map(int, ids)), len(ids), ends | {*marks[:1]})


def _end_tokens(folders: Sequence[Path], tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that end a text: that of documents, and those that configurations beside tokenizer and weights say."""
    said = [read_config(folder, name).get("eos_token_id") for folder in folders for name in _CONFIGURATIONS]
    numbers = {number for one in said for number in (one if isinstance(one, list) else [one]) if type(number) is int}
    special = tokenizer.special_ids()
    named = {special.get(special_tokens_of(folder).get("eos_token", "")) for folder in folders}
    return frozenset(numbers | {number for number in named if number is not None} | _end_of_documents(tokenizer))


def _end_of_documents(tokenizer: Tokenizer) -> set[int]:
    """The token that documents end with, but for one that is text as well, as the line break of bytes."""
    return {*tokenizer.end_of_text} & {*tokenizer.special_ids().values()}
