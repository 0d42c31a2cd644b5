"""The prompt that a model continues, as tokens, and the tokens that end its text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwright.config.base import PlanError, error_text
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.user_file import FileFault, system_reason
from shardwright.train.data.chat_rows import ASSISTANT, Chat, question
from shardwright.train.data.encoding_pool import EncodingPool, encoders
from shardwright.train.data.encoding_process import EncodingSetup
from shardwright.train.data.template_files import find_template, folders_beside, read_config, special_tokens_of
from shardwright.train.data.tokenizer import Tokenizer, load_tokenizer, missing_begin

_CONFIGURATIONS = ("generation_config.json", "config.json")


@dataclass(frozen=True)
class Prompt:
    """The tokens with which a text begins; the first `num_hidden` of them are not shown with the generated text. The
    text ends before the first token of `ends`."""

    ids: tuple[int, ...]
    num_hidden: int
    ends: frozenset[int]


def prompt_of(job: JobSpec, weights: str, text: str, is_chat: bool) -> Prompt:
    """The tokens of a text, or of a chat whose user says the text and waits for the answer. Raises PlanError if the
    tokenizer or the chat template can't write it, or the model's vocabulary lacks its tokens.

    `weights` is the folder of the released model that the job's weights come from, empty without one. A text begins
    with the tokens with which documents begin (data.begin_token).
    """
    tokenizer = _tokenizer_of(job)
    try:
        text.encode()  # half a character can't be encoded, and each tokenizer has its own error for that
        ends = _end_tokens(list(folders_beside(job.data, weights)), tokenizer)
        if is_chat:
            prompt = _chat_prompt(job, weights, tokenizer, question(text, "--chat"), ends)
        else:
            ids, num_hidden = begun(tokenizer, _ids_of(job, tokenizer, text))
            prompt = Prompt(ids, num_hidden, ends)
    except FileFault as fault:
        raise PlanError("generate", [str(fault)]) from None
    except PlanError:
        raise
    except OSError as error:
        raise PlanError(
            "generate",
            [say("{file} can't be read: {reason}; check it", file=error.filename, reason=system_reason(error))],
        ) from None
    except ValueError as error:
        raise PlanError(
            "--prompt", [say("it can't be made tokens: {reason}; write it otherwise", reason=error_text(error))]
        ) from None
    if (largest := max(prompt.ids)) >= job.model.vocab:
        raise PlanError(
            "data.tokenizer",
            [
                say(
                    "{tokenizer} writes the text with token {largest}, and model.vocab is {vocab} (tokens 0 to "
                    "{last}); name the tokenizer that the model was trained with",
                    tokenizer=job.data.tokenizer,
                    largest=largest,
                    vocab=job.model.vocab,
                    last=job.model.vocab - 1,
                )
            ],
        )
    return prompt


def _tokenizer_of(job: JobSpec) -> Tokenizer:
    if job.model.weights and "tokenizer" not in job.data.model_fields_set:
        raise PlanError(
            "data.tokenizer",
            [
                say(
                    "{weights} has no tokenizer.json beside its weights; name their tokenizer by --set "
                    "data.tokenizer=PATH, or bytes if it is that",
                    weights=job.model.weights,
                )
            ],
        )
    return load_tokenizer(job.data)


def _ids_of(job: JobSpec, tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text, encoded in a process with limited time and memory. Raises PlanError, RunError."""
    with encoders(EncodingSetup(job.data, None), tokenizer, len(text)) as encoding:
        return [int(i) for i in encoding.submit([text]).result().ids]


def begun(tokenizer: Tokenizer, text: Iterable[int]) -> tuple[tuple[int, ...], int]:
    """The ids of a text to continue, after the tokens with which documents begin, and the number of tokens added before
    the text. An empty result becomes token 0."""
    ids = np.array(list(text), np.int64)
    first = missing_begin(ids, np.array(tokenizer.begin_of_text, np.int64))
    return tuple(np.concatenate((first, ids)).tolist()) or (0,), len(first)


def _chat_prompt(job: JobSpec, weights: str, tokenizer: Tokenizer, chat: Chat, ends: frozenset[int]) -> Prompt:
    """The tokens of a chat that waits for an answer. The text also ends before the special token that ends answers in
    the chat template."""
    answered_chat = Chat(chat.where, (*chat.messages, {"role": ASSISTANT, "content": "."}))
    with EncodingPool(EncodingSetup(job.data, find_template(job.data, weights)), 1) as pool:
        ids = pool.submit([chat]).result().ids
        try:
            example = pool.submit([answered_chat]).result()
        except PlanError:  # a template may need more than text in an answer: then only the files define the end tokens
            return Prompt(tuple(map(int, ids)), len(ids), ends)
    special_ids = {*tokenizer.special_ids().values()}
    ranges = example.answers.reshape(-1, 2)
    end_ids = [int(i) for begin, end in ranges for i in example.ids[begin:end] if int(i) in special_ids]
    return Prompt(tuple(map(int, ids)), len(ids), ends | {*end_ids[:1]})


def _end_tokens(folders: Sequence[Path], tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end a text: the end of documents, and the eos tokens of the configurations in `folders`."""
    values = [read_config(folder, name).get("eos_token_id") for folder in folders for name in _CONFIGURATIONS]
    ids = {i for value in values for i in (value if isinstance(value, list) else [value]) if type(i) is int}
    special_ids = tokenizer.special_ids()
    named_ids = {special_ids.get(special_tokens_of(folder).get("eos_token", "")) for folder in folders}
    return frozenset(ids | {i for i in named_ids if i is not None} | _end_of_documents(tokenizer))


def _end_of_documents(tokenizer: Tokenizer) -> set[int]:
    """The token that ends documents, unless it is text too, such as the line break of bytes."""
    return {*tokenizer.end_of_text} & {*tokenizer.special_ids().values()}
