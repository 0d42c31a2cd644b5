"""The most bytes of activations that a pipeline rank holds at once, from its list of actions.

A microbatch in a stage holds what its layers keep from F to the end of B. Where the backward is split, inputs and
output gradients of the products stay from I to W. While a backward runs, the layer whose turn it is has what it makes
again, and the layers after it have let go what they kept.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import ge

from shardwright.account.activations import (
    documents_kept,
    embedding_kept,
    head_kept,
    head_working_bytes,
    layer_of,
)
from shardwright.account.further_tokens import further_layers
from shardwright.account.kept_tensors import Bytes, Share
from shardwright.account.layer_memory import LayerMemory
from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.plan import layer_policies
from shardwright.config.recompute_policy import LAYER, Policy
from shardwright.schedule.action import Action, Kind
from shardwright.schedule.schedule import Program

Counts = tuple[tuple[int, int], ...]  # (stage, microbatches), ascending
Passes = frozenset[tuple[int, int]]  # (stage, microbatch)


@dataclass(frozen=True)
class Moment:
    """The microbatches alive at one moment, by stage: `kept` hold what their layers keep, `deferred` only wait for
    their weight gradients, and of `inputs` only the stage's input is there; and the stage whose backward runs, if one
    does. That microbatch is not among the others."""

    kept: Counts
    deferred: Counts
    inputs: Counts = ()
    in_backward: int | None = None
    is_split: bool = False

    @property
    def microbatches(self) -> dict[int, int]:
        """Microbatches by stage, in whatever state."""
        alive = Counter(dict(self.kept)) + Counter(dict(self.deferred))
        if self.in_backward is not None:
            alive[self.in_backward] += 1
        return dict(alive)


def moments(program: Program, rank: int) -> frozenset[Moment]:
    """The distinct moments of a rank's list that may be its peak, whatever a microbatch holds in each stage."""
    if not program.trains:
        return frozenset()
    stages = program.placement.stages_of(rank)
    return _moments(program.ranks[rank], stages, program.recomputed, program.split_backwards)


@lru_cache(maxsize=128)  # plans that differ in sizes alone have the same lists
def _moments(row: tuple[Action, ...], stages: tuple[int, ...], recomputed: Passes, split: Passes) -> frozenset[Moment]:
    place_of = {stage: place for place, stage in enumerate(stages)}
    kept, deferred, inputs = ([0] * len(stages) for _ in range(3))
    # Of thousands of moments few are distinct: only of these the counts are told by stage. By the stage in backward.
    counted: dict[tuple[int | None, bool], set[tuple[int, ...]]] = defaultdict(set)

    def note(in_backward: int | None = None, is_split: bool = False) -> None:
        counted[in_backward, is_split].add((*kept, *deferred, *inputs))

    def begin(part: Action) -> None:
        is_recomputed, place = (part.stage, part.microbatch) in recomputed, place_of[part.stage]
        if part.kind is Kind.FORWARD and is_recomputed:
            inputs[place] += 1
        elif part.kind is Kind.RECOMPUTE:
            inputs[place] -= 1
        if part.kind is Kind.RECOMPUTE or (part.kind is Kind.FORWARD and not is_recomputed):
            kept[place] += 1

    for action in row:
        parts = action.computes()
        for part in parts:  # both parts of a pair are alive at once: what begins comes before what ends
            begin(part)
        if parts:
            note()
        for part in parts:
            is_split, place = (part.stage, part.microbatch) in split, place_of[part.stage]
            if part.kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
                kept[place] -= 1
                note(part.stage, is_split)
                deferred[place] += is_split
            elif part.kind is Kind.WEIGHT_GRAD:
                deferred[place] -= 1

    def moment(numbers: tuple[int, ...], in_backward: int | None, is_split: bool) -> Moment:
        num = len(stages)
        of_kind = (numbers[first : first + num] for first in range(0, 3 * num, num))
        kept, deferred, inputs = (tuple((s, n) for s, n in zip(stages, counts, strict=True) if n) for counts in of_kind)
        return Moment(kept, deferred, inputs, in_backward=in_backward, is_split=is_split)

    return frozenset(moment(numbers, *when) for when, seen in counted.items() for numbers in _highest(seen))


def _highest(counts: Collection[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The tuples, all equally long, that no other one exceeds or equals at each place."""
    highest: list[tuple[int, ...]] = []
    for one in sorted(counts, key=lambda numbers: (sum(numbers), numbers), reverse=True):
        if not any(all(map(ge, other, one)) for other in highest):
            highest.append(one)
    return highest


@dataclass(frozen=True)
class StageMemory:
    """The memory of one microbatch in a stage: in its layers, first to last, then in the modules of further tokens, and
    in what stands before and after all of these."""

    layers: tuple[LayerMemory, ...]
    input_bytes: int = 0
    documents_bytes: int = 0
    embedding_bytes: int = 0
    head_bytes: int = 0
    head_working_bytes: int = 0

    @cached_property
    def kept_bytes(self) -> Bytes:
        """From F to B."""
        of_layers = sum(layer.kept_bytes for layer in self.layers)
        return self.documents_bytes + self.embedding_bytes + of_layers + self.head_bytes

    @cached_property
    def deferred_bytes(self) -> Bytes:
        """From I to W."""
        return sum(layer.deferred_bytes for layer in self.layers)

    def backward_bytes(self, is_split: bool) -> Bytes:
        """The most at once while its backward runs, which goes from the head to the embedding."""
        return self._split_bytes if is_split else self._whole_bytes

    @cached_property
    def _whole_bytes(self) -> Bytes:
        return self._backward_bytes(is_split=False)

    @cached_property
    def _split_bytes(self) -> Bytes:
        return self._backward_bytes(is_split=True)

    def _backward_bytes(self, is_split: bool) -> Bytes:
        held = self.kept_bytes - self.head_bytes
        most = self.kept_bytes + self.head_working_bytes
        waiting: Bytes = 0
        for layer in reversed(self.layers):
            # When its turn begins nothing of it waits yet, and when it ends nothing else of it is there.
            most = max(most, held + layer.again_bytes + layer.working_bytes + waiting)
            waiting += layer.deferred_bytes if is_split else 0
            held -= layer.kept_bytes
            most = max(most, held + waiting)
        return most


def bytes_at(moment: Moment, stages: Mapping[int, StageMemory]) -> Bytes:
    """Bytes of activations at a moment."""
    total = sum(count * stages[stage].kept_bytes for stage, count in moment.kept)
    total += sum(count * stages[stage].deferred_bytes for stage, count in moment.deferred)
    total += sum(count * stages[stage].input_bytes for stage, count in moment.inputs)
    if moment.in_backward is not None:
        total += stages[moment.in_backward].backward_bytes(moment.is_split)
    return total


def peak(moments: Iterable[Moment], stages: Mapping[int, StageMemory]) -> tuple[int, Moment]:
    """The most bytes, and a moment when that is so."""
    sizes = [(bytes_at(moment, stages), moment) for moment in moments]
    most = max(num_bytes for num_bytes, _ in sizes)
    return most, max((moment for num_bytes, moment in sizes if num_bytes == most), key=str)


def job_stages(
    job: JobSpec, program: Program, rank: int, policies: Sequence[Policy], tp_index: int = 0, works: bool = False
) -> dict[int, StageMemory]:
    """The stages of one pipeline rank of a job, with a policy for each layer of the model; with what operators need
    while they run, if `works`."""
    counts = job.plan.stage_layers(job.model.layers)
    kind_of = shape_of(job.model).kind
    kinds = {kind_of(number): number for number in range(job.model.layers)}
    layers = {kind: layer_of(job, number) for kind, number in kinds.items()}
    memories = {}
    alike: dict[tuple[str, Policy, bool], LayerMemory] = {}  # most layers are as others are
    for stage in program.placement.stages_of(rank):
        first, is_last = sum(counts[:stage]), stage == len(counts) - 1
        of_layers = []
        for index, policy in enumerate(policies[first : first + counts[stage]]):
            # A layer's input goes to the host; a stage's own input stays, for the pipeline holds it.
            is_away = job.plan.offload_activations and LAYER in policy and (stage == 0 or index > 0)
            kind = kind_of(first + index)
            if (kind, policy, is_away) not in alike:
                alike[kind, policy, is_away] = LayerMemory.of(layers[kind], policy, is_away, works)
            of_layers.append(alike[kind, policy, is_away])
        if is_last and job.model.mtp_layers:
            of_layers += further_layers(job, policies[-1], works)
        memories[stage] = StageMemory(
            tuple(of_layers),
            input_bytes=Share.of(job)["input"] if stage else 0,
            documents_bytes=sum(documents_kept(job).values()),
            embedding_bytes=sum(embedding_kept(job).values()) if stage == 0 else 0,
            head_bytes=sum(head_kept(job).values()) if is_last else 0,
            head_working_bytes=head_working_bytes(job, tp_index) if is_last and works else 0,
        )
    return memories


def activation_bytes(job: JobSpec, program: Program, rank: int, tp_index: int = 0) -> tuple[int, int]:
    """The most bytes of activations that a pipeline rank holds at once, and what operators need besides while they run:
    by how much more it is with them. A budget must have been met."""
    policies, when = layer_policies(job.plan, job.model.layers), moments(program, rank)
    kept, all_of = (
        peak(when, job_stages(job, program, rank, policies, tp_index, works=works))[0] for works in (False, True)
    )
    return kept, all_of - kept
