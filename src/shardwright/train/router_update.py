"""The end of a step for the routers: they learn from the counts of all ranks, and the counts are reported."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.model.router_state import RouterState, Totals
from shardwright.parallel.comm.collectives import all_reduce
from shardwright.sharding.routing_counts import size_of_totals
from shardwright.train.build import Replica


@dataclass(frozen=True)
class LayerRouting:
    """The routing of one step's real tokens to the experts of one layer.

    `load` counts how often each expert was chosen, before capacity was applied. `dropped_share` is the share of choices
    that found no room, `unserved_share` the share of tokens that no expert computed. `entropy` is the mean over tokens
    of the entropy of their scores, in nats. The losses are means over microbatches, times their coefficients; the loss
    of a step does not contain them. `together` counts the tokens that chose both of two experts; None with many
    experts.
    """

    layer: int
    load: tuple[int, ...]
    dropped_share: float
    unserved_share: float
    entropy: float
    balance_loss: float
    z_loss: float
    together: tuple[tuple[int, ...], ...] | None

    @classmethod
    def of(cls, layer: int, totals: Totals, num_positions: int) -> "LayerRouting":
        """The routing of a step from its totals. `num_positions` of a microbatch include filling."""
        tokens, chosen = max(1.0, float(totals.tokens)), float(totals.chosen_E.sum())
        pairs = totals.together_EE
        return cls(
            layer=layer,
            load=tuple(int(count) for count in totals.chosen_E.tolist()),
            dropped_share=float(totals.dropped) / max(1.0, chosen),
            unserved_share=float(totals.unserved) / tokens,
            entropy=float(totals.entropy) / tokens,
            balance_loss=float(totals.balance_loss) * num_positions / tokens,
            z_loss=float(totals.z_loss) * num_positions / tokens,
            together=None if pairs is None else tuple(tuple(int(n) for n in row) for row in pairs.tolist()),
        )

    @property
    def largest_load(self) -> float:
        """The load of the most chosen expert, as a multiple of the mean load."""
        return max(self.load) * len(self.load) / max(1, sum(self.load))

    def numbers(self, with_pairs: bool) -> dict[str, Any]:
        """The values for metrics.jsonl."""
        values = asdict(self) | {"largest_load": self.largest_load}
        if not with_pairs:
            del values["together"]
        return values

    def scalars(self) -> dict[str, float]:
        """The values for TensorBoard, by name."""
        names = ("largest_load", "dropped_share", "unserved_share", "entropy", "balance_loss", "z_loss")
        return {f"experts/layer {self.layer}/{name}": getattr(self, name) for name in names}


def routing_totals(replica: Replica) -> Tensor | None:
    """The totals of all routers in a step over all ranks, [layers with experts, totals] in float64 on the device; None
    without experts. Routers count anew after it. Moves one all-reduce over the world, of a few numbers for each layer
    and expert."""
    job, mesh = replica.job, replica.mesh
    layers = job.model.blocks_with_experts
    if not layers:
        return None
    table = torch.zeros(len(layers), size_of_totals(job.model.moe), dtype=torch.float64, device=mesh.device)
    # All tp ranks have the same tokens, unless they share the sequence.
    is_counted = mesh.tp.index == 0 or job.plan.sequence_parallel
    for row, state in _states(replica):
        counts = state.take_seen()
        if is_counted:
            table[row] = counts
    all_reduce(table, mesh.world)
    return table


def learn_routing(replica: Replica, table: Tensor) -> None:
    """Let every router of this rank learn from the totals of all ranks."""
    for row, state in _states(replica):
        state.learn(Totals.of(table[row], replica.job.model.moe))


def layer_routings(job: JobSpec, host_table: Tensor) -> tuple[LayerRouting, ...]:
    """The routing of each layer with experts, from the totals of all routers in host memory."""
    num_positions = job.plan.microbatch_size * job.model.sequence
    return tuple(
        LayerRouting.of(layer, Totals.of(host_table[row], job.model.moe), num_positions)
        for row, layer in enumerate(job.model.blocks_with_experts)
    )


def _states(replica: Replica) -> list[tuple[int, RouterState]]:
    """The states of this rank's routers, with their rows in a table of all layers with experts."""
    layers = replica.job.model.blocks_with_experts
    return [(layers.index(n), state) for stage in replica.stages.values() for n, state in stage.routers().items()]


def in_words(routing: tuple[LayerRouting, ...]) -> str:
    """The text for a progress line: the largest load of an expert in any layer, and the mean share of dropped
    choices."""
    largest = max(layer.largest_load for layer in routing)
    dropped = sum(layer.dropped_share for layer in routing) / len(routing)
    return say("busiest expert {load:.2f} x mean, {dropped:.1%} dropped", load=largest, dropped=dropped)
