"""The position of a run in its data, stored in checkpoints so that a run resumes with the next sample of each source.

A number of samples alone is not enough: a file may have grown, or sources may be mixed with other weights. So the place
identifies each source by a digest of its training tokens, and counts the samples consumed from it. A run that resumes
continues each source after its last sample. Other data are refused, unless data.begin_new is set.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np

from shardwright.config import largest
from shardwright.config.base import PlanError, printable, shortened
from shardwright.config.job import JobSpec
from shardwright.config.phrase import each, say
from shardwright.train.checkpoint.manifest import MOST_PATH, DataPlace, SourcePlace
from shardwright.train.data.mixed_samples import MixedSamples, Mixture, whole_weights
from shardwright.train.data.prepared_tokens import MixedTokens, TokenFiles
from shardwright.train.data.token_stream import TokenStream

# The digest covers all tokens if there are at most _WHOLE_TOKENS of them, else evenly spread blocks.
_WHOLE_TOKENS = 1 << 22
_NUM_BLOCKS, _BLOCK_TOKENS = 1 << 10, 1 << 10


def data_digest(tokens: TokenFiles) -> str:
    """A digest of the training tokens, 32 characters: of their number and ids, and for chats, which are packed by their
    lengths, of their bounds. It does not depend on paths. In more than four million tokens it may miss a change that
    keeps their number."""
    stream = TokenStream(tokens.train, marks=tokens.packed)
    bounds = stream.documents() if tokens.packed else np.empty(0, np.int64)
    digest = blake2b(f"{len(stream)} {len(bounds)} ".encode(), digest_size=16)
    digest.update(bounds.astype("<i8").tobytes())
    plain = TokenStream(tokens.train)
    for start, stop in _blocks(len(plain)):
        row = np.empty(stop - start, np.int64)
        plain.read(start, row)
        digest.update(row.astype("<u4").tobytes())
    return digest.hexdigest()


def _blocks(num_tokens: int) -> list[tuple[int, int]]:
    """The ranges of tokens that a digest covers: start and stop."""
    if num_tokens <= _WHOLE_TOKENS:
        size = _NUM_BLOCKS * _BLOCK_TOKENS
        return [(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]
    last_start = num_tokens - _BLOCK_TOKENS
    starts = [last_start * block // (_NUM_BLOCKS - 1) for block in range(_NUM_BLOCKS)]
    return [(start, start + _BLOCK_TOKENS) for start in starts]


@dataclass(frozen=True)
class PlaceInData:
    """The sources of a run, mixed with these weights since sample number `begun` of the run. `firsts` are the samples
    consumed from each source before that, and `others` are sources used only before that. `seed` is the run's."""

    sources: tuple[TokenFiles, ...]
    names: tuple[str, ...]
    weights: tuple[float, ...]
    digests: tuple[str, ...]
    seed: int
    firsts: tuple[int, ...]
    begun: int = 0
    others: tuple[SourcePlace, ...] = ()

    @classmethod
    def at_beginning(cls, tokens: TokenFiles | MixedTokens, job: JobSpec) -> "PlaceInData":
        """The place before the first sample of a run."""
        sources = tokens.sources if isinstance(tokens, MixedTokens) else (tokens,)
        weights = tokens.weights if isinstance(tokens, MixedTokens) else (1.0,)
        names = tuple(data.path for data in job.data.each)
        digests = tuple(map(data_digest, sources))
        return cls(sources, names, weights, digests, job.run.seed, firsts=(0,) * len(sources))

    @cached_property
    def _mixture(self) -> Mixture:
        return Mixture(self.weights)

    def train_samples(self) -> MixedSamples:
        """The samples of the run by their number in the run, from `begun` on."""
        readers = [source.train_samples() for source in self.sources]
        return MixedSamples(readers, self.weights, self.begun, self.firsts)

    def had(self, samples: int) -> list[int]:
        """The number of samples of each source among the first `samples` of the run; `samples` is at least `begun`."""
        shares = self._mixture.shares(samples - self.begun)
        return [first + share for first, share in zip(self.firsts, shares, strict=True)]

    def to_store(self, samples: int) -> DataPlace:
        """The place after `samples` samples, in the form stored in a checkpoint."""
        had = self.had(samples)
        rows = zip(self.names, self.digests, self.sources, self.weights, self.firsts, had, strict=True)
        places = [
            SourcePlace(
                path=name[:MOST_PATH],
                digest=digest,
                num_tokens=source.num_train_tokens,
                weight=weight,
                seed=source.seed,
                first=first,
                had=num_had,
            )
            for name, digest, source, weight, first, num_had in rows
        ]
        return DataPlace(begun=self.begun, seed=self.seed, sources=(*places, *self.others))

    def described(self, num_samples: int) -> list[str]:
        """Lines that describe the data for a run of `num_samples` samples. With several sources they tell the share and
        the epochs of each."""
        if len(self.sources) == 1:
            return self.sources[0].described(num_samples)
        lines, parts = list[str](), whole_weights(self.weights)
        had = self.had(max(num_samples, self.begun))
        for name, part, number, source in zip(self.names, parts, had, self.sources, strict=True):
            epoch = len(source.train_samples())
            lines.append(
                say(
                    "{share:.2%} of the samples from {name}: {number:,} in this run, of {epoch:,} ({epochs:.2f} "
                    "epochs)",
                    share=part / sum(parts),
                    name=name,
                    number=number,
                    epoch=epoch,
                    epochs=number / epoch,
                )
            )
            lines += source.described(number)
        return lines


@dataclass(frozen=True)
class StoredPlace:
    """A place in the data read from a checkpoint: the checkpoint's name and job, the number of samples consumed, and
    the place of each source; `data` is None in checkpoints of earlier versions."""

    checkpoint: str
    job: dict[str, Any]
    samples: int
    data: DataPlace | None


def taken_up(stored: StoredPlace, current: PlaceInData, job: JobSpec) -> tuple[PlaceInData, list[str]]:
    """The place of a run that resumes from a checkpoint with `current` data, and lines for the user. Raises PlanError
    if these are other data and data.begin_new is not set."""
    if stored.data is None:
        return _from_old_version(stored, current, job)
    unmatched = list(stored.data.sources)
    matches: list[SourcePlace | None] = []
    for digest in current.digests:
        match = next((source for source in unmatched if source.digest == digest), None)
        matches.append(match)
        if match is not None:
            unmatched.remove(match)
    if None in matches and not job.data.begin_new:
        raise PlanError(
            say("checkpoint {name}", name=str(stored.checkpoint)),
            [_other_data(stored, current, job, matches, unmatched)],
        )
    # A source's seed depends on its number among the sources, which may have changed: keep the order of its samples.
    is_same_seed = stored.data.seed == current.seed
    sources = tuple(
        replace(source, seed=match.seed) if match is not None and is_same_seed else source
        for source, match in zip(current.sources, matches, strict=True)
    )
    mixed_before = [source for source in stored.data.sources if source.weight]
    if matches == mixed_before and whole_weights([m.weight for m in mixed_before]) == whole_weights(current.weights):
        firsts = tuple(source.first for source in mixed_before)
        others = tuple(source for source in unmatched if not source.weight)
        return replace(current, sources=sources, firsts=firsts, begun=stored.data.begun, others=others), []
    firsts = tuple(0 if match is None else match.had for match in matches)
    others = tuple(
        source.model_copy(update={"weight": 0.0, "first": source.had}) for source in unmatched[: largest.SOURCES]
    )
    place = replace(current, sources=sources, firsts=firsts, begun=stored.samples, others=others)
    return place, _change_lines(place, matches, [source for source in unmatched if source.weight])


def _change_lines(
    place: PlaceInData, matches: Sequence[SourcePlace | None], dropped: Sequence[SourcePlace]
) -> list[str]:
    """Lines that tell how a run continues with each source if sources or weights have changed."""
    lines: list[str] = []
    for name, match in zip(place.names, matches, strict=True):
        if match is None:
            lines.append(
                say(
                    "note: {name} begins at its first sample from here on (data.begin_new); what was held out of "
                    "other data may be in it",
                    name=name,
                )
            )
        else:
            lines.append(
                say(
                    "note: {name} goes on behind the {had:,} of its samples that the run has had",
                    name=name,
                    had=match.had,
                )
            )
    if None not in matches:
        lines.append(
            say("note: data.sources are mixed otherwise from here on: no sample of theirs is skipped or comes again")
        )
    for source in dropped:
        is_same_name = _name(source) in place.names
        name = say("what {name} was before", name=_name(source)) if is_same_name else _name(source)
        lines.append(
            say("note: {name} is left out from here on, behind {had:,} of its samples", name=name, had=source.had)
        )
    return lines


def _other_data(
    stored: StoredPlace,
    current: PlaceInData,
    job: JobSpec,
    matches: Sequence[SourcePlace | None],
    unmatched: Sequence[SourcePlace],
) -> str:
    """The fault of data that differ from the checkpoint's: the differences, and the ways out."""
    differences: list[str] = []
    for name, source, match in zip(current.names, current.sources, matches, strict=True):
        if match is not None:
            continue
        number = source.num_train_tokens
        only = unmatched[0] if len(unmatched) == len(matches) == 1 else None
        previous = next((old_source for old_source in unmatched if old_source.path == name), only)
        if previous is None:
            differences.append(say("{name} is new, with {number:,} tokens to train on", name=name, number=number))
        elif previous.num_tokens != number:
            differences.append(
                say(
                    "{previous} had {num_tokens:,} tokens to train on, and {name} has {number:,}",
                    previous=_name(previous),
                    num_tokens=previous.num_tokens,
                    name=name,
                    number=number,
                )
            )
        else:
            differences.append(
                say(
                    "{name} has {number:,} tokens to train on, as many as before, and they are others",
                    name=name,
                    number=number,
                )
            )
    fields = stored.job.get("data", {})
    current_fields = job.data.model_dump(mode="json")
    changed_fields = [
        say("data.{name} was {old} and is {new}", name=name, old=_text(fields[name]), new=_text(value))
        for name, value in current_fields.items()
        if name in _TOKEN_FIELDS and name in fields and fields[name] != value
    ]
    what_differs = each([*differences, *changed_fields])
    return say(
        "it stands behind {samples:,} samples of other data than these: {what_differs}. So its samples would come in "
        "another order, some again, and what was held out could be trained on. Give the data of before; or --set "
        "data.begin_new=true, which goes on with its weights and its optimizer and begins what is new at its first "
        "sample; or begin anew with --fresh, or in another run.folder",
        samples=stored.samples,
        what_differs=what_differs,
    )


# Fields of `data` that decide the tokens of the training side.
_TOKEN_FIELDS = (
    "path",
    "format",
    "split",
    "text_field",
    "chats",
    "token_dtype",
    "end_of_document",
    "tokenizer",
    "begin_token",
    "chat_template",
    "today",
    "validation_share",
)


def _from_old_version(stored: StoredPlace, current: PlaceInData, job: JobSpec) -> tuple[PlaceInData, list[str]]:
    """The place of a run that resumes from a checkpoint of an earlier version, which has a number of samples alone."""
    if job.data.begin_new:
        return replace(current, begun=stored.samples), [
            say("note: the data begin at their first sample from here on (data.begin_new)")
        ]
    note = say(
        "note: the checkpoint, of an earlier version, does not say of which data it is: these are taken for the same"
    )
    sources = stored.job.get("data", {}).get("sources") or ()
    weights = [source.get("weight", 1.0) for source in sources if isinstance(source, dict)]
    is_known = len(weights) == len(current.weights) and all(isinstance(w, int | float) and w > 0 for w in weights)
    if not is_known or whole_weights(weights) == whole_weights(current.weights):
        return current, [note]
    firsts = tuple(replace(current, weights=tuple(weights)).had(stored.samples))
    place = replace(current, firsts=firsts, begun=stored.samples)
    source_notes = [
        say(
            "note: {name} goes on behind the {first:,} of its samples that the run has had; none is skipped or comes "
            "again",
            name=name,
            first=first,
        )
        for name, first in zip(current.names, firsts, strict=True)
    ]
    return place, [note, *source_notes]


def _name(source: SourcePlace) -> str:
    return shortened(printable(source.path), 200)


def _text(value: Any) -> str:
    return shortened(printable(repr(value)), 100)
