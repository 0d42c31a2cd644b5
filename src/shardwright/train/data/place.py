"""Where a run stands in its data, and of which data that is.

A number of samples alone says nothing of a file that grew, or of sources that are mixed by other weights. So the place
names each source by a digest of the tokens to train on, and says how many of its samples were had. A run that goes on
takes them up where each stands; other data are refused, unless data.begin_new says that they begin.
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
from shardwright.train.checkpoint.manifest import MOST_PATH, DataPlace, SourcePlace
from shardwright.train.data.mixed_samples import MixedSamples, Mixture, whole_weights
from shardwright.train.data.prepared_tokens import MixedTokens, TokenFiles
from shardwright.train.data.token_stream import TokenStream

# Tokens of which the digest is whole; of more, so many blocks of so many tokens, evenly spread, are in it.
_WHOLE_TOKENS = 1 << 22
_NUM_BLOCKS, _BLOCK_TOKENS = 1 << 10, 1 << 10


def data_digest(tokens: TokenFiles) -> str:
    """32 characters that tell apart what is trained on: how many tokens there are, and which; of chats, which are
    packed by their lengths, also where each begins. The same wherever the files lie. A change within a file of more
    than four million tokens that leaves their number may be overlooked."""
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
    """From where to where tokens are read for a digest."""
    if num_tokens <= _WHOLE_TOKENS:
        size = _NUM_BLOCKS * _BLOCK_TOKENS
        return [(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]
    last = num_tokens - _BLOCK_TOKENS
    starts = [last * block // (_NUM_BLOCKS - 1) for block in range(_NUM_BLOCKS)]
    return [(start, start + _BLOCK_TOKENS) for start in starts]


@dataclass(frozen=True)
class PlaceInData:
    """The sources of a run, and from where on these are mixed as they are: sample number `begun` of the run, before
    which so many of each source were had, `firsts`. `others` were sources before that. `seed` is that of the run."""

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
        """Before the first sample."""
        sources = tokens.sources if isinstance(tokens, MixedTokens) else (tokens,)
        weights = tokens.weights if isinstance(tokens, MixedTokens) else (1.0,)
        names = tuple(data.path for data in job.data.each)
        digests = tuple(map(data_digest, sources))
        return cls(sources, names, weights, digests, job.run.seed, firsts=(0,) * len(sources))

    @cached_property
    def _mixture(self) -> Mixture:
        return Mixture(self.weights)

    def train_samples(self) -> MixedSamples:
        """The run's samples, by their number in it, from `begun` on."""
        readers = [source.train_samples() for source in self.sources]
        return MixedSamples(readers, self.weights, self.begun, self.firsts)

    def had(self, samples: int) -> list[int]:
        """How many samples of each source are among the first so many of the run, `begun` at least."""
        shares = self._mixture.shares(samples - self.begun)
        return [first + share for first, share in zip(self.firsts, shares, strict=True)]

    def to_store(self, samples: int) -> DataPlace:
        """The fields of the place for a checkpoint, behind so many samples."""
        rows = zip(
            self.names, self.digests, self.sources, self.weights, self.firsts, self.had(samples), strict=True
        )  # fmt: skip
        places = [
            SourcePlace(
                path=name[:MOST_PATH], digest=digest, num_tokens=source.num_train_tokens, weight=weight,
                seed=source.seed, first=first, had=had,
            )
            for name, digest, source, weight, first, had in rows
        ]  # fmt: skip
        return DataPlace(begun=self.begun, seed=self.seed, sources=(*places, *self.others))

    def described(self, num_samples: int) -> list[str]:
        """The facts of the data for a run of so many samples: for several sources the share of each, and the number of
        passes through it."""
        if len(self.sources) == 1:
            return self.sources[0].described(num_samples)
        lines, whole = [], whole_weights(self.weights)
        had = self.had(max(num_samples, self.begun))
        for name, part, number, source in zip(self.names, whole, had, self.sources, strict=True):
            epoch = len(source.train_samples())
            lines.append(
                f"{part / sum(whole):.2%} of the samples from {name}: {number:,} in this run, of {epoch:,} "
                f"({number / epoch:.2f} epochs)"
            )
            lines += source.described(number)
        return lines


@dataclass(frozen=True)
class StoredPlace:
    """A place in the data, as a checkpoint has it: its name, its job, the samples that were read, and of which data;
    None if its version did not say that."""

    checkpoint: str
    job: dict[str, Any]
    samples: int
    data: DataPlace | None


def taken_up(stored: StoredPlace, now: PlaceInData, job: JobSpec) -> tuple[PlaceInData, list[str]]:
    """The place of a run that goes on from a checkpoint with the data that it has `now`, and lines for the user.
    Raises PlanError where these are other data, and nobody says that they begin."""
    if stored.data is None:
        return _of_old_version(stored, now, job)
    left = list(stored.data.sources)
    matches: list[SourcePlace | None] = []
    for digest in now.digests:
        match = next((source for source in left if source.digest == digest), None)
        matches.append(match)
        if match is not None:
            left.remove(match)
    if not (None not in matches or job.data.begin_new):
        raise PlanError(f"checkpoint {stored.checkpoint}", [_other_data(stored, now, job, matches, left)])
    # Where a source's samples are drawn by its number among others, that is another now: its own order stays.
    is_same_seed = stored.data.seed == now.seed
    sources = tuple(
        replace(source, seed=match.seed) if match is not None and is_same_seed else source
        for source, match in zip(now.sources, matches, strict=True)
    )
    mixed_before = [source for source in stored.data.sources if source.weight]
    if matches == mixed_before and whole_weights([m.weight for m in mixed_before]) == whole_weights(now.weights):
        firsts = tuple(source.first for source in mixed_before)
        others = tuple(source for source in left if not source.weight)
        return replace(now, sources=sources, firsts=firsts, begun=stored.data.begun, others=others), []
    firsts = tuple(0 if match is None else match.had for match in matches)
    others = tuple(source.model_copy(update={"weight": 0.0, "first": source.had}) for source in left[: largest.SOURCES])
    place = replace(now, sources=sources, firsts=firsts, begun=stored.samples, others=others)
    return place, _change_lines(place, matches, [source for source in left if source.weight])


def _change_lines(place: PlaceInData, matches: Sequence[SourcePlace | None], left: Sequence[SourcePlace]) -> list[str]:
    """How a run goes on with each source where not all is as it was."""
    lines = []
    for name, match in zip(place.names, matches, strict=True):
        if match is None:
            lines.append(
                f"note: {name} begins at its first sample from here on (data.begin_new); what was held out of other "
                "data may be in it"
            )
        else:
            lines.append(f"note: {name} goes on behind the {match.had:,} of its samples that the run has had")
    if None not in matches:
        lines.append(
            "note: data.sources are mixed otherwise from here on: no sample of theirs is skipped or comes again"
        )
    for source in left:
        is_same_name = _name(source) in place.names
        name = f"what {_name(source)} was before" if is_same_name else _name(source)
        lines.append(f"note: {name} is left out from here on, behind {source.had:,} of its samples")
    return lines


def _other_data(
    stored: StoredPlace, now: PlaceInData, job: JobSpec, matches: Sequence[SourcePlace | None],
    left: Sequence[SourcePlace],
) -> str:  # fmt: skip
    """The fault: what is another, and the ways out."""
    parts = []
    for name, source, match in zip(now.names, now.sources, matches, strict=True):
        if match is not None:
            continue
        number = source.num_train_tokens
        before = next((one for one in left if one.path == name), left[0] if len(left) == len(matches) == 1 else None)
        if before is None:
            parts.append(f"{name} is new, with {number:,} tokens to train on")
        elif before.num_tokens != number:
            parts.append(f"{_name(before)} had {before.num_tokens:,} tokens to train on, and {name} has {number:,}")
        else:
            parts.append(f"{name} has {number:,} tokens to train on, as many as before, and they are others")
    fields = stored.job.get("data", {})
    now_fields = job.data.model_dump(mode="json")
    asked = [
        f"data.{name} was {_text(fields[name])} and is {_text(value)}"
        for name, value in now_fields.items()
        if name in _SAYS_WHICH_TOKENS and name in fields and fields[name] != value
    ]
    return (
        f"it stands behind {stored.samples:,} samples of other data than these: {'; '.join([*parts, *asked])}. So its "
        "samples would come in another order, some again, and what was held out could be trained on. Give the data of "
        "before; or --set data.begin_new=true, which goes on with its weights and its optimizer and begins what is new "
        "at its first sample; or begin anew with --fresh, or in another run.folder"
    )


# Fields of the data that decide which tokens there are on the training side.
_SAYS_WHICH_TOKENS = (
    "path", "format", "split", "text_field", "chats", "token_dtype", "end_of_document", "tokenizer", "begin_token",
    "chat_template", "today", "validation_share",
)  # fmt: skip


def _of_old_version(stored: StoredPlace, now: PlaceInData, job: JobSpec) -> tuple[PlaceInData, list[str]]:
    """The place where a checkpoint says how many samples were had, and not of which data."""
    if job.data.begin_new:
        return replace(now, begun=stored.samples), [
            "note: the data begin at their first sample from here on (data.begin_new)"
        ]
    told = "note: the checkpoint, of an earlier version, does not say of which data it is: these are taken for the same"
    sources = stored.job.get("data", {}).get("sources") or ()
    weights = [source.get("weight", 1.0) for source in sources if isinstance(source, dict)]
    is_known = len(weights) == len(now.weights) and all(isinstance(w, int | float) and w > 0 for w in weights)
    if not is_known or whole_weights(weights) == whole_weights(now.weights):
        return now, [told]
    firsts = tuple(replace(now, weights=tuple(weights)).had(stored.samples))
    place = replace(now, firsts=firsts, begun=stored.samples)
    goes_on = [
        f"note: {name} goes on behind the {first:,} of its samples that the run has had; none is skipped or comes again"
        for name, first in zip(now.names, firsts, strict=True)
    ]
    return place, [told, *goes_on]


def _name(source: SourcePlace) -> str:
    return shortened(printable(source.path), 200)


def _text(value: Any) -> str:
    return shortened(printable(repr(value)), 100)
