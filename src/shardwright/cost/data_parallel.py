"""The work of replicas at the ends of a step: reduce gradients, compressed or not, update, and gather parameters."""

from dataclasses import dataclass

import numpy as np

from shardwright.config.compression_facts import COMPRESSIONS, BucketCollective
from shardwright.config.plan import sums_by_run
from shardwright.config.software import SoftwareSpec
from shardwright.config.update_passes import gradient_pass_bytes
from shardwright.cost.calibration import Rates, known_host
from shardwright.cost.collective_time import all_to_all_s, ring_s
from shardwright.cost.group_links import Groups
from shardwright.cost.host_update import accumulated_s, hosted_update_s
from shardwright.cost.piece_time import PieceTime, beside
from shardwright.cost.pipeline_bubble import num_reductions
from shardwright.cost.topology import Group
from shardwright.cost.update_time import Updated, elementwise_s, held_by_matrix, orthogonal_s
from shardwright.cost.wire_bytes import RING_ROUNDS
from shardwright.layers.arrays import Array, Numbers
from shardwright.layers.chains import chains
from shardwright.layers.layer_tensors import FLOAT32
from shardwright.layers.query import Run
from shardwright.layers.stage_contents import PipelineRanks
from shardwright.sharding.groups import num_replicas


@dataclass(frozen=True)
class DataParallel:
    """Prices the ends of a step. Numbers are arrays; those of `ranks` have shape (ranks, plans)."""

    run: Run
    software: SoftwareSpec
    rates: Rates
    groups: Groups
    ranks: PipelineRanks
    held: tuple[Array, Array]  # elements of (common, routed) parameters that are trained, by rank
    pace: PieceTime  # of the slowest rank: its last backward and next forward hide communication

    @classmethod
    def of(
        cls, run: Run, software: SoftwareSpec, rates: Rates, groups: Groups, ranks: PipelineRanks, pace: PieceTime
    ) -> "DataParallel":
        """The replicas of plans in arrays."""
        return cls(run, software, rates, groups, ranks=ranks, held=ranks.trained(run.shape, run.grid), pace=pace)

    def exchanged_s(self) -> tuple[Numbers, Numbers, Numbers]:
        """Seconds of (reducing gradients, the last bucket of them, gathering parameters) by themselves, by rank."""
        grid, rates, groups = self.run.grid, self.rates, self.groups
        reduce_s, last_s, gather_s = 0.0, 0.0, 0.0
        shards = [(groups.shard, groups.copies), (groups.expert_shard, groups.expert_copies)]
        gathered_bytes = grid.gathered_bytes(self.software.float8_gather)
        for are_experts, (shard, copies) in enumerate(shards[: 2 if self.run.shape.experts else 1]):
            elements = self.held[are_experts]
            kind_s, bucket_s = self._reduced(shard, copies, are_experts=bool(are_experts))
            reduce_s, last_s = reduce_s + kind_s, last_s + bucket_s
            num_turns = self._num_turns(shard)
            turn_bytes = gathered_bytes * elements * (grid.zero > 0) / num_turns
            gather_s = gather_s + num_turns * ring_s(rates, shard, turn_bytes)
        return reduce_s, last_s, gather_s

    def _num_turns(self, shard: Group) -> Numbers:
        """Number of collectives in which updated parameters come to all ranks: one gather, or a broadcast of each rank
        that updated tensors, one after the other. NCCL's broadcast is a ring as its gather is."""
        if not self.software.broadcasts_updates:
            return 1
        tensors = [_num_tensors(self.run, kind) for kind, _ in self.ranks.kinds]
        held = sum(num * layers for num, layers in zip(tensors, self.ranks.layers, strict=True))
        return np.clip(held, 1, shard.size)

    def data_s(self) -> Numbers:
        """Exposed seconds of reducing gradients and gathering updated parameters, of the rank that takes longest."""
        grid, software, rates = self.run.grid, self.software, self.rates
        reduce_s, last_s, gather_s = self.exchanged_s()
        put_off_s = np.max(reduce_s * (grid.num_copies > 1), axis=0)  # DualPipe reduces when a step's passes are over
        p, m = grid.pp, grid.num_microbatches
        reductions = grid.by_schedule(
            lambda name, at: num_reductions(name, p[at], m[at], sums_by_run(name, grid.virtual[at], grid.reduce_each))
        )
        early_s = (reductions - 1) * reduce_s * ((grid.zero == 2) & (not software.zero.whole_gradients))
        reduce_s = self.exposed_reduce_s(reduce_s, last_s)
        if software.gather_overlap:
            gather_s = beside(rates, gather_s, self.pace.forward)
        elif software.update_overlap:
            gather_s = beside(rates, gather_s, self.updates_s())
        if software.zero.early_overlap:
            early_s = beside(rates, early_s, (grid.num_microbatches - 1) * self.pace.total)
        seconds = np.max(early_s + reduce_s + gather_s, axis=0)
        # ZeRO-3 gathers and reduces among the layers' own work, and what is put off comes after it.
        return np.where((grid.zero == 3) & (num_replicas(grid) > 1), put_off_s, seconds) + self._tied_s()

    def exposed_reduce_s(self, reduce_s: Numbers, last_s: Numbers) -> Numbers:
        """Seconds for which reducing gradients outlasts the backward that makes them, from the first two of
        `exchanged_s`."""
        if not self.software.reduce_overlap:
            return reduce_s
        exposed_s = beside(self.rates, reduce_s, self.pace.backward)
        # The last bucket is full when the backward ends.
        return np.maximum(exposed_s, last_s) if self.run.grid.bucket_bytes else exposed_s

    def _reduced(self, shard: Group, copies: Group, *, are_experts: bool) -> tuple[Numbers, Numbers]:
        """(seconds of reducing the gradients of common parameters or of experts', of their last bucket alone)."""
        grid, software, rates, elements = self.run.grid, self.software, self.rates, self.held[are_experts]
        if COMPRESSIONS[grid.compress].method:
            seconds = self._compressed_s(shard, copies, are_experts=are_experts)
            return seconds, seconds
        buckets: Numbers = 1
        if grid.bucket_bytes:
            buckets = np.maximum(1, np.ceil(grid.element_bytes * elements / grid.bucket_bytes))
        size = software.reduce_bytes * elements / buckets
        is_whole = (grid.zero == 0) | (software.reduce_whole & (copies.size == 1))
        # A shard's gradients are also summed over its copies.
        bucket_s = ring_s(rates, shard, size, np.where(is_whole, 2, 1), scatters=True)
        if np.any(copies.size > 1):
            bucket_s = bucket_s + ring_s(rates, copies, size / shard.size, 2)
        return buckets * bucket_s, bucket_s

    def _compressed_s(self, shard: Group, copies: Group, *, are_experts: bool) -> Numbers:
        """Seconds of a method's collectives, and of its own passes over the gradients.

        With hybrid sharding, shards are summed over their copies uncompressed.
        """
        grid, rates, elements = self.run.grid, self.rates, self.held[are_experts]
        facts = COMPRESSIONS[grid.compress]
        rows, columns = self._sides() if facts.takes is not None and not are_experts else (0.0, 0.0)
        summed = facts.summed(grid, elements, rows, columns, shard.size)
        scattered = facts.scattered(elements, shard.size) if facts.scattered is not None else summed
        on_all, on_shares = (
            sum(_collective_s(rates, shard, collective) for collective in collectives)
            for collectives in (summed, scattered)
        )
        passes = facts.device_bytes * elements / rates.memory_bytes_per_s
        seconds = np.where(grid.zero > 0, on_shares, on_all) + np.where(shard.size > 1, passes, 0.0)
        return seconds + ring_s(rates, copies, FLOAT32 * elements / shard.size, 2)

    def _sides(self) -> tuple[Numbers, Numbers]:
        """Sums of (rows, columns) of a rank's matrices. Experts' matrices count with the common ones."""
        run, ranks = self.run, self.ranks
        pieces, tables = chains(run.shape, run.grid, self.software), ranks.embedding + ranks.head
        rows, columns = tables * run.shape.vocab / run.grid.tp, tables * run.shape.hidden
        for (kind, _), count in zip(ranks.kinds, ranks.layers, strict=True):
            weights = [p for operator in pieces[kind] for p in operator.products if p.weight]
            rows = rows + count * sum(p.batch * p.inner for p in weights)
            columns = columns + count * sum(p.batch * p.columns for p in weights)
        return rows, columns

    def _tied_s(self) -> Numbers:
        """Seconds to sum the two gradients of a table that the first and the last rank share."""
        run, grid = self.run, self.run.grid
        size = self.software.reduce_bytes * run.shape.table_elements / grid.tp
        pair = Group(2, np.where(self.groups.pp.domains == 1, 2, 1))
        return ring_s(
            self.rates,
            pair,
            size * (run.shape.shares_table & (not run.shape.is_adapted) & self.ranks.are_tables_apart),
            2,
        )

    def _updated(self) -> Updated:
        """Elements that a rank updates, by rank."""
        shard_sizes = self.groups.shard.size, self.groups.expert_shard.size
        shares = [np.where(self.run.grid.zero > 0, 1 / num_ranks, 1.0) for num_ranks in shard_sizes]
        by_matrix = sum(
            num * share for num, share in zip(held_by_matrix(self.run, self.ranks, self.held), shares, strict=True)
        )
        total = sum(num * share for num, share in zip(self.held, shares, strict=True))
        return Updated(by_matrix, total - by_matrix, self.run.grid.element_bytes)

    def updates_s(self) -> Numbers:
        """Seconds of the update on the device, by rank, with passes over all gradients before it."""
        grid, updated = self.run.grid, self._updated()
        on_device = updated.times(1 - grid.offload_optimizer)
        matrices_s = orthogonal_s(self.run, self.rates, self.groups, self.ranks, updated)
        before_bytes = gradient_pass_bytes(self.software.gradient_passes, self.software.gradient_bytes) * sum(self.held)
        update_s = elementwise_s(self.rates, self.software, grid.optimizer, on_device)
        return update_s + matrices_s + before_bytes / self.rates.memory_bytes_per_s

    def update_s(self) -> tuple[Numbers, Numbers]:
        """(seconds of the update on the device, further seconds of the host), of the rank that holds most.

        Both run at once: a part of the state may be on the device.
        """
        grid, updated = self.run.grid, self._updated()
        device_s = np.max(self.updates_s(), axis=0)
        if not np.any(grid.offload_optimizer):
            return device_s, 0.0
        host = known_host(self.run, self.rates)
        host_elements = np.max(updated.total, axis=0) * grid.offload_optimizer
        moved_bytes = np.max(updated.moved_bytes(self.software, grid.optimizer), axis=0) * grid.offload_optimizer
        hosted_s = hosted_update_s(self.software, grid, host, elements=host_elements, moved_bytes=moved_bytes)
        return device_s, np.maximum(0.0, hosted_s - device_s)

    def accumulated_s(self) -> Numbers:
        """Seconds of copies of gradients that add up in host memory, of the rank that holds most."""
        grid = self.run.grid
        if not (self.software.host.copied[1] and np.any(grid.offload_optimizer)):
            return 0.0
        elements = np.max(self._updated().total, axis=0) * grid.offload_optimizer
        return accumulated_s(self.software, grid, known_host(self.run, self.rates), elements)


def _collective_s(rates: Rates, group: Group, collective: BucketCollective) -> Numbers:
    """Seconds of a collective of a method of compression."""
    if collective.kind == "all_to_all":
        return all_to_all_s(rates, group, collective.num_bytes)
    return ring_s(rates, group, collective.num_bytes, RING_ROUNDS[collective.kind])


def _num_tensors(run: Run, kind: str) -> int:
    """Parameters of a layer of a kind that are tensors of their own."""
    matrices = run.shape.matrices(kind)
    return sum(max(1, matrix.experts) * len(matrix.widths or (1,)) for matrix in matrices) + len(run.shape.block_norms)
