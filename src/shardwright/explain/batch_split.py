"""The split of the batch: from the sequences of a step to the tokens that one rank computes with at once."""

from dataclasses import dataclass

from shardwright.config.job import JobSpec
from shardwright.config.plan import chunks_per_rank


@dataclass(frozen=True)
class Portion:
    """A part of a step's batch: the part of what it is, the number of such parts in the previous portion, its size."""

    kind: str
    num_parts: int
    num_sequences: int
    num_tokens: int
    why: str


def portions(job: JobSpec) -> list[Portion]:
    """The portions from the global batch down to the tokens that a rank holds between the products of a layer."""
    plan, sequence = job.plan, job.model.sequence
    replica = job.batch.global_batch_size // plan.dp
    micro = plan.microbatch_size
    split_reason = f"dp {plan.dp}: replicas take different sequences"
    accumulation = f"microbatch_size {micro}: one passes after the other, and gradients add up"
    parts = [
        Portion("step", 1, job.batch.global_batch_size, job.tokens_per_step, why="batch.global_batch_size"),
        Portion("replica", plan.dp, replica, replica * sequence, why=split_reason),
        Portion("microbatch", job.num_microbatches, micro, micro * sequence, why=accumulation),
    ]
    if plan.cp > 1:
        why = f"cp {plan.cp}: ranks share each sequence"
        if chunks_per_rank(plan.cp_method) == 2:
            why += ", each with a piece from its front and one from its back, for late tokens see more keys"
        parts.append(Portion("cp rank", plan.cp, micro, micro * job.tokens_within, why=why))
    if plan.tp > 1 and plan.sequence_parallel:
        why = f"tp {plan.tp} with sequence parallel: between products ranks share the tokens"
        parts.append(Portion("tp rank, between products", plan.tp, micro, micro * job.tokens_between, why=why))
    if plan.tp > 1:
        why = f"tp {plan.tp}: in products all tokens, for 1/{plan.tp} of heads and inner width"
        parts.append(Portion("tp rank, in products", 1, micro, micro * job.tokens_within, why=why))
    return parts
