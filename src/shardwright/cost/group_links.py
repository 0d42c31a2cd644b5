"""The links that the groups of a plan cross on its cluster, one group for the collectives of each axis."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwright.cost.topology import Group, Reach, group_of, reach_in_stage, reach_of_ranks
from shardwright.layers.query import Run, Topology
from shardwright.sharding.groups import COPIES, CP, EP, PP, SHARDS, TP, WORLD, GroupKind, Layout, layout


def _links(kind: GroupKind) -> "cached_property[Group]":
    return cached_property(lambda groups: groups.along(kind))


def group_at(run: Run, place: Layout) -> Group:
    """The group of ranks with a layout, of one plan."""
    groups = Groups(run)
    is_of_ranks = place.block == place.pitch
    reach = (
        reach_of_ranks(*groups.fast) if is_of_ranks else reach_in_stage(run.grid, *groups.fast, mirrors=place.mirrors)
    )
    return group_of(place.size, place.stride, reach)


@dataclass(frozen=True)
class Groups:
    """The groups of ranks of each axis of a run, by their layout (sharding/groups.py).

    `shard` are the replicas that share one set of ZeRO's shards, and `copies` the replicas that hold the same shard;
    `expert_shard` and `expert_copies` are the same for experts.
    """

    run: Run

    tp = _links(TP)
    cp = _links(CP)
    ep = _links(EP)
    pp = _links(PP)
    shard = _links(SHARDS[False])
    copies = _links(COPIES[False])
    expert_shard = _links(SHARDS[True])
    expert_copies = _links(COPIES[True])

    def along(self, kind: GroupKind) -> Group:
        """The group of a kind."""
        place = layout(self.run.grid, kind)
        if kind in (PP, WORLD):
            reach = reach_of_ranks(*self.fast)
        elif np.any(place.mirrors > 1):
            reach = reach_in_stage(self.run.grid, *self.fast, mirrors=place.mirrors)
        else:
            reach = self.in_stage
        return group_of(place.size, place.stride, reach)

    @property
    def fast(self) -> tuple[int, Topology]:
        """(number of neighbouring devices that share fast links, the topology that joins them to others)."""
        return max(1, self.run.devices_per_node), self.run.topology

    @cached_property
    def in_stage(self) -> Reach:
        """The reach of links among the ranks of a stage."""
        return reach_in_stage(self.run.grid, *self.fast)
