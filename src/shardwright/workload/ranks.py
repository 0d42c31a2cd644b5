"""What pipeline ranks hold: layers by kind, the embedding, the head.

Of the ranks of a pipeline few differ: by a layer more or less, by embedding and head, by kinds of layers. So costs are
computed for these few, for all plans at once, in arrays of shape (kinds of ranks, plans).
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import numpy as np

from shardwright.schedule.placement import placement_of
from shardwright.spec.plan import even_stages
from shardwright.workload.arrays import Array, distinct
from shardwright.workload.shape import Cut, Shape

LayerKind = tuple[str, str]  # dense or experts, and what it recomputes


def layer_kinds(shape: Shape, cut: Cut) -> tuple[LayerKind, ...]:
    """The kind of each layer of the model."""
    return _layer_kinds(shape, cut.words)


@lru_cache(maxsize=256)
def _layer_kinds(shape: Shape, cut: Cut) -> tuple[LayerKind, ...]:
    return tuple(("dense" if shape.is_dense(n) else "experts", cut.policy(n)) for n in range(shape.layers))


@dataclass(frozen=True)
class Held:
    """What one pipeline rank holds, through all its stages, of either direction: layers by kind, tables."""

    rank: int
    layers: tuple[int, ...]
    embedding: int
    head: int


def held_by_rank(
    kinds: tuple[LayerKind, ...], schedule: str, pp: int, virtual: int, layout: tuple[int, ...]
) -> list[Held]:
    """All ranks of one pipeline; kinds of layers are in the order in which the model has them first.

    ValueError if stages and layers do not go together.
    """
    placement = placement_of(schedule, pp, virtual)
    stages = list(layout) or even_stages(len(kinds), placement.num_stages)
    if len(stages) != placement.num_stages or sum(stages) != len(kinds):
        raise ValueError(
            f"a layout of {len(stages)} stages with {sum(stages)} layers in all can't be the {placement.num_stages} "
            f"stages of {schedule!r} on {pp} ranks with {len(kinds)} layers; give plan.layout one number for each "
            "stage, or leave it out"
        )
    order = list(dict.fromkeys(kinds))
    # Of each kind how many there are before a layer.
    before = [list(accumulate((of == kind for of in kinds), initial=0)) for kind in order]
    counts = [[0] * len(order) for _ in range(pp)]
    ends = list(accumulate(stages, initial=0))
    for holders in placement.holders:
        for rank, first, end in zip(holders, ends, ends[1:], strict=False):
            for index, layers in enumerate(before):
                counts[rank][index] += layers[end] - layers[first]
    embeds, heads = placement.replicas(0), placement.replicas(len(stages) - 1)
    return [Held(rank, tuple(counts[rank]), int(rank in embeds), int(rank in heads)) for rank in range(pp)]


class _Pipelines:
    """The ranks that differ of each pipeline of one schedule, made when they are first asked for."""

    def __init__(self, kinds: tuple[LayerKind, ...], schedule: str, layout: tuple[int, ...]) -> None:
        self.kinds, self.schedule, self.layout = kinds, schedule, layout
        self.found: dict[tuple[int, int], list[Held]] = {}

    def ranks(self, pp: int, virtual: int) -> list[Held]:
        """The first rank of each kind: no schedule lets a later one keep more microbatches."""
        if (pp, virtual) not in self.found:
            firsts: dict[tuple[object, ...], Held] = {}
            for held in held_by_rank(self.kinds, self.schedule, pp, virtual, self.layout):
                firsts.setdefault((held.layers, held.embedding, held.head), held)
            self.found[pp, virtual] = list(firsts.values())
        return self.found[pp, virtual]


_pipelines = lru_cache(maxsize=256)(_Pipelines)


@dataclass(frozen=True)
class Ranks:
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
    def of(cls, kinds: tuple[LayerKind, ...], pipelines: list[list[Held]], which: Array) -> "Ranks":
        """Pipeline `which` for each plan; the shorter ones have their first rank again."""
        most = max(map(len, pipelines))
        table = [
            [
                (held.rank, held.embedding, held.head, *held.layers)
                for held in (*ranks, *ranks[:1] * (most - len(ranks)))
            ]
            for ranks in pipelines
        ]
        rank, embedding, head, *layers = np.array(table).T[:, :, which]
        apart = ~np.any(embedding & head, axis=0)
        return cls(tuple(dict.fromkeys(kinds)), rank, tuple(layers), embedding, head, apart)

    def fullest(self, shape: Shape, cut: Cut) -> "Ranks":
        """Of each plan the rank alone that holds most elements, where there are no experts."""
        most = np.argmax(self.parameters(shape, cut)[0], axis=0)[None]

        def of(values: Array) -> Array:
            return np.take_along_axis(values, most, 0)

        layers = tuple(of(count) for count in self.layers)
        return replace(self, rank=of(self.rank), layers=layers, embedding=of(self.embedding), head=of(self.head))

    def parameters(self, shape: Shape, cut: Cut) -> tuple[Array, Array]:
        """(elements that all tokens use, elements of routed experts) that each rank holds."""
        table = shape.vocab * shape.hidden
        shared = self.embedding * self.head * int(shape.tied)  # one table for both uses
        common = table * (self.embedding + self.head - shared)
        routed = np.zeros_like(common)
        for (kind, _), count in zip(self.kinds, self.layers, strict=True):
            mine, theirs = shape.kind_parameters(kind)
            common, routed = common + count * mine, routed + count * theirs
        return common / cut.tp, routed / (cut.ep * cut.expert_tp)


def different_ranks(shape: Shape, cut: Cut) -> Ranks:
    """The ranks of each plan that differ. `cut` is of arrays."""
    kinds = layer_kinds(shape, cut)
    found, which = distinct((cut.pp, cut.virtual))
    pairs = zip(cut.pp[found].tolist(), cut.virtual[found].tolist(), strict=True)
    pipelines = _pipelines(kinds, cut.schedule, cut.layout)
    return Ranks.of(kinds, [pipelines.ranks(pp, virtual) for pp, virtual in pairs], which)


def all_ranks(shape: Shape, cut: Cut) -> Ranks:
    """Every rank of one plan. `cut` is of arrays of one entry."""
    kinds = layer_kinds(shape, cut)
    held = held_by_rank(kinds, cut.schedule, int(cut.pp[0]), int(cut.virtual[0]), cut.layout)
    return Ranks.of(kinds, [held], np.zeros(1, np.int64))
