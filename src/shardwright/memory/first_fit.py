"""A change of a plan that makes it fit a device's memory: the first that fits of a list, the cheapest in time first.

Sharding of replicated state costs communication only in stage 3; full recompute costs a third of the time; smaller
microbatches have smaller products; more tensor or pipeline parallelism replaces data parallelism.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwright.config.base import PlanError
from shardwright.config.checks.check import job_faults
from shardwright.config.divisors import divisors
from shardwright.config.job import JobSpec
from shardwright.config.phrase import both, say
from shardwright.config.units import counted_phrase, memory_text
from shardwright.memory.job_memory import job_memory
from shardwright.schedule.job_program import plan_faults
from shardwright.sharding.groups import num_replicas

# Share of the memory that the account may take: operators need some while they run, and allocators waste some.
USABLE = 0.8


@dataclass(frozen=True)
class Change:
    """A change of plan fields, and the bytes that the rank with most memory then needs."""

    fields: dict[str, Any]
    needed_bytes: int

    def __str__(self) -> str:
        """ "plan.zero = 3 and plan.recompute = full"."""
        return self.words

    @property
    def words(self) -> str:
        """The changed fields as a phrase."""
        return both([f"plan.{name} = {value}" for name, value in self.fields.items()])


def first_fit(job: JobSpec, limit_bytes: int) -> Change | None:
    """The first change whose account fits `limit_bytes`; None if no candidate fits."""
    for fields in _candidates(job):
        changed = job.model_copy(update={"plan": job.plan.model_copy(update=fields)})
        if job_faults(changed) or plan_faults(changed):
            continue
        try:
            needed_bytes = max(memory.total_bytes for memory in job_memory(changed))
        except PlanError:  # a memory budget that can't be met
            continue
        if needed_bytes <= USABLE * limit_bytes:
            return Change(fields, needed_bytes)
    return None


def refusal_of_machine(job: JobSpec, machine_bytes: int) -> str:
    """The fault of a job whose ranks would all run on one machine and hold more than its memory, with the arithmetic
    and a way out; empty if the machine has enough. Raises PlanError."""
    needs = [memory.total_bytes for memory in job_memory(job)]
    world, num_alike = job.plan.world, job.plan.world // len(needs)
    if num_alike * sum(needs) <= machine_bytes:
        return ""
    change = first_fit(job, machine_bytes // world)
    return say(
        "the {ranks} will hold {needed} ({arithmetic}), and this machine has {room} of memory; {way_out}",
        ranks=counted_phrase(world, "rank"),
        needed=memory_text(num_alike * sum(needs)),
        arithmetic=f"{num_alike:,} x ({' + '.join(map(memory_text, needs))})",
        room=memory_text(machine_bytes),
        way_out=say("use a smaller model, sequence or microbatch, or torchrun over several machines")
        if change is None
        else say(
            "with {change} no rank holds more than {needed}",
            change=change.words,
            needed=memory_text(change.needed_bytes),
        ),
    )


def way_out(job: JobSpec, room_bytes: int) -> str:
    """One sentence of advice. `room_bytes` is the memory that was available to the failed rank."""
    room = memory_text(room_bytes)
    change = first_fit(job, room_bytes)
    if change is None:
        return say(
            "There were {room} for this rank; no plan that was tried fits {share:.0%} of that (more ZeRO, recompute, "
            "smaller microbatches, up to 8 times the tp or pp): use a smaller model or sequence, or more memory",
            room=room,
            share=USABLE,
        )
    return say(
        "There were {room} for this rank; {change} would have fitted: no rank then holds more than {needed}",
        room=room,
        change=change.words,
        needed=memory_text(change.needed_bytes),
    )


def _candidates(job: JobSpec) -> Iterator[dict[str, Any]]:
    plan = job.plan
    zeros: list[dict[str, Any]] = [{"zero": stage} for stage in range(plan.zero + 1, 4) if num_replicas(plan) > 1]
    recompute: list[dict[str, Any]] = [{"recompute": "full"}] if plan.recompute == "none" else []
    smaller: list[dict[str, Any]] = [
        {"microbatch_size": size} for size in reversed(divisors(plan.microbatch_size)) if size < plan.microbatch_size
    ]
    yield from zeros
    yield from recompute
    yield from smaller
    everything = {name: value for change in (*zeros[-1:], *recompute, *smaller[-1:]) for name, value in change.items()}
    if len(everything) > 1:
        yield everything
    for factor in (2, 4, 8):
        for degree in ("tp", "pp"):
            # As many ranks as before, if dp is divisible; the layout of stages becomes even.
            fields: dict[str, Any] = {degree: getattr(plan, degree) * factor}
            if plan.dp % factor == 0:
                fields["dp"] = plan.dp // factor
            if degree == "pp" and plan.layout:
                fields["layout"] = []
            yield fields
            yield everything | fields
