"""Claims about collectives where others belong."""

from shardwright.config.job import JobSpec
from shardwright.config.phrase import Phrase, say
from shardwright.config.units import bytes_text
from shardwright.explain.contradictions.told_claim import ToldClaim
from shardwright.schedule.message_sizes import message_bytes


def gather_after_attention(job: JobSpec) -> Phrase | None:
    """An all-gather after attention, where ranks of tp hold parts of a sum."""
    plan = job.plan
    if plan.tp == 1:
        return None
    collective = "reduce_scatter" if plan.sequence_parallel else "all_reduce"
    num_bytes = message_bytes(job) * (plan.tp if plan.sequence_parallel else 1)  # of all tokens
    return say(
        "each of {tp} ranks has a part of a sum after its heads' output product: they need {collective} of "
        "{size}, and all_gather would put {tp} parts side by side",
        tp=plan.tp,
        collective=collective,
        size=bytes_text(num_bytes),
    )


def broadcast_after_reduce(job: JobSpec) -> Phrase | None:
    """Parameters that are broadcast after an all-reduce of gradients."""
    plan = job.plan
    if plan.zero or plan.replicas == 1:
        return None
    return say(
        "{replicas:,} replicas begin alike and add the same sum of gradients, so they stay alike: after the "
        "all_reduce nobody sends parameters",
        replicas=plan.replicas,
    )


CLAIMS = (
    ToldClaim("gather-after-attention", say("after attention comes an all-gather"), gather_after_attention),
    ToldClaim("broadcast-after-reduce", say("parameters are broadcast after the all-reduce"), broadcast_after_reduce),
)
