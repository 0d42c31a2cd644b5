"""The memory of a module that predicts a further token, besides its block: model/mtp.py.

Its block is a layer like the last (activations.py). The tensors of its own norm and its loss count for the head
(`head_kept`).
Sizes are bytes on one rank, of one microbatch.
"""

from collections.abc import Iterator

from shardwright.config.array_math import holds, most
from shardwright.config.job import JobSpec
from shardwright.config.recompute_policy import Policy
from shardwright.layers.layer_tensors import BLOCK, ENDS
from shardwright.memory.activations import layer_of
from shardwright.memory.kept_tensors import IN_ENDS, Share, TensorBytes
from shardwright.memory.layer_memory import LayerMemory
from shardwright.memory.working_memory import OperatorNeeds


def before_block(job: JobSpec, distance: int) -> TensorBytes:
    """Bytes of the tensors that the module for the token at `distance` keeps before its block: of the lookup, of two
    norms and of the product of their results."""
    plan = job.plan
    is_cut, is_picked = holds(plan.tp > 1), holds(plan.cp > 1) and not plan.trades_heads
    has_rows = is_cut or is_picked or distance > 1 or job.data.separate_documents  # else the batch has them
    rows = (IN_ENDS.rows,) * has_rows + (IN_ENDS.rows_elsewhere,) * is_cut
    norms = ENDS.embedded, IN_ENDS.hidden_states, IN_ENDS.joined_statistics
    return Share.of(job).bytes_of((*rows, *norms, ENDS.joined))


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
