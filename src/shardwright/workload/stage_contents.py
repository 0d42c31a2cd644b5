"""The contents of pipeline ranks: layers by kind, the embedding, the head.

Of the ranks of a pipeline few differ: by a layer more or less, by embedding and head, by kinds of layers. So costs are
computed for these few, for all plans at once, in arrays of shape (kinds of ranks, plans).
"""

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import numpy as np

from shardwright.config.model_shape import ModelShape
from shardwright.config.plan import even_stages
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.sharding.stage_placement import StagePlacement, placement_of, vee
from shardwright.workload.arrays import Array, distinct
from shardwright.workload.query import PlanGrid

LayerKind = tuple[str, str]  # of the model (config/model_shape.py), and what it recomputes


def layer_kinds(shape: ModelShape, grid: PlanGrid) -> tuple[LayerKind, ...]:
    """The kind of each layer of the model."""
    return _layer_kinds(shape, grid.recompute, grid.policies)


@lru_cache(maxsize=256)
def _layer_kinds(shape: ModelShape, recompute: str, policies: tuple[str, ...]) -> tuple[LayerKind, ...]:
    of_layers = policies or (recompute,) * shape.layers
    return tuple((shape.kind(n), policy) for n, policy in enumerate(of_layers))


def layers_by_kind(shape: ModelShape, grid: PlanGrid) -> Mapping[LayerKind, int]:
    """How many layers of the model are of each kind, with the blocks of further tokens, which are like the last."""
    return _layers_by_kind(layer_kinds(shape, grid), shape.mtp)


@lru_cache(maxsize=256)
def _layers_by_kind(kinds: tuple[LayerKind, ...], mtp: int) -> Mapping[LayerKind, int]:
    return Counter((*kinds, *kinds[-1:] * mtp))


@dataclass(frozen=True)
class StageContents:
    """The contents of one pipeline rank, through all its stages, of either direction: layers by kind, with those of
    further tokens beside the head; tables."""

    rank: int
    layers: tuple[int, ...]
    embedding: int
    head: int


def held_by_rank(
    kinds: tuple[Hashable, ...], schedule: str, pp: int, virtual: int, layout: tuple[int, ...], is_vee: bool = False,
    mtp: int = 0,
) -> list[StageContents]:  # fmt: skip
    """All ranks of one pipeline; kinds of layers are in the order in which the model has them first. `mtp` more, like
    the last one, stand beside the head. ValueError if stages and layers do not go together."""
    placement = vee(pp) if is_vee else placement_of(schedule, pp, virtual)
    stages = layout or tuple(even_stages(len(kinds), placement.num_stages))
    if len(stages) != placement.num_stages or sum(stages) != len(kinds):
        raise ValueError(
            f"a layout of {len(stages)} stages with {sum(stages)} layers in all can't be the {placement.num_stages} "
            f"stages of {schedule!r} on {pp} ranks with {len(kinds)} layers; give plan.layout one number for each "
            "stage, or leave it out"
        )
    return _held(kinds, placement, stages, mtp)


@lru_cache(maxsize=4096)
def _held(
    kinds: tuple[Hashable, ...], placement: StagePlacement, stages: tuple[int, ...], mtp: int
) -> list[StageContents]:
    # Of each kind how many layers there are before a layer, in each stage, and on each rank: (kinds, ...).
    before = _before(kinds)
    in_stages = np.diff(before[:, [0, *accumulate(stages)]])
    num_ranks = placement.num_ranks
    counts = np.zeros((len(before), num_ranks))
    for holders in placement.holders:
        counts += [np.bincount(holders, of_kind, num_ranks) for of_kind in in_stages]
    embeds, heads = placement.replicas(0), placement.replicas(len(stages) - 1)
    counts[list(dict.fromkeys(kinds)).index(kinds[-1]), list(heads)] += mtp
    by_rank = enumerate(counts.T.astype(int).tolist())
    return [StageContents(rank, tuple(layers), int(rank in embeds), int(rank in heads)) for rank, layers in by_rank]


@lru_cache(maxsize=256)
def _before(kinds: tuple[Hashable, ...]) -> Array:
    """How many layers of each kind there are before a layer of the model, and in all: (kinds, layers + 1)."""
    return np.array([list(accumulate((other == kind for other in kinds), initial=0)) for kind in dict.fromkeys(kinds)])


@lru_cache(maxsize=4096)
def _first_of_each(
    kinds: tuple[int, ...], schedule: str, pp: int, virtual: int, layout: tuple[int, ...], is_vee: bool, mtp: int
) -> list[StageContents]:
    """The first rank of a pipeline of each kind: no schedule lets a later one keep more microbatches.

    Whatever kinds layers have, it matters which are alike: `kinds` has a number for each layer.
    """
    firsts: dict[tuple[object, ...], StageContents] = {}
    for held in held_by_rank(kinds, schedule, pp, virtual, layout, is_vee, mtp=mtp):
        firsts.setdefault((held.layers, held.embedding, held.head), held)
    return list(firsts.values())


@lru_cache(maxsize=256)
def _numbered(kinds: tuple[LayerKind, ...]) -> tuple[int, ...]:
    """Kinds as numbers, in the order in which the model has them first."""
    number = {kind: n for n, kind in enumerate(dict.fromkeys(kinds))}
    return tuple(number[kind] for kind in kinds)


@dataclass(frozen=True)
class PipelineRanks:
    """Ranks of pipelines as arrays of shape (ranks, plans): numbers of layers by kind, of embeddings and of heads.

    `are_tables_apart` says by plan whether embedding and head are on different ranks.
    """

    kinds: tuple[LayerKind, ...]
    rank: Array
    layers: tuple[Array, ...]
    embedding: Array
    head: Array
    are_tables_apart: Array

    @classmethod
    def of(cls, kinds: tuple[LayerKind, ...], pipelines: list[list[StageContents]], which: Array) -> "PipelineRanks":
        """Pipeline `which` for each plan; the shorter ones have their first rank again."""
        most = max(map(len, pipelines))
        longest = [[*ranks, *ranks[:1] * (most - len(ranks))] for ranks in pipelines]
        table = [[(held.rank, held.embedding, held.head, *held.layers) for held in ranks] for ranks in longest]
        rank, embedding, head, *layers = np.array(table).T[:, :, which]
        apart = ~np.any(embedding & head, axis=0)
        return cls(tuple(dict.fromkeys(kinds)), rank, tuple(layers), embedding, head, apart)

    def fullest(self, elements: Array) -> "PipelineRanks":
        """The rank alone that holds most of the elements, for each plan: where there are no experts."""
        most = np.argmax(elements, axis=0)[None]

        def of(values: Array) -> Array:
            return np.take_along_axis(values, most, 0)

        layers = tuple(of(count) for count in self.layers)
        return replace(self, rank=of(self.rank), layers=layers, embedding=of(self.embedding), head=of(self.head))

    def num_tables(self, shape: ModelShape) -> Array:
        """Tables of embeddings and heads that each rank holds: one tensor has one memory on a rank, and where further
        tokens are predicted the last stage has the table of embeddings too."""
        both = self.embedding * self.head
        shared = both if shape.tied else (both - self.head) * int(shape.mtp > 0)
        num: Array = self.embedding + self.head - shared
        return num

    def parameters(self, shape: ModelShape, grid: PlanGrid) -> tuple[Array, Array]:
        """(elements that all tokens use, elements of routed experts) that each rank holds."""
        common = shape.table_elements * self.num_tables(shape)
        # Of further tokens the projection and the norms are whole on every rank of tp.
        common = common + self.head * shape.mtp * shape.further_parameters * grid.tp
        routed = np.zeros_like(common)
        for (kind, _), count in zip(self.kinds, self.layers, strict=True):
            of_all, of_experts = shape.kind_parameters(kind)
            common, routed = common + count * of_all, routed + count * of_experts
        return common / grid.tp, routed / (grid.ep * grid.expert_tp)


def different_ranks(shape: ModelShape, grid: PlanGrid) -> PipelineRanks:
    """The ranks of each plan that differ. `grid` is of arrays."""
    kinds = layer_kinds(shape, grid)
    alike = _numbered(kinds)
    columns = (grid.pp, grid.virtual, grid.schedule_number)
    firsts, which = distinct(columns)
    pipelines = [
        _first_of_each(
            alike,
            SCHEDULES.names[number] if number >= 0 else grid.schedule,
            pp,
            virtual,
            grid.layout,
            grid.is_vee,
            shape.mtp,
        )
        for pp, virtual, number in zip(*(column[firsts].tolist() for column in columns), strict=True)
    ]
    return PipelineRanks.of(kinds, pipelines, which)


def all_ranks(shape: ModelShape, grid: PlanGrid) -> PipelineRanks:
    """Every rank of one plan. `grid` is of arrays of one entry."""
    kinds = layer_kinds(shape, grid)
    held = held_by_rank(
        kinds, grid.schedule, int(grid.pp[0]), int(grid.virtual[0]), grid.layout, grid.is_vee, mtp=shape.mtp
    )
    return PipelineRanks.of(kinds, [held], np.zeros(1, np.int64))
