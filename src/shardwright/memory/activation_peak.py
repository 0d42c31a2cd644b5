"""The most bytes of activations that a pipeline rank holds at once, from its list of actions.

A microbatch in a stage holds the kept tensors of its layers from F to the end of B. If the backward is split, inputs
and output gradients of the products stay from I to W. While a backward runs, the current layer also holds the tensors
that it recomputes, and the layers after it have freed their kept tensors.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from operator import ge
from typing import NamedTuple

from shardwright.config.job import JobSpec
from shardwright.config.kept_results import kept_by_identity
from shardwright.config.model_shape import shape_of
from shardwright.config.plan import layer_policies
from shardwright.config.recompute_policy import LAYER, Policy
from shardwright.layers.layer_tensors import BLOCK
from shardwright.memory.activations import (
    Layer,
    documents_kept,
    embedding_kept,
    head_kept,
    head_working_bytes,
    layer_of,
)
from shardwright.memory.kept_tensors import Bytes, Share
from shardwright.memory.layer_memory import LayerMemory, further_layers
from shardwright.schedule.action import Action, Kind
from shardwright.schedule.schedule import Program

Counts = tuple[tuple[int, int], ...]  # (stage, microbatches), ascending
Passes = frozenset[tuple[int, int]]  # (stage, microbatch)


@dataclass(frozen=True)
class Moment:
    """The microbatches alive at one moment, by stage: those of `kept` hold all kept tensors, those of `deferred` only
    wait for their weight gradients, and those of `inputs` hold only the stage's input. `in_backward` is the stage whose
    backward runs, if one does; its microbatch is not among the others."""

    kept: Counts
    deferred: Counts
    inputs: Counts = ()
    in_backward: int | None = None
    is_split: bool = False

    @property
    def microbatches(self) -> dict[int, int]:
        """The number of microbatches by stage, `kept`, `deferred` or in the backward."""
        alive = Counter(dict(self.kept)) + Counter(dict(self.deferred))
        if self.in_backward is not None:
            alive[self.in_backward] += 1
        return dict(alive)


def moments(program: Program, rank: int) -> frozenset[Moment]:
    """The distinct moments of a rank's list that may be its peak, for any bytes of a microbatch in each stage."""
    if not program.trains:
        return frozenset()
    stages = program.placement.stages_of(rank)
    return _moments(program.ranks[rank], stages, program.recomputed, program.split_backwards)


@lru_cache(maxsize=128)  # plans that differ only in sizes have the same lists
def _moments(row: tuple[Action, ...], stages: tuple[int, ...], recomputed: Passes, split: Passes) -> frozenset[Moment]:
    index_of = {stage: index for index, stage in enumerate(stages)}
    kept, deferred, inputs = ([0] * len(stages) for _ in range(3))
    # Few of thousands of moments are distinct. Their counts, by (stage in the backward, is it split).
    counts_of: dict[tuple[int | None, bool], set[tuple[int, ...]]] = defaultdict(set)

    def note(in_backward: int | None = None, is_split: bool = False) -> None:
        counts_of[in_backward, is_split].add((*kept, *deferred, *inputs))

    def begin(part: Action) -> None:
        is_recomputed, index = (part.stage, part.microbatch) in recomputed, index_of[part.stage]
        if part.kind is Kind.FORWARD and is_recomputed:
            inputs[index] += 1
        elif part.kind is Kind.RECOMPUTE:
            inputs[index] -= 1
        if part.kind is Kind.RECOMPUTE or (part.kind is Kind.FORWARD and not is_recomputed):
            kept[index] += 1

    for action in row:
        parts = action.computes()
        for part in parts:  # both parts of a pair are alive at once: begins come before ends
            begin(part)
        if parts:
            note()
        for part in parts:
            is_split, index = (part.stage, part.microbatch) in split, index_of[part.stage]
            if part.kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
                kept[index] -= 1
                note(part.stage, is_split)
                deferred[index] += is_split
            elif part.kind is Kind.WEIGHT_GRAD:
                deferred[index] -= 1

    def moment(numbers: tuple[int, ...], in_backward: int | None, is_split: bool) -> Moment:
        num = len(stages)
        of_state = (numbers[start : start + num] for start in range(0, 3 * num, num))
        kept, deferred, inputs = (
            tuple((s, n) for s, n in zip(stages, counts, strict=True) if n) for counts in of_state
        )
        return Moment(kept, deferred, inputs, in_backward=in_backward, is_split=is_split)

    return frozenset(
        moment(numbers, *backward) for backward, counts in counts_of.items() for numbers in _highest(counts)
    )


def _highest(counts: Collection[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The tuples, of equal length, that no other tuple exceeds or equals in every element."""
    highest: list[tuple[int, ...]] = []
    for candidate in sorted(counts, key=lambda numbers: (sum(numbers), numbers), reverse=True):
        if not any(all(map(ge, larger, candidate)) for larger in highest):
            highest.append(candidate)
    return highest


@dataclass(frozen=True)
class StageMemory:
    """The memory of one microbatch in a stage: `layers` has its layers, first to last, then the modules of further
    tokens; the other fields have the operators before and after these."""

    layers: tuple[LayerMemory, ...]
    input_bytes: int = 0
    documents_bytes: int = 0
    embedding_bytes: int = 0
    head_bytes: int = 0
    head_working_bytes: int = 0

    @cached_property
    def kept_bytes(self) -> Bytes:
        """Bytes from F to B."""
        layers_bytes = sum(layer.kept_bytes for layer in self.layers)
        return self.documents_bytes + self.embedding_bytes + layers_bytes + self.head_bytes

    @cached_property
    def deferred_bytes(self) -> Bytes:
        """Bytes from I to W."""
        return sum(layer.deferred_bytes for layer in self.layers)

    @cached_property
    def without_work(self) -> "StageMemory":
        """The stage without the working memory of its operators."""
        idle = {layer: replace(layer, working_bytes=0) for layer in set(self.layers)}  # most layers are alike
        return replace(self, layers=tuple(idle[layer] for layer in self.layers), head_working_bytes=0)

    def backward_bytes(self, is_split: bool) -> Bytes:
        """The most bytes at once while its backward runs, which goes from the head to the embedding."""
        return self._split_bytes if is_split else self._whole_bytes

    @cached_property
    def _whole_bytes(self) -> Bytes:
        return self._backward_bytes(is_split=False)

    @cached_property
    def _split_bytes(self) -> Bytes:
        return self._backward_bytes(is_split=True)

    def _backward_bytes(self, is_split: bool) -> Bytes:
        present = self.kept_bytes - self.head_bytes
        most = self.kept_bytes + self.head_working_bytes
        waiting: Bytes = 0
        for layer in reversed(self.layers):
            # At the begin of its turn none of its tensors wait for weight gradients; at the end only those are left.
            most = max(most, present + layer.again_bytes + layer.working_bytes + waiting)
            waiting += layer.deferred_bytes if is_split else 0
            present -= layer.kept_bytes
            most = max(most, present + waiting)
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
    """The most bytes at any of the moments, and a moment with as many."""
    sizes = [(bytes_at(moment, stages), moment) for moment in moments]
    peak_bytes = max(num_bytes for num_bytes, _ in sizes)
    return peak_bytes, max((moment for num_bytes, moment in sizes if num_bytes == peak_bytes), key=str)


@partial(kept_by_identity, most=2)  # all ranks of a job ask for them
def _layers_by_kind(job: JobSpec) -> dict[str, Layer]:
    """The tensors of a layer of each kind."""
    kind_of = shape_of(job.model).kind
    return {kind: layer_of(job, number) for kind, number in {kind_of(n): n for n in range(job.model.layers)}.items()}


class _StageContents(NamedTuple):
    """All that the memory of a stage depends on: the kinds and policies of its layers; `last_policy`, that of the
    model's last layer, if it is the last stage; the tensor-parallel rank, and if working memory is counted."""

    kinds: tuple[str, ...]
    policies: tuple[Policy, ...]
    is_first: bool
    last_policy: Policy | None
    tp_index: int
    works: bool


def job_stages(
    job: JobSpec, program: Program, rank: int, policies: Sequence[Policy], tp_index: int = 0, works: bool = False
) -> dict[int, StageMemory]:
    """The stages of one pipeline rank of a job, with a policy for each layer of the model; with working memory if
    `works`."""
    counts, kind_of = job.plan.stage_layers(job.model.layers), shape_of(job.model).kind
    known, memories = _alike_stages(job), dict[int, StageMemory]()
    for stage in program.placement.stages_of(rank):
        first = sum(counts[:stage])
        layers = range(first, first + counts[stage])
        contents = _StageContents(
            kinds=tuple(map(kind_of, layers)),
            policies=tuple(policies[first : layers.stop]),
            is_first=stage == 0,
            last_policy=policies[-1] if stage == len(counts) - 1 else None,
            tp_index=tp_index,
            works=works,
        )
        if contents not in known:
            known[contents] = _stage_memory(job, contents)
        memories[stage] = known[contents]
    return memories


@partial(kept_by_identity, most=2)
def _alike_stages(job: JobSpec) -> dict[_StageContents, StageMemory]:
    """The stages of a job that `job_stages` has made: those between the first and the last are mostly alike."""
    return {}


def _stage_memory(job: JobSpec, contents: _StageContents) -> StageMemory:
    """The memory of a microbatch in a stage of a job."""
    kinds, policies, is_first, last_policy, tp_index, works = contents
    is_last, layers, layer_memories = last_policy is not None, _layers_by_kind(job), list[LayerMemory]()
    memory_of: dict[tuple[str, Policy, bool], LayerMemory] = {}  # most layers are alike
    for index, (kind, policy) in enumerate(zip(kinds, policies, strict=True)):
        # A layer's input goes to the host; a stage's own input stays, since the pipeline holds it.
        is_offloaded = job.plan.offload_activations and LAYER in policy and (is_first or index > 0)
        if (kind, policy, is_offloaded) not in memory_of:
            memory_of[kind, policy, is_offloaded] = LayerMemory.of(layers[kind], policy, is_offloaded, works)
        layer_memories.append(memory_of[kind, policy, is_offloaded])
    if last_policy is not None and job.model.mtp_layers:
        layer_memories += further_layers(job, last_policy, works)
    return StageMemory(
        tuple(layer_memories),
        input_bytes=0 if is_first else Share.of(job)[BLOCK.input],
        documents_bytes=sum(documents_kept(job).values()),
        embedding_bytes=sum(embedding_kept(job).values()) if is_first else 0,
        head_bytes=sum(head_kept(job).values()) if is_last else 0,
        head_working_bytes=head_working_bytes(job, tp_index) if is_last and works else 0,
    )


def activation_bytes(job: JobSpec, program: Program, rank: int, tp_index: int = 0) -> tuple[int, int]:
    """(peak of activations of a pipeline rank, by how much working memory raises it), in bytes. A budget must have been
    resolved before."""
    policies, peak_moments = layer_policies(job.plan, job.model.layers), moments(program, rank)
    stages = job_stages(job, program, rank, policies, tp_index, works=True)
    with_working, _ = peak(peak_moments, stages)
    kept, _ = peak(peak_moments, {number: stage.without_work for number, stage in stages.items()})
    return kept, with_working - kept
