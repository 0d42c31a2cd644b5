"""Claims about memory: the state of training against a device, and the saving of ZeRO."""

from shardwright.config.cluster_facts import device_entry
from shardwright.config.job import JobSpec
from shardwright.config.phrase import Phrase, say
from shardwright.config.units import memory_text
from shardwright.explain.contradictions.told_claim import ToldClaim
from shardwright.memory.job_memories import job_accounts


def state_on_device(job: JobSpec) -> Phrase | None:
    """A share of the parameters whose state of training does not fit a device."""
    if job.cluster.device == "unknown":
        return None
    (account,) = job_accounts(job, [0])
    device_bytes = int(device_entry(job.cluster.device).memory_bytes)
    if account.state_bytes <= device_bytes:
        return None
    return say(
        "the weights of pipeline rank 0 are {weights}; with gradients and optimizer state they are {state}, and "
        "{device} has {memory}",
        weights=memory_text(account.parameters_bytes),
        state=memory_text(account.state_bytes),
        device=job.cluster.device,
        memory=memory_text(device_bytes),
    )


def zero_saving(job: JobSpec) -> Phrase | None:
    """ZeRO's share of the state that is saved, with the plan's number of replicas."""
    plan = job.plan
    if not plan.zero or plan.replicas == 1:
        return None
    whole = job.model_copy(update={"plan": plan.model_copy(update={"zero": 0, "zero_ranks": 0})})
    (with_it,), (without,) = job_accounts(job, [0]), job_accounts(whole, [0])
    if without.state_bytes <= with_it.state_bytes:  # the state is in host memory
        return None
    saved = 100 * (1 - with_it.state_bytes / without.state_bytes)
    values = {
        "zero": plan.zero,
        "replicas": plan.replicas,
        "saved": saved,
        "activations": memory_text(with_it.activations_bytes),
    }
    if plan.zero == 1:
        return say(
            "stage {zero} over {replicas:,} replicas saves {saved:.1f} % of the state of pipeline rank 0, and sends no "
            "more than an all-reduce; activations stay: {activations}",
            **values,
        )
    return say(
        "stage {zero} over {replicas:,} replicas saves {saved:.1f} % of the state of pipeline rank 0; it "
        "communicates in up to {microbatches:,} microbatches of a step, stage 1 once; activations stay: {activations}",
        microbatches=job.num_microbatches,
        **values,
    )


CLAIMS = (
    ToldClaim("state-on-device", say("a rank's share of the parameters fits its device"), state_on_device),
    ToldClaim("zero-saving", say("ZeRO saves 75 % of memory for nothing"), zero_saving),
)
