"""A run's steps as predicted beside what rank 0 measured: time by cause, memory by kind, bytes by axis.

Time is there where the cluster's device is known, or calibrated; memory and bytes always are.
"""

from collections import Counter
from dataclasses import replace
from typing import Any, Protocol

from shardwright.account.job_memory import rank_memory
from shardwright.account.persistent_buffers import kept_bytes
from shardwright.account.rank_state import rank_state
from shardwright.account.step_collectives import step_ledger
from shardwright.account.zero_replay import replay
from shardwright.config.job import JobSpec
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.units import bytes_text, counted, seconds_text
from shardwright.report.text_columns import aligned
from shardwright.schedule.job_program import job_program, steps_to_fill
from shardwright.sharding.memory_account import RankMemory

_COMPUTING = "computing"
# What a rank stands still for, by the axis of its ledger and by the part of a predicted step; what is of no part of
# these is computing.
_CAUSES = {
    "tensor parallel": (("tp", "etp"), ("tensor",)),
    "context parallel": (("cp",), ("context",)),
    "experts": (("ep",), ("expert",)),
    "pipeline": (("pp", "ends"), ("messages", "bubble")),
    "replicas": ((), ("data",)),  # all other axes
}
_KINDS = ("parameters", "gradients", "optimizer", "buffers", "host")


class SeenBytes(Protocol):
    """Bytes of a span that a rank measured."""

    @property
    def first(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def axis_bytes(self) -> dict[str, int]: ...


class Seen(Protocol):
    """The measurements of a rank (train/steps_measured.py)."""

    @property
    def num_steps(self) -> int: ...
    @property
    def step_s(self) -> float: ...
    @property
    def blocked_s(self) -> dict[str, float]: ...
    @property
    def moved(self) -> SeenBytes | None: ...
    @property
    def memory(self) -> RankMemory | None: ...
    @property
    def peak_memory_bytes(self) -> int: ...
    @property
    def device(self) -> str: ...


def compared_dict(job: JobSpec, seen: Seen) -> dict[str, Any]:
    """Predicted and measured, each [predicted, measured], null where one is not known: seconds of a step and by cause,
    bytes of memory by kind and of a step's collectives by axis; of the first rank. Where the job does not say on which
    device it runs, times are predicted for the one that it ran on."""
    is_recognised = job.cluster.device == "unknown" and seen.device != ""
    named = job.cluster.model_copy(update={"device": seen.device}) if is_recognised else job.cluster
    predicted_s, why_not = _predicted_s(job.model_copy(update={"cluster": named}))
    measured_s = _measured_s(seen)
    causes = [cause for cause in (_COMPUTING, *_CAUSES) if predicted_s.get(cause) or measured_s.get(cause)]
    memory = {} if seen.memory is None else _memory(job, seen.memory)
    return {
        "num_steps": seen.num_steps,
        "whole_step_s": [sum(predicted_s.values()) if predicted_s else None, seen.step_s],
        "time": {cause: [predicted_s.get(cause), measured_s.get(cause, 0.0)] for cause in causes},
        "memory_bytes": memory,
        "peak_memory_bytes": seen.peak_memory_bytes,
        "axis_bytes": {} if seen.moved is None else _bytes(job, seen.moved),
        "time_not_predicted": why_not,
        "predicted_for": seen.device if is_recognised and predicted_s else None,
    }


def _predicted_s(job: JobSpec) -> tuple[dict[str, float], str]:
    """Seconds of a step by cause; or why there are none."""
    if job.cluster.device == "unknown":
        way_out = "set cluster.device to a file of `shardwright calibrate`, or to a device of the catalog"
        return {}, f"the cluster's device is not known; {way_out}"
    from shardwright.planner.own_plan import estimate  # it takes numpy, and the other accounts do not

    try:
        step = estimate(job).step
    except (KeyError, ValueError) as error:
        return {}, str(error.args[0])
    seconds = {cause: float(sum(getattr(step, part) for part in parts)) for cause, (_, parts) in _CAUSES.items()}
    return {_COMPUTING: float(step.total) - sum(seconds.values())} | seconds, ""


def _measured_s(seen: Seen) -> dict[str, float]:
    """Seconds of a step by cause."""
    causes = {axis: cause for cause, (axes, _) in _CAUSES.items() for axis in axes}
    by_cause: Counter[str] = Counter()
    for axis, seconds in seen.blocked_s.items():
        by_cause[causes.get(axis.split(" ")[0], "replicas")] += seconds  # type: ignore[assignment]
    return {_COMPUTING: seen.step_s - sum(by_cause.values())} | dict(by_cause)


def _memory(job: JobSpec, measured: RankMemory) -> dict[str, list[int]]:
    """Bytes by kind, of those that a run measures."""
    # Of the buffers a run measures those of the pool and what stays; messages on their way are not among them.
    program = job_program(job, steps_to_fill(job))
    held = rank_state(job, program, 0)
    buffers_bytes = replay(job, program, 0, held).pool_bytes + kept_bytes(job, held)
    account = replace(rank_memory(job, program, 0), buffers_bytes=buffers_bytes)
    both = {kind: [getattr(memory, f"{kind}_bytes") for memory in (account, measured)] for kind in _KINDS}
    return {kind: values for kind, values in both.items() if any(values)}


def _bytes(job: JobSpec, seen: SeenBytes) -> dict[str, list[float]]:
    """Bytes of a step's collectives by axis, as the ledger of a rank counts them: those of a span, by its steps. The
    span has the batch that it begins with; where the pipeline never drains, its steps are one stream."""
    at_span, num_bytes = job.at_step(seen.first), Counter[str]()
    is_stream = not SCHEDULES[job.plan.schedule].drains
    program = job_program(at_span, seen.num_steps if is_stream else 1)
    for words, traffic in step_ledger(at_span, program, 0).items():
        num_bytes[words.partition(" ")[2]] += traffic.payload_bytes * (1 if is_stream else seen.num_steps)
    pairs = {axis: (num_bytes[axis], seen.axis_bytes.get(axis, 0)) for axis in sorted({*num_bytes, *seen.axis_bytes})}
    return {axis: [_each(size, seen.num_steps) for size in both] for axis, both in pairs.items()}


def _each(size: int, num_steps: int) -> float:
    """Bytes of one of some steps, a whole number where it is one."""
    return size / num_steps if size % num_steps else size // num_steps


def compared_text(compared: dict[str, Any]) -> str:
    """A comparison for reading."""
    rows = [["of rank 0", "predicted", "measured", ""]]
    rows.append(["a step", *_two(compared["whole_step_s"], seconds_text), _apart(compared["whole_step_s"])])
    for cause, both in compared["time"].items():
        rows.append([f"  {cause}" if cause == _COMPUTING else f"  waiting: {cause}", *_two(both, seconds_text), ""])
    for kind, both in compared["memory_bytes"].items():
        rows.append([f"{kind} in memory", *_two(both, bytes_text), _equal(both)])
    for axis, both in compared["axis_bytes"].items():
        rows.append([f"bytes of a step on {axis}", *_two(both, _whole_bytes_text), _equal(both)])
    note = f"\n  time is not predicted: {compared['time_not_predicted']}" if compared["time_not_predicted"] else ""
    if compared["predicted_for"]:
        note += f"\n  time is predicted for {compared['predicted_for']} of the catalog, on which this ran"
    heading = f"predicted beside measured, the median of {counted(compared['num_steps'], 'step')}:"
    return heading + "\n" + aligned([[f"  {row[0]}", *row[1:]] for row in rows]) + note


def _two(both: list[Any], text: Any) -> list[str]:
    return ["-" if value is None else text(value) for value in both]


def _whole_bytes_text(size: float) -> str:
    return bytes_text(round(size))


def _apart(both: list[float | None]) -> str:
    predicted, measured = both
    return "" if predicted is None or not measured else f"{predicted / measured - 1:+.1%}"


def _equal(both: list[Any]) -> str:
    return "equal" if both[0] == both[1] else ""
