"""The links that the groups of a plan cross on its cluster: who takes part in the collectives of each axis."""

from dataclasses import dataclass
from functools import cached_property

from shardwright.cost.topology import Group, group_of
from shardwright.sharding.groups import COPIES, CP, EP, PP, SHARDS, TP, GroupKind, layout
from shardwright.workload.query import Run


def _links(kind: GroupKind) -> "cached_property[Group]":
    def links(groups: "Groups") -> Group:
        run, lies = groups.run, layout(groups.run.cut, kind)
        return group_of(lies.size, lies.stride, max(1, run.devices_per_node), run.topology)

    return cached_property(links)


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
