"""Options of programs over transformers' Trainer for the length of a sample, under the names that people give them."""

from typing import Any

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.interchange.named_model import length_of_named
from shardwright.interchange.reading.setting_notes import taken_length
from shardwright.interchange.reading.settings import Flat, Settings

# Lengths of a text that is asked and of its answer, which programs set apart.
_PARTS_OF_LENGTH = (
    ("--source_max_len", "--target_max_len"),
    ("--max_source_length", "--max_target_length"),
    ("--max_prompt_len", "--max_ans_len"),
)
LENGTHS = (
    *("--block_size", "--max_seq_length", "--max_length", "--model_max_length", "--cutoff_len", "--max_seq_len"),
    "--seq_length",
)


def read_length(settings: Settings, fields: Flat) -> None:
    """Read how many tokens a sample has. Where several options say it otherwise, that is told."""
    tokens = settings.count(LENGTHS, 0)
    for names in _PARTS_OF_LENGTH:
        if not tokens and all(settings.has(name) for name in names):
            tokens = sum(settings.count(name, 0) for name in names)
    lengths = [name for name in LENGTHS if settings.has(name) and str(settings.given[name]) != str(tokens)]
    if lengths:  # which of them the program means can't be known
        settings.lost.append(
            say(
                "{settings}: {tokens} tokens are taken (--set model.sequence=N)",
                settings=tuple(map(settings.setting_text, lengths)),
                tokens=tokens,
            )
        )
    if tokens:
        fields["model.sequence"] = tokens
    elif length := fields.get("model.sequence") or length_of_named(fields, settings):
        settings.note(taken_length(length))


def write_length(job: JobSpec, settings: dict[str, Any]) -> None:
    """Write the length of a sample."""
    settings["--block_size"] = job.model.sequence
