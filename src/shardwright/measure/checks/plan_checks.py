"""All checks of a plan that need no device, one after the other."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.progress_records import tell_part, tell_share
from shardwright.config.units import counted
from shardwright.measure.checks.host_waits import reading_faults, wait_faults
from shardwright.measure.checks.kernel_demands import checked_step
from shardwright.measure.checks.message_order import ALL_RULES, message_faults
from shardwright.measure.checks.message_record import recorded_steps
from shardwright.measure.checks.recorded_runs import RankAccesses, recorded_accesses

MOST_RANKS = 64  # each is run dry, in about a second
_MOST_FAULTS = 8
_PARTS = 3  # of the work, about equally long


@dataclass(frozen=True)
class PlanCheck:
    """A check: its name, its subject in words, the faults, and its duration."""

    name: str
    subject: str
    faults: tuple[str, ...]
    took_s: float

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


def check_plan(job: JobSpec) -> list[PlanCheck]:
    """Check the behaviour of a job's ranks on CUDA. PlanError for more ranks than can be run dry here."""
    world = job.plan.world
    if world > MOST_RANKS:
        raise PlanError(
            say("checks of {name}", name=job.name),
            [
                say(
                    "every rank is run dry, and the plan has {degrees} = {world:,} of them, more than {most_ranks}; "
                    "use less dp, with as much smaller a batch: replicas do the same",
                    degrees=job.plan.degrees,
                    world=world,
                    most_ranks=MOST_RANKS,
                )
            ],
        )
    tell_part("messages", 0, _PARTS)
    checks = [_timed("messages", _messages, job)]
    tell_part("kernels", 1, _PARTS)
    checks.append(_timed("kernels", _kernels, job))
    tell_part("accesses to memory", 2, _PARTS)
    began_s = time.perf_counter()
    ranks = [recorded_accesses(job, rank) for rank in _told_ranks(job)]
    took_s = time.perf_counter() - began_s
    return [*checks, PlanCheck("accesses", *_accesses(ranks), took_s), PlanCheck("waits", *_waits(job, ranks), 0.0)]


def _timed(name: str, check: Callable[[JobSpec], tuple[str, list[str]]], job: JobSpec) -> PlanCheck:
    began_s = time.perf_counter()
    subject, faults = check(job)
    return PlanCheck(name, subject, tuple(faults), time.perf_counter() - began_s)


def _messages(job: JobSpec) -> tuple[str, list[str]]:
    records = recorded_steps(job)
    number = sum(len(record.operations) for record in records)
    rules = ", ".join(rules.name for rules in ALL_RULES)
    subject = f"{counted(number, 'operation')} of {counted(len(records), 'rank')} in two steps"
    return f"{subject}, under NCCL's rules ({rules})", message_faults(records)


def _first_ranks(job: JobSpec) -> range:
    """One rank of each place in the pipeline: the others of the place do the same."""
    return range(0, job.plan.world, job.plan.world // job.plan.pp)


def _told_ranks(job: JobSpec) -> Iterator[int]:
    """Yield the first ranks, and record how many of them are done."""
    ranks = _first_ranks(job)
    for number, rank in enumerate(ranks):
        tell_share(f"rank {rank}", number / len(ranks))
        yield rank


def _kernels(job: JobSpec) -> tuple[str, list[str]]:
    calls, faults = Counter[str](), dict[str, None]()
    for rank in _told_ranks(job):
        checked = checked_step(job, rank)
        faults |= checked.faults
        calls.update(checked.calls)
    number = calls.total()
    subject = f"{counted(number, 'call')} of {counted(len(calls), 'operator')}, against what their kernels demand"
    return subject, list(faults)


def _accesses(ranks: list[RankAccesses]) -> tuple[str, tuple[str, ...]]:
    number = sum(rank.num_accesses for rank in ranks)
    faults = dict.fromkeys(fault for rank in ranks for fault in rank.faults)
    steps = f"{counted(len(ranks), 'rank')} in two steps, two saves and an evaluation"
    return f"{number:,} accesses to memory of {steps}, against the order of streams and host", tuple(faults)


def _waits(job: JobSpec, ranks: list[RankAccesses]) -> tuple[str, tuple[str, ...]]:
    faults = dict.fromkeys(fault for rank in ranks for fault in all_wait_faults(job, rank))
    longest = max(ranks, key=lambda rank: len(rank.waits))
    steps = counted(longest.num_steps, "step")
    most_to_read = max(len(rank.waits_to_read) for rank in ranks)
    subject = f"the host waits for the device {counted(len(longest.waits), 'time')} in {steps} of the loop, at most"
    return f"{subject}, and {counted(most_to_read, 'time')} for {counted(longest.num_lines, 'progress line')}", (
        tuple(faults)
    )


def all_wait_faults(job: JobSpec, rank: RankAccesses) -> list[str]:
    """Faults if the host of a rank waited too often, in steps or for their measurements."""
    in_steps = wait_faults(job, rank.waits, rank.num_steps, rank.passes)
    return in_steps + reading_faults(job, rank.waits_to_read, rank.num_lines)


def checks_text(job_name: str, checks: list[PlanCheck]) -> str:
    """The checks as text for the user."""
    lines = [f"checks of {job_name}, as on CUDA, without a device"]
    for check in checks:
        verdict = "right" if not check.faults else counted(len(check.faults), "fault")
        lines.append(f"{check.name}: {verdict}; {check.subject}, in {check.took_s:.1f} s")
        lines += [f"  {fault}" for fault in check.faults[:_MOST_FAULTS]]
        if len(check.faults) > _MOST_FAULTS:
            lines.append(f"  and {len(check.faults) - _MOST_FAULTS} more")
    return "\n".join(lines)
