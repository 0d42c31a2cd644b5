"""Advice for a job whose ranks ran out of memory: the account finds a change of the plan that would have fitted."""

from shardwright.config.job import JobSpec
from shardwright.config.units import memory_text
from shardwright.memory.first_fit import USABLE, first_fit


def way_out(job: JobSpec, room_bytes: int) -> str:
    """One sentence of advice. `room_bytes` is the memory that was available to the failed rank."""
    room = f"There were {memory_text(room_bytes)} for this rank"
    change = first_fit(job, room_bytes)
    if change is None:
        return (
            f"{room}; no plan that was tried fits {USABLE:.0%} of that (more ZeRO, recompute, smaller microbatches, up "
            f"to 8 times the tp or pp): use a smaller model or sequence, or more memory"
        )
    return f"{room}; {change} would have fitted: no rank then holds more than {memory_text(change.needed_bytes)}"
