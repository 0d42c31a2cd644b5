"""The links that the groups of a plan cross on its cluster: who takes part in the collectives of each axis."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwright.cost.topology import Group, Reach, group_of, reach_in_stage, reach_of_ranks
from shardwright.sharding.groups import COPIES, CP, EP, PP, SHARDS, TP, WORLD, GroupKind, Layout, layout
from shardwright.workload.query import Run, Topology


def _links(kind: GroupKind) -> "cached_property[Group]":
    return cached_property(lambda groups: groups.along(kind))


def group_at(run: Run, lies: Layout) -> Group:
    """The group of ranks that lie so, of one plan."""
    groups = Groups(run)
    is_of_ranks = lies.block == lies.pitch
    reach = (
        reach_of_ranks(*groups.fast) if is_of_ranks else reach_in_stage(run.grid, *groups.fast, mirrors=lies.mirrors)
    )
    return group_of(lies.size, lies.stride, reach)


@dataclass(frozen=True)
class Groups:
    """The groups of ranks of each axis of a run, by where they lie (sharding/groups.py).

    `shard` are the replicas that share one set of ZeRO's shards and `copies` those that hold the same shard; the same
    of experts.
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
        """The group of any kind."""
        lies = layout(self.run.grid, kind)
        if kind in (PP, WORLD):
            reach = reach_of_ranks(*self.fast)
        elif np.any(lies.mirrors > 1):
            reach = reach_in_stage(self.run.grid, *self.fast, mirrors=lies.mirrors)
        else:
            reach = self.in_stage
        return group_of(lies.size, lies.stride, reach)

    @property
    def fast(self) -> tuple[int, Topology]:
        """Neighbouring devices that share fast links, and what joins them to others."""
        return max(1, self.run.devices_per_node), self.run.topology

    @cached_property
    def in_stage(self) -> Reach:
        """How far links reach among the ranks of a stage."""
        return reach_in_stage(self.run.grid, *self.fast)
