"""The end of a step for the routers: what all ranks saw together is learned from, and told."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from shardwright.config.job import JobSpec
from shardwright.model.decoder import DecoderStage
from shardwright.model.router_state import Totals
from shardwright.parallel.comm.collectives import all_reduce
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.sharding.router_totals import size_of_totals


@dataclass(frozen=True)
class LayerRouting:
    """How the tokens of one step, without what only fills samples up, went to the experts of one layer.

    `load` says how often each expert was chosen, before room in experts was looked at. `dropped_share` are the choices
    that found no room, `unserved_share` the tokens that no expert computed. `entropy` is the mean over tokens of that
    of their scores, in nats. The losses are means over microbatches, times their coefficients; the loss of a step does
    not contain them. `together` counts the tokens that chose two experts both; None where there are many experts.
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
        """The routing that was seen in a step; a microbatch has so many positions, filling or not."""
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
        """The load of the expert that was chosen most, as a multiple of the mean."""
        return max(self.load) * len(self.load) / max(1, sum(self.load))

    def numbers(self, with_pairs: bool) -> dict[str, Any]:
        """For metrics.jsonl."""
        values = asdict(self) | {"largest_load": self.largest_load}
        if not with_pairs:
            del values["together"]
        return values

    def scalars(self) -> dict[str, float]:
        """For TensorBoard, by name."""
        names = ("largest_load", "dropped_share", "unserved_share", "entropy", "balance_loss", "z_loss")
        return {f"experts/layer {self.layer}/{name}": getattr(self, name) for name in names}


def end_routing_step(
    job: JobSpec, stages: Mapping[int, DecoderStage], mesh: Mesh, skipped: bool
) -> tuple[LayerRouting, ...]:
    """Sum over all ranks what their routers saw in a step, and have every router learn from that, unless the step was
    skipped. Returns how each layer with experts routed, the same on every rank.

    Moves one all-reduce over the world, of a few numbers for each layer and expert.
    """
    spec = job.model.moe
    layers = job.model.blocks_with_experts
    if not layers:
        return ()
    states = [(layers.index(n), state) for stage in stages.values() for n, state in stage.routers().items()]
    table = torch.zeros(len(layers), size_of_totals(spec), dtype=torch.float64, device=mesh.device)
    # Ranks of tp have the same tokens, unless they share the sequence.
    counts = mesh.tp.index == 0 or job.plan.sequence_parallel
    for row, state in states:
        seen = state.take_seen()
        if counts:
            table[row] = seen
    all_reduce(table, mesh.world)
    for row, state in states if not skipped else ():
        state.learn(Totals.of(table[row], spec))
    if mesh.streams is not None:
        mesh.streams.host_reads(table)
    if table.is_meta:  # of a dry run, which saw nothing
        return ()
    num_positions = job.plan.microbatch_size * job.model.sequence
    host = table.cpu()
    return tuple(LayerRouting.of(layer, Totals.of(host[row], spec), num_positions) for row, layer in enumerate(layers))


def in_words(routing: tuple[LayerRouting, ...]) -> str:
    """For the progress line: of the layer that is least even, the load of its busiest expert; and what was dropped."""
    largest = max(layer.largest_load for layer in routing)
    dropped = sum(layer.dropped_share for layer in routing) / len(routing)
    return f"busiest expert {largest:.2f} x mean, {dropped:.1%} dropped"
