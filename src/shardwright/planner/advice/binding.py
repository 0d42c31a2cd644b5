"""The limit of a plan, in words: what binds it, by the reasons why no plan beside it is better."""

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.units import GIB, seconds_text
from shardwright.memory.rank_estimate import Memory
from shardwright.planner.advice.reasons import LEAST_SHARE, PARTS, Reason
from shardwright.planner.search.plan_price import room_bytes
from shardwright.simulate.closed_form import StepTime


def binding(time: StepTime, memory: Memory, job: JobSpec, why: list[Reason]) -> str:
    """The limit of a plan, in words: memory, if a faster neighbour does not fit; and the largest part of the step
    besides computing. `why` are the reasons of the plan."""
    shares = {name: float(getattr(time, name) / time.total) for name in PARTS}
    waste = max((name for name in PARTS if name != "compute"), key=lambda name: shares[name])
    return say(
        "computing is {compute:.0%} of the step; the largest loss is {part}, {share:.1%}; {memory}",
        compute=shares["compute"],
        part=PARTS[waste],
        share=shares[waste],
        memory=_memory_limit(time, memory, job, why),
    )


def _memory_limit(time: StepTime, memory: Memory, job: JobSpec, why: list[Reason]) -> str:
    room = room_bytes(job)
    faster = [reason for reason in why if reason.excess_bytes > 0 and reason.slower_s <= -LEAST_SHARE * time.total]
    if not faster:
        return say(
            "memory does not bind: {share:.0%} of {room:.0f} GiB is used, and no plan beside this one that needs more "
            "is faster",
            share=float(memory.process) / room,
            room=room / GIB,
        )
    best = min(faster, key=lambda reason: reason.slower_s)
    return say(
        "memory binds: {field} {value} would be {seconds} faster and needs {excess:.1f} GiB more than {limit}",
        field=best.field,
        value=best.other,
        seconds=seconds_text(-best.slower_s),
        excess=best.excess_bytes / GIB,
        limit=_limit_words(best),
    )


def _limit_words(reason: Reason) -> str:
    """The limit that a plan which does not fit exceeds."""
    if reason.is_tight:
        return say("surely fits")
    return say("its share of the host") if reason.is_host else say("there is")
