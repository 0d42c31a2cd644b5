"""Prepared data: the tokens of one source, or of several that are mixed."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardwright.config.phrase import say
from shardwright.config.units import counted_phrase
from shardwright.train.data.mixed_samples import MixedSamples
from shardwright.train.data.once_each import InTurn
from shardwright.train.data.packed_samples import PackedSamples
from shardwright.train.data.samples import SampleReader, Samples, token_shares
from shardwright.train.data.token_stream import TokenSpan

_MANY_PASSES = 20  # over data, of a run that is told of it


@dataclass(frozen=True)
class TokenFiles:
    """Prepared data of one source: two streams of token ids, and facts about them.

    `train` and `validation` are spans that are read one after the other; `validation` is None if nothing is held out.
    `split` tells what is held out: documents, or the tail of the stream. A token file counts as one document, unless
    data.end_of_document or an index separates its documents. `unigram_entropy` is of all tokens, in nats per token.
    `seed` decides the order of samples, but not which tokens are held out. With `separate_documents`, samples mark
    where documents begin. If `packed`, documents are chats, each complete within a sample. `notes` tell which data are
    not read or not learned.
    """

    train: tuple[TokenSpan, ...]
    validation: tuple[TokenSpan, ...] | None
    split: Literal["none", "documents", "tail"]
    num_documents: int
    num_train_tokens: int
    num_validation_tokens: int
    largest_id: int
    unigram_entropy: float
    sequence: int
    seed: int
    separate_documents: bool = False
    dropped_share: float = 0.0  # the share of the text's characters without a token
    packed: bool = False
    notes: tuple[str, ...] = ()

    def train_samples(self) -> SampleReader:
        """Training samples, shuffled again in every epoch."""
        return self._samples(self.train, shuffle=True)

    def validation_samples(self) -> SampleReader | None:
        """Held-out samples in file order; None if nothing is held out."""
        return self._samples(self.validation, shuffle=False) if self.validation else None

    def in_file_order(self) -> SampleReader:
        """The samples of the training side in file order, for a set of data.validation."""
        return self._samples(self.train, shuffle=False)

    def token_shares(self, vocab: int) -> NDArray[np.float64]:
        """The share of each id among the tokens to train on: [vocab] (samples.py)."""
        return token_shares(self.train, vocab)

    def described(self, num_samples: int) -> list[str]:
        """Lines that describe these data for a run of `num_samples` samples."""
        return [*self.notes, *self._packing_note(), *self._passes_note(num_samples)]

    def _samples(self, spans: tuple[TokenSpan, ...], shuffle: bool) -> SampleReader:
        if self.packed:
            return PackedSamples(spans, self.sequence, self.seed, shuffle=shuffle)
        return Samples(spans, self.sequence, self.seed, shuffle=shuffle, marks=self.separate_documents)

    def _passes_note(self, num_samples: int) -> list[str]:
        """A line on a run that goes over the data very often."""
        passes = num_samples / max(1, len(self.train_samples()))
        if passes < _MANY_PASSES:
            return []
        return [
            say(
                "note: the run goes over these data {passes:,.0f} times, and may learn them by heart; "
                "optimizer.steps says how long it is",
                passes=passes,
            )
        ]

    def _packing_note(self) -> list[str]:
        if not self.packed:
            return []
        samples = PackedSamples(self.train, self.sequence, self.seed)
        packing = samples.packing
        room, num_packed = len(packing) * (self.sequence + 1), self.num_train_tokens - packing.cut_tokens
        values = {
            "chats": counted_phrase(len(packing.order), "chat"),
            "sequences": counted_phrase(len(packing), "sequence"),
            "share": num_packed / room,
        }
        lines: list[str] = [
            say("{chats} to train on is packed into {sequences}, which it fills to {share:.1%}", **values)
            if len(packing.order) == 1
            else say("{chats} to train on are packed into {sequences}, which they fill to {share:.1%}", **values)
        ]
        if packing.num_cut:
            lines.append(
                say(
                    "{num_cut:,} of these are longer than model.sequence {sequence} + 1 and cut at their ends, by "
                    "{cut_tokens:,} of {num_train_tokens:,} tokens in all",
                    num_cut=packing.num_cut,
                    sequence=self.sequence,
                    cut_tokens=packing.cut_tokens,
                    num_train_tokens=self.num_train_tokens,
                )
            )
        if samples.num_unlearned:
            lines.append(
                say(
                    "nothing is learned of {num_unlearned:,} of these: no answer is left of them",
                    num_unlearned=samples.num_unlearned,
                )
            )
        return lines


@dataclass(frozen=True)
class MixedTokens:
    """Prepared data of several sources, with their names and weights."""

    sources: tuple[TokenFiles, ...]
    names: tuple[str, ...]
    weights: tuple[float, ...]

    @property
    def num_documents(self) -> int:
        """Documents of all sources."""
        return sum(source.num_documents for source in self.sources)

    @property
    def num_train_tokens(self) -> int:
        """Tokens to train on, of all sources."""
        return sum(source.num_train_tokens for source in self.sources)

    @property
    def num_validation_tokens(self) -> int:
        """Tokens that are held out, of all sources."""
        return sum(source.num_validation_tokens for source in self.sources)

    @property
    def largest_id(self) -> int:
        """The largest id of any source."""
        return max(source.largest_id for source in self.sources)

    @property
    def separate_documents(self) -> bool:
        """True if samples mark where documents begin."""
        return self.sources[0].separate_documents

    @property
    def dropped_share(self) -> float:
        """The largest share of a source's characters for which the tokenizer has no token."""
        return max(source.dropped_share for source in self.sources)

    def train_samples(self) -> MixedSamples:
        """Training samples; the samples of each source are shuffled again in each of its epochs."""
        return MixedSamples([source.train_samples() for source in self.sources], self.weights)

    def validation_samples(self) -> InTurn | None:
        """Held-out samples of all sources, each once; None if a source holds nothing out."""
        readers = [reader for source in self.sources if (reader := source.validation_samples()) is not None]
        return InTurn(readers, self.weights) if len(readers) == len(self.sources) else None

    def token_shares(self, vocab: int) -> NDArray[np.float64]:
        """The share of each id among the tokens to train on, with the weights of the sources: [vocab]."""
        shares = np.array(self.weights) / sum(self.weights)
        parts = [share * source.token_shares(vocab) for source, share in zip(self.sources, shares, strict=True)]
        return np.sum(parts, axis=0)
