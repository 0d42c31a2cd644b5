"""The groups of ranks of a plan on its cluster: who takes part in the collectives of each axis."""

from dataclasses import dataclass
from functools import cached_property

from shardwright.cost.topology import Group, group_of
from shardwright.workload.arrays import Numbers
from shardwright.workload.query import Run


@dataclass(frozen=True)
class Groups:
    """The groups of ranks of each axis of a run, by where they lie: tp fastest, then cp, dp, pp; ep folds dp x cp x tp.

    `shard` are the replicas that share one set of ZeRO's shards and `copies` those that hold the same shard; the same
    of experts.
    """

    run: Run

    def _group(self, size: Numbers, stride: Numbers) -> Group:
        return group_of(size, stride, max(1, self.run.devices_per_node), self.run.topology)

    @cached_property
    def tp(self) -> Group:
        """The group of tensor parallel."""
        return self._group(self.run.cut.tp, 1)

    @cached_property
    def cp(self) -> Group:
        """The group of context parallel."""
        return self._group(self.run.cut.cp, self.run.cut.tp)

    @cached_property
    def ep(self) -> Group:
        """The group of expert parallel."""
        return self._group(self.run.cut.ep, self.run.cut.expert_tp)

    @cached_property
    def pp(self) -> Group:
        """The group of the pipeline."""
        return self._group(self.run.cut.pp, self.run.cut.world // self.run.cut.pp)

    @cached_property
    def shard(self) -> Group:
        """The group of replicas that share one set of shards."""
        return self._group(self.run.cut.shard_ranks, self.run.cut.tp)

    @cached_property
    def copies(self) -> Group:
        """The group of replicas that hold the same shard."""
        cut = self.run.cut
        return self._group(cut.num_copies * cut.replicas // cut.shard_ranks, cut.tp * cut.shard_ranks)

    @cached_property
    def expert_shard(self) -> Group:
        """The group of ranks that share one set of experts' shards."""
        cut = self.run.cut
        return self._group(cut.expert_shard_ranks, cut.expert_tp * cut.ep)

    @cached_property
    def expert_copies(self) -> Group:
        """The group of ranks that hold the same shard of experts."""
        cut = self.run.cut
        size, inner = cut.num_copies * cut.expert_replicas // cut.expert_shard_ranks, cut.expert_tp * cut.ep
        return self._group(size, inner * cut.expert_shard_ranks)
