"""The memory of a layer under a policy of recomputation, at the moments of a microbatch that may be the peak; and that
of a module that predicts a further token (model/mtp.py).

The block of such a module is a layer like the last (activations.py). The tensors of its own norm and its loss count for
the head (`head_kept`). Sizes are bytes on one rank, of one microbatch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.config.array_math import most
from shardwright.config.job import JobSpec
from shardwright.config.recompute_policy import Policy
from shardwright.layers.layer_tensors import BLOCK, ENDS
from shardwright.memory.activations import Layer, layer_of, rows_kept
from shardwright.memory.kept_tensors import IN_ENDS, Bytes, Share, TensorBytes
from shardwright.memory.working_memory import OperatorNeeds


@dataclass(frozen=True)
class LayerMemory:
    """Bytes that a microbatch holds in a layer: `kept_bytes` from F to B; `again_bytes` more in the layer's turn of the
    backward; `deferred_bytes` from I to W; and `working_bytes` of the operators in that turn, 0 if not counted."""

    policy: Policy
    kept_bytes: Bytes
    again_bytes: Bytes
    deferred_bytes: Bytes
    working_bytes: Bytes = 0

    @classmethod
    def of(cls, layer: Layer, policy: Policy, is_away: bool = False, works: bool = False) -> "LayerMemory":
        """The memory of a layer with a policy. If `is_away`, its kept tensors are in host memory; on the device are, in
        its turn of the backward, its own and those of the layer whose turn is next. `works`: count working memory."""
        kept, recomputed = (
            layer.kept_bytes(policy),
            layer.again_bytes(policy) + (2 * layer.kept_bytes(policy) * is_away),
        )
        working = layer.working_bytes(policy) if works else 0
        return cls(policy, 0 if is_away else kept, recomputed, layer.deferred_bytes(), working_bytes=working)


def before_block(job: JobSpec, distance: int) -> TensorBytes:
    """Bytes of the tensors that the module for the token at `distance` keeps before its block: of the lookup, of two
    norms and of the product of their results."""
    norms = ENDS.embedded, IN_ENDS.hidden_states, IN_ENDS.joined_statistics
    return Share.of(job).bytes_of((*rows_kept(job, distance), *norms, ENDS.joined))


def further_layers(job: JobSpec, policy: Policy, works: bool) -> Iterator[LayerMemory]:
    """The modules of a job, as layers after the last. `works`: count working memory."""
    layer, needs, share = layer_of(job, job.model.layers), OperatorNeeds(job, Share.of(job)), Share.of(job)
    block_memory = LayerMemory.of(layer, policy, works=works)
    for distance in range(1, 1 + job.model.mtp_layers):
        kept_bytes = sum(before_block(job, distance).values())
        working = 0
        if works:
            # Gradients of the hidden states of the previous modules and of the last layer stay in memory.
            waiting = distance * share[BLOCK.input]
            before = needs.before_block() - block_memory.kept_bytes - block_memory.again_bytes
            working = waiting + most(block_memory.working_bytes, before)
        yield LayerMemory(
            policy,
            kept_bytes=block_memory.kept_bytes + kept_bytes,
            again_bytes=block_memory.again_bytes,
            deferred_bytes=block_memory.deferred_bytes + share[ENDS.joined] + share[BLOCK.input],
            working_bytes=working,
        )
