"""The memory of a module that predicts a further token, besides its block: model/mtp.py.

Its block is a layer like the last (activations.py); what its own norm and its loss keep is the head's (`head_kept`).
Sizes are bytes on one rank, of one microbatch.
"""

from collections.abc import Iterator

from shardwright.account.activations import layer_of
from shardwright.account.kept_tensors import BOOL, INT64, Bytes, Share
from shardwright.account.layer_memory import LayerMemory
from shardwright.account.working_memory import OperatorNeeds
from shardwright.config.array_math import holds, most
from shardwright.config.job import JobSpec
from shardwright.config.recompute_policy import Policy


def before_block(job: JobSpec, distance: int) -> dict[str, Bytes]:
    """The tensors that the module `distance` tokens further keeps before its block: of the lookup, of two norms and of
    the product of their results."""
    plan, share = job.plan, Share.of(job)
    tokens, size = job.tokens_within * plan.microbatch_size, plan.microbatch_size
    kept: dict[str, Bytes] = {}
    is_cut, is_picked = holds(plan.tp > 1), holds(plan.cp > 1) and not plan.trades_heads
    if is_cut or is_picked:
        kept["rows"] = INT64 * tokens
    elif distance > 1 or job.data.separate_documents:  # else they are the batch's own
        kept["rows"] = INT64 * job.model.sequence * size
    if is_cut:
        kept["rows elsewhere"] = BOOL * tokens
    return kept | {
        "embedded": share["embedded"],
        "hidden states": share["input"],
        "statistics": 2 * share.statistics(share.tensors.tokens_here),
        "joined": share["joined"],
    }


def further_layers(job: JobSpec, policy: Policy, works: bool) -> Iterator[LayerMemory]:
    """The modules of a job, as layers behind the last. What operators need is counted where that `works`."""
    layer, needs, share = layer_of(job, job.model.layers), OperatorNeeds(job, Share.of(job)), Share.of(job)
    of_block = LayerMemory.of(layer, policy, works=works)
    for distance in range(1, 1 + job.model.mtp_layers):
        kept = sum(before_block(job, distance).values())
        working = 0
        if works:
            # Gradients of the hidden states of the modules before, and of the last layer's, are there all the while.
            waiting = distance * share["input"]
            before = needs.before_block() - of_block.kept_bytes - of_block.again_bytes
            working = waiting + most(of_block.working_bytes, before)
        yield LayerMemory(
            policy,
            kept_bytes=of_block.kept_bytes + kept,
            again_bytes=of_block.again_bytes,
            deferred_bytes=of_block.deferred_bytes + share["joined"] + share["input"],
            working_bytes=working,
        )
