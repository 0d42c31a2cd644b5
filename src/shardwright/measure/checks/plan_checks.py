"""All checks of a plan that need no device, one after the other."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.phrase import ENGLISH, below, in_language, say
from shardwright.config.progress_records import tell_part, tell_share
from shardwright.config.units import counted_phrase
from shardwright.measure.checks.host_waits import reading_faults, wait_faults
from shardwright.measure.checks.kernel_demands import checked_step
from shardwright.measure.checks.message_order import ALL_RULES, message_faults
from shardwright.measure.checks.message_record import recorded_steps
from shardwright.measure.checks.recorded_runs import RankAccesses, recorded_accesses

MOST_RANKS = 64  # each is run dry, in about a second
_MOST_FAULTS = 8
_PARTS = 3  # of the work, about equally long
_NAMES = {
    "messages": say("messages"),
    "kernels": say("kernels"),
    "accesses": say("accesses"),
    "waits": say("waits"),
}


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
    tell_part(say("messages"), 0, _PARTS)
    checks = [_timed("messages", _messages, job)]
    tell_part(say("kernels"), 1, _PARTS)
    checks.append(_timed("kernels", _kernels, job))
    tell_part(say("accesses to memory"), 2, _PARTS)
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
    subject = say(
        "{operations} of {ranks} in two steps, under NCCL's rules ({rules})",
        operations=counted_phrase(number, "operation"),
        ranks=counted_phrase(len(records), "rank"),
        rules=tuple(rules.name for rules in ALL_RULES),
    )
    return subject, message_faults(records)


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
    subject = say(
        "{calls} of {operators}, against what their kernels demand",
        calls=counted_phrase(number, "call"),
        operators=counted_phrase(len(calls), "operator"),
    )
    return subject, list(faults)


def _accesses(ranks: list[RankAccesses]) -> tuple[str, tuple[str, ...]]:
    number = sum(rank.num_accesses for rank in ranks)
    faults = dict.fromkeys(fault for rank in ranks for fault in rank.faults)
    subject = say(
        "{number:,} accesses to memory of {ranks} in two steps, two saves and an evaluation, against the order of "
        "streams and host",
        number=number,
        ranks=counted_phrase(len(ranks), "rank"),
    )
    return subject, tuple(faults)


def _waits(job: JobSpec, ranks: list[RankAccesses]) -> tuple[str, tuple[str, ...]]:
    faults = dict.fromkeys(fault for rank in ranks for fault in all_wait_faults(job, rank))
    longest = max(ranks, key=lambda rank: len(rank.waits))
    most_to_read = max(len(rank.waits_to_read) for rank in ranks)
    subject = say(
        "the host waits for the device {times} in {steps} of the loop, at most, and {times_to_read} for {lines}",
        times=counted_phrase(len(longest.waits), "time"),
        steps=counted_phrase(longest.num_steps, "step"),
        times_to_read=counted_phrase(most_to_read, "time"),
        lines=counted_phrase(longest.num_lines, "progress line"),
    )
    return subject, tuple(faults)


def all_wait_faults(job: JobSpec, rank: RankAccesses) -> list[str]:
    """Faults if the host of a rank waited too often, in steps or for their measurements."""
    in_steps = wait_faults(job, rank.waits, rank.num_steps, rank.passes)
    return in_steps + reading_faults(job, rank.waits_to_read, rank.num_lines)


def checks_text(job_name: str, checks: list[PlanCheck], language: str = ENGLISH) -> str:
    """The checks as text for the user, in a language."""
    lines: list[str] = [say("checks of {name}, as on CUDA, without a device", name=job_name)]
    for check in checks:
        verdict = say("right") if not check.faults else counted_phrase(len(check.faults), "fault")
        lines.append(
            say(
                "{name}: {verdict}; {subject}, in {seconds:.1f} s",
                name=_NAMES[check.name],
                verdict=verdict,
                subject=check.subject,
                seconds=check.took_s,
            )
        )
        lines += [say("  {fault}", fault=fault) for fault in check.faults[:_MOST_FAULTS]]
        if len(check.faults) > _MOST_FAULTS:
            lines.append(say("  and {number} more", number=len(check.faults) - _MOST_FAULTS))
    return in_language(below(lines), language)
