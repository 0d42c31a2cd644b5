"""The contents of pipeline ranks: layers by kind, the embedding, the head.

Few ranks of a pipeline differ: by one layer, by embedding and head, by kinds of layers. So costs are computed for these
few, for all plans at once, in arrays of shape (kinds of ranks, plans).
"""

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import numpy as np

from shardwright.config.model_shape import ModelShape
from shardwright.config.phrase import say
from shardwright.config.plan import even_stages
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.layers.arrays import Array, distinct
from shardwright.layers.frozen_base import base_bytes
from shardwright.layers.query import PlanGrid
from shardwright.sharding.stage_placement import StagePlacement, placement_of, vee

LayerKind = tuple[str, str]  # the kind in the model (config/model_shape.py), and its recompute policy


def layer_kinds(shape: ModelShape, grid: PlanGrid) -> tuple[LayerKind, ...]:
    """The kind of each layer of the model."""
    return _layer_kinds(shape, grid.recompute, grid.policies)


@lru_cache(maxsize=256)
def _layer_kinds(shape: ModelShape, recompute: str, policies: tuple[str, ...]) -> tuple[LayerKind, ...]:
    layer_policies = policies or (recompute,) * shape.layers
    return tuple((shape.kind(n), policy) for n, policy in enumerate(layer_policies))


def layers_by_kind(shape: ModelShape, grid: PlanGrid) -> Mapping[LayerKind, int]:
    """The number of the model's layers of each kind, with the blocks of further tokens, which are like the last
    layer."""
    return _layers_by_kind(layer_kinds(shape, grid), shape.mtp)


@lru_cache(maxsize=256)
def _layers_by_kind(kinds: tuple[LayerKind, ...], mtp: int) -> Mapping[LayerKind, int]:
    return Counter((*kinds, *kinds[-1:] * mtp))


@dataclass(frozen=True)
class StageContents:
    """The contents of one pipeline rank, in all its stages of both directions: layers by kind, with those of further
    tokens on the head's rank; the number of embeddings and of heads."""

    rank: int
    layers: tuple[int, ...]
    embedding: int
    head: int


@dataclass(frozen=True)
class PipelineStages:
    """The stages of one pipeline: `virtual` on each of `pp` ranks, which a schedule places, or in a V if `is_vee`.
    `layout` has the layers of each stage; they are even if it is empty. `mtp` more layers, like the last one, are with
    the head."""

    schedule: str
    pp: int
    virtual: int
    layout: tuple[int, ...] = ()
    is_vee: bool = False
    mtp: int = 0

    def placement(self) -> StagePlacement:
        """The rank of each stage."""
        return vee(self.pp) if self.is_vee else placement_of(self.schedule, self.pp, self.virtual)


def held_by_rank(kinds: tuple[Hashable, ...], pipeline: PipelineStages) -> list[StageContents]:
    """The contents of all ranks of one pipeline; kinds of layers are in the order of their first layers in the model.
    ValueError if stages and layers do not match."""
    placement = pipeline.placement()
    stages = pipeline.layout or tuple(even_stages(len(kinds), placement.num_stages))
    if len(stages) != placement.num_stages or sum(stages) != len(kinds):
        raise ValueError(
            say(
                "a layout of {stages} stages with {layers} layers in all can't be the {num_stages} stages of "
                "{schedule} on {pp} ranks with {num_layers} layers; give plan.layout one number for each stage, or "
                "leave it out",
                stages=len(stages),
                layers=sum(stages),
                num_stages=placement.num_stages,
                schedule=repr(pipeline.schedule),
                pp=pipeline.pp,
                num_layers=len(kinds),
            )
        )
    return _held(kinds, placement, stages, pipeline.mtp)


@lru_cache(maxsize=4096)
def _held(
    kinds: tuple[Hashable, ...], placement: StagePlacement, stages: tuple[int, ...], mtp: int
) -> list[StageContents]:
    # For each kind: its layers before a layer, in each stage, and on each rank; shapes (kinds, ...).
    counts_before = _before(kinds)
    in_stages = np.diff(counts_before[:, [0, *accumulate(stages)]])
    num_ranks = placement.num_ranks
    counts = np.zeros((len(counts_before), num_ranks))
    for holders in placement.holders:
        counts += [np.bincount(holders, kind_layers, num_ranks) for kind_layers in in_stages]
    embeds, heads = placement.replicas(0), placement.replicas(len(stages) - 1)
    counts[list(dict.fromkeys(kinds)).index(kinds[-1]), list(heads)] += mtp
    by_rank = enumerate(counts.T.astype(int).tolist())
    return [
        StageContents(rank, tuple(layers), embedding=int(rank in embeds), head=int(rank in heads))
        for rank, layers in by_rank
    ]


@lru_cache(maxsize=256)
def _before(kinds: tuple[Hashable, ...]) -> Array:
    """The number of layers of each kind before a layer of the model, and in all: (kinds, layers + 1)."""
    return np.array([list(accumulate((other == kind for other in kinds), initial=0)) for kind in dict.fromkeys(kinds)])


@lru_cache(maxsize=4096)
def _first_of_each(kinds: tuple[int, ...], pipeline: PipelineStages) -> list[StageContents]:
    """The first rank of a pipeline with each distinct contents: no schedule lets a later one keep more microbatches.

    `kinds` has a number for each layer: it matters only which layers are alike.
    """
    firsts: dict[tuple[object, ...], StageContents] = {}
    for contents in held_by_rank(kinds, pipeline):
        firsts.setdefault((contents.layers, contents.embedding, contents.head), contents)
    return list(firsts.values())


@lru_cache(maxsize=256)
def _numbered(kinds: tuple[LayerKind, ...]) -> tuple[int, ...]:
    """Kinds as numbers, in the order of their first layers in the model."""
    number = {kind: n for n, kind in enumerate(dict.fromkeys(kinds))}
    return tuple(number[kind] for kind in kinds)


@dataclass(frozen=True)
class PipelineRanks:
    """Ranks of pipelines as arrays of shape (ranks, plans): numbers of layers by kind, of embeddings and of heads.

    `are_tables_apart` is True for a plan if its embedding and head are on different ranks. `stand_for_others`: a rank
    is the first of all ranks of its pipeline with the same contents, and those are not here.
    """

    kinds: tuple[LayerKind, ...]
    rank: Array
    layers: tuple[Array, ...]
    embedding: Array
    head: Array
    are_tables_apart: Array
    stand_for_others: bool = True

    @classmethod
    def of(cls, kinds: tuple[LayerKind, ...], pipelines: list[list[StageContents]], which: Array) -> "PipelineRanks":
        """Pipeline `which` for each plan; shorter ones repeat their first rank."""
        num_ranks = max(map(len, pipelines))
        longest = [[*ranks, *ranks[:1] * (num_ranks - len(ranks))] for ranks in pipelines]
        table = [
            [(contents.rank, contents.embedding, contents.head, *contents.layers) for contents in ranks]
            for ranks in longest
        ]
        rank, embedding, head, *layers = np.array(table).T[:, :, which]
        are_apart = ~np.any(embedding & head, axis=0)
        return cls(
            kinds=tuple(dict.fromkeys(kinds)),
            rank=rank,
            layers=tuple(layers),
            embedding=embedding,
            head=head,
            are_tables_apart=are_apart,
        )

    def fullest(self, elements: Array) -> "PipelineRanks":
        """For each plan only the rank that holds the most elements: for models without experts."""
        fullest_rank = np.argmax(elements, axis=0)[None]

        def values_of(values: Array) -> Array:
            return np.take_along_axis(values, fullest_rank, 0)

        layers = tuple(values_of(count) for count in self.layers)
        return replace(
            self,
            rank=values_of(self.rank),
            layers=layers,
            embedding=values_of(self.embedding),
            head=values_of(self.head),
        )

    def num_tables(self, shape: ModelShape) -> Array:
        """Tables of embeddings and heads that each rank holds: a tensor has one memory on a rank, and the last stage
        has the table of embeddings too if further tokens are predicted."""
        has_both = self.embedding * self.head
        shared = has_both if shape.tied else (has_both - self.head) * int(shape.mtp > 0)
        num: Array = self.embedding + self.head - shared
        return num

    def parameters(self, shape: ModelShape, grid: PlanGrid) -> tuple[Array, Array]:
        """(elements that all tokens use, elements of routed experts) that each rank holds."""
        common = shape.table_elements * self.num_tables(shape)
        # The projection and the norms of further tokens are whole on every tp rank.
        common = common + self.head * shape.mtp * shape.further_parameters * grid.tp
        routed = np.zeros_like(common)
        for (kind, _), count in zip(self.kinds, self.layers, strict=True):
            common_elements, expert_elements = shape.kind_parameters(kind)
            common, routed = common + count * common_elements, routed + count * expert_elements
        return common / grid.tp, routed / (grid.ep * grid.expert_tp)

    def trained(self, shape: ModelShape, grid: PlanGrid) -> tuple[Array, Array]:
        """The elements of `parameters` that are trained: all, or the adapters alone."""
        if not shape.is_adapted:
            return self.parameters(shape, grid)
        common, routed = (np.zeros_like(self.head, dtype=float) for _ in range(2))
        num_local = (shape.experts.num if shape.experts else 0) / grid.ep
        for (kind, _), count in zip(self.kinds, self.layers, strict=True):
            of_all, of_expert = shape.adapter_elements(kind, grid.tp, grid.expert_tp)
            common, routed = common + count * of_all, routed + count * num_local * of_expert
        return common, routed

    def frozen_bytes(self, shape: ModelShape, grid: PlanGrid) -> tuple[Array, Array, Array]:
        """Bytes of the frozen weights beside adapters that each rank holds: of layers, of their routed experts, and of
        tables and norms."""
        all_elements, _ = self.parameters(shape, grid)
        matrices, stored, of_experts = (np.zeros_like(all_elements) for _ in range(3))
        for (kind, _), count in zip(self.kinds, self.layers, strict=True):
            num = sum(matrix.num_elements for matrix in shape.matrices(kind) if not matrix.experts)
            common, routed = base_bytes(shape, kind, grid)
            matrices = matrices + count * num / grid.tp
            stored, of_experts = stored + count * common, of_experts + count * routed
        return stored, of_experts, grid.element_bytes * (all_elements - matrices)


def different_ranks(shape: ModelShape, grid: PlanGrid) -> PipelineRanks:
    """The ranks of each plan that differ. `grid` has arrays."""
    kinds = layer_kinds(shape, grid)
    kind_numbers = _numbered(kinds)
    columns = (grid.pp, grid.virtual, grid.schedule_number, grid.layout_number)
    firsts, which = distinct(columns)
    pipelines = [
        _first_of_each(
            kind_numbers,
            PipelineStages(
                schedule=SCHEDULES.names[number] if number >= 0 else grid.schedule,
                pp=pp,
                virtual=virtual,
                layout=grid.layouts[layout_number] if layout_number >= 0 else grid.layout,
                is_vee=grid.is_vee,
                mtp=shape.mtp,
            ),
        )
        for pp, virtual, number, layout_number in zip(*(column[firsts].tolist() for column in columns), strict=True)
    ]
    return PipelineRanks.of(kinds, pipelines, which)


def all_ranks(shape: ModelShape, grid: PlanGrid) -> PipelineRanks:
    """Every rank of one plan. `grid` has arrays of one entry."""
    kinds = layer_kinds(shape, grid)
    pipeline = PipelineStages(
        schedule=grid.schedule,
        pp=int(grid.pp[0]),
        virtual=int(grid.virtual[0]),
        layout=grid.layout,
        is_vee=grid.is_vee,
        mtp=shape.mtp,
    )
    ranks = PipelineRanks.of(kinds, [held_by_rank(kinds, pipeline)], np.zeros(1, np.int64))
    return replace(ranks, stand_for_others=False)
