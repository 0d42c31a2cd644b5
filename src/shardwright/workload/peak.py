"""The most bytes of activations that a pipeline rank holds at once, from its list of actions.

A microbatch in a stage holds what its layers keep from F to the end of B. Where the backward is split, inputs and
output gradients of the products stay from I to W. While a backward runs, the layer whose turn it is has what it makes
again, and the layers after it have let go what they kept.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from shardwright.schedule.action import Action, Kind
from shardwright.schedule.schedule import Program
from shardwright.spec.recompute import Policy
from shardwright.workload.activations import Layer

Counts = tuple[tuple[int, int], ...]  # (stage, microbatches), ascending


@dataclass(frozen=True)
class Moment:
    """What is alive at one moment: microbatches by stage whose layers hold what they kept, and those that only wait for
    their weight gradients; and the stage whose backward runs, if one does. That microbatch is not among the others."""

    kept: Counts
    deferred: Counts
    in_backward: int | None = None
    is_split: bool = False

    @property
    def microbatches(self) -> dict[int, int]:
        """Microbatches by stage, in whatever state."""
        found = Counter(dict(self.kept)) + Counter(dict(self.deferred))
        if self.in_backward is not None:
            found[self.in_backward] += 1
        return dict(found)


def moments(program: Program, rank: int) -> frozenset[Moment]:
    """The distinct moments of a rank's list that may be its peak."""
    kept: Counter[int] = Counter()
    deferred: Counter[int] = Counter()
    found: set[Moment] = set()

    def note(in_backward: int | None = None, is_split: bool = False) -> None:
        found.add(Moment(_counts(kept), _counts(deferred), in_backward, is_split))

    def begin(part: Action) -> None:
        again = part.kind is Kind.RECOMPUTE
        if again or (part.kind is Kind.FORWARD and (part.stage, part.microbatch) not in program.recomputed):
            kept[part.stage] += 1

    for action in program.ranks[rank] if program.trains else ():
        parts = action.computes()
        for part in parts:  # both parts of a pair are alive at once: what begins comes before what ends
            begin(part)
        if parts:
            note()
        for part in parts:
            split = (part.stage, part.microbatch) in program.split_backwards
            if part.kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
                kept[part.stage] -= 1
                note(part.stage, split)
                deferred[part.stage] += split
            elif part.kind is Kind.WEIGHT_GRAD:
                deferred[part.stage] -= 1
    return frozenset(found)


def _counts(counter: Counter[int]) -> Counts:
    return tuple(sorted((stage, count) for stage, count in counter.items() if count))


@dataclass(frozen=True)
class LayerMemory:
    """Bytes that a microbatch holds in a layer: from F to B; besides, in its turn of the backward; from I to W."""

    policy: Policy
    kept_bytes: int
    again_bytes: int
    deferred_bytes: int

    @classmethod
    def of(cls, layer: Layer, policy: Policy) -> "LayerMemory":
        """That of a layer with a policy."""
        return cls(policy, layer.kept_bytes(policy), layer.again_bytes(policy), layer.deferred_bytes())


@dataclass(frozen=True)
class StageMemory:
    """What one microbatch holds in a stage: in its layers, first to last, and in what stands before and after them."""

    layers: tuple[LayerMemory, ...]
    embedding_bytes: int = 0
    head_bytes: int = 0
    head_deferred_bytes: int = 0

    @cached_property
    def kept_bytes(self) -> int:
        """From F to B."""
        return self.embedding_bytes + sum(layer.kept_bytes for layer in self.layers) + self.head_bytes

    @cached_property
    def deferred_bytes(self) -> int:
        """From I to W."""
        return sum(layer.deferred_bytes for layer in self.layers) + self.head_deferred_bytes

    def backward_bytes(self, is_split: bool) -> int:
        """The most at once while its backward runs, which goes from the head to the embedding."""
        most = self.kept_bytes
        held = most - self.head_bytes
        waiting = self.head_deferred_bytes if is_split else 0
        for layer in reversed(self.layers):
            waiting += layer.deferred_bytes if is_split else 0
            most = max(most, held + layer.again_bytes + waiting)
            held -= layer.kept_bytes
        return most


def bytes_at(moment: Moment, stages: Mapping[int, StageMemory]) -> int:
    """Bytes of activations at a moment."""
    total = sum(count * stages[stage].kept_bytes for stage, count in moment.kept)
    total += sum(count * stages[stage].deferred_bytes for stage, count in moment.deferred)
    if moment.in_backward is not None:
        total += stages[moment.in_backward].backward_bytes(moment.is_split)
    return total


def peak(of: Iterable[Moment], stages: Mapping[int, StageMemory]) -> tuple[int, Moment]:
    """The most bytes, and a moment when that is so."""
    return max(((bytes_at(moment, stages), moment) for moment in of), key=lambda entry: (entry[0], str(entry[1])))
