"""A run's predicted steps compared with the measurements of rank 0: time by cause, memory by kind, bytes by axis.

Time is compared if the cluster's device is known or calibrated; memory and bytes always are.
"""

from collections import Counter
from dataclasses import replace
from typing import Any, Protocol

from shardwright.config.base import error_text
from shardwright.config.job import JobSpec
from shardwright.config.percent import percent_text
from shardwright.config.phrase import ENGLISH, say
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.units import bytes_text, counted_phrase, seconds_text
from shardwright.memory.job_memory import rank_memory
from shardwright.memory.persistent_buffers import kept_bytes
from shardwright.memory.rank_state import rank_state
from shardwright.memory.step_collectives import step_ledger
from shardwright.memory.zero_replay import replay
from shardwright.report.document import AlignedRows, Lines, Part
from shardwright.schedule.job_program import job_program, steps_to_fill
from shardwright.sharding.memory_account import RankMemory

_COMPUTING = "computing"
# Causes for which a rank waits, each with the axes of its ledger and the parts of a predicted step. All other time is
# computing.
_CAUSES = {
    "tensor parallel": (("tp", "etp"), ("tensor",)),
    "context parallel": (("cp",), ("context",)),
    "experts": (("ep",), ("expert",)),
    "pipeline": (("pp", "ends"), ("messages", "bubble")),
    "replicas": ((), ("data",)),  # all other axes
}
_KINDS = ("parameters", "gradients", "optimizer", "buffers", "host")
_CAUSE_WORDS = {
    _COMPUTING: say("computing"),
    "tensor parallel": say("tensor parallel"),
    "context parallel": say("context parallel"),
    "experts": say("experts"),
    "pipeline": say("pipeline"),
}
_KIND_WORDS = {
    "parameters": say("parameters"),
    "gradients": say("gradients"),
    "optimizer": say("optimizer"),
    "buffers": say("buffers"),
    "host": say("host"),
}


class MeasuredBytes(Protocol):
    """Bytes of a span of steps that a rank measured."""

    @property
    def first(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def axis_bytes(self) -> dict[str, int]: ...


class MeasuredSteps(Protocol):
    """The measurements of a rank (train/steps_measured.py)."""

    @property
    def num_steps(self) -> int: ...
    @property
    def step_s(self) -> float: ...
    @property
    def blocked_s(self) -> dict[str, float]: ...
    @property
    def moved(self) -> MeasuredBytes | None: ...
    @property
    def memory(self) -> RankMemory | None: ...
    @property
    def peak_memory_bytes(self) -> int: ...
    @property
    def device(self) -> str: ...


def compared_dict(job: JobSpec, measured: MeasuredSteps) -> dict[str, Any]:
    """Numbers of the first rank, each [predicted, measured], null if unknown: seconds of a step and by cause, bytes of
    memory by kind, bytes of a step's collectives by axis. If the job names no device, times are predicted for the
    device on which it ran."""
    is_recognised = job.cluster.device == "unknown" and measured.device != ""
    cluster = job.cluster.model_copy(update={"device": measured.device}) if is_recognised else job.cluster
    predicted_s, reason = _predicted_s(job.model_copy(update={"cluster": cluster}))
    measured_s = _measured_s(measured)
    causes = [cause for cause in (_COMPUTING, *_CAUSES) if predicted_s.get(cause) or measured_s.get(cause)]
    memory = {} if measured.memory is None else _memory(job, measured.memory)
    return {
        "num_steps": measured.num_steps,
        "whole_step_s": [sum(predicted_s.values()) if predicted_s else None, measured.step_s],
        "time": {cause: [predicted_s.get(cause), measured_s.get(cause, 0.0)] for cause in causes},
        "memory_bytes": memory,
        "peak_memory_bytes": measured.peak_memory_bytes,
        "axis_bytes": {} if measured.moved is None else _bytes(job, measured.moved),
        "time_not_predicted": reason,
        "predicted_for": measured.device if is_recognised and predicted_s else None,
    }


def _predicted_s(job: JobSpec) -> tuple[dict[str, float], str]:
    """Seconds of a step by cause; or the reason why there are none."""
    if job.cluster.device == "unknown":
        return {}, _unknown_device()
    from shardwright.planner.own_plan import estimate  # needs numpy, which the other accounts do not

    try:
        step = estimate(job).step
    except (KeyError, ValueError) as error:
        return {}, error_text(error)
    seconds = {cause: float(sum(getattr(step, part) for part in parts)) for cause, (_, parts) in _CAUSES.items()}
    return {_COMPUTING: float(step.total) - sum(seconds.values())} | seconds, ""


def _unknown_device() -> str:
    way_out = say("set cluster.device to a file of `shardwright calibrate`, or to a device of the catalog")
    return say("the cluster's device is not known; {way_out}", way_out=way_out)


def _measured_s(measured: MeasuredSteps) -> dict[str, float]:
    """Measured seconds of a step by cause."""
    causes = {axis: cause for cause, (axes, _) in _CAUSES.items() for axis in axes}
    by_cause: Counter[str] = Counter()
    for axis, seconds in measured.blocked_s.items():
        by_cause[causes.get(axis.split(" ")[0], "replicas")] += seconds  # type: ignore[assignment]
    return {_COMPUTING: measured.step_s - sum(by_cause.values())} | dict(by_cause)


def _memory(job: JobSpec, measured: RankMemory) -> dict[str, list[int]]:
    """Bytes by kind, for the kinds that a run measures."""
    # A run measures the buffers of the pool and the persistent ones, but no messages in flight.
    program = job_program(job, steps_to_fill(job))
    state = rank_state(job, program, 0)
    buffers_bytes = replay(job, program, 0, state).pool_bytes + kept_bytes(job, state)
    account = replace(rank_memory(job, program, 0), buffers_bytes=buffers_bytes)
    pairs = {kind: [getattr(memory, f"{kind}_bytes") for memory in (account, measured)] for kind in _KINDS}
    return {kind: values for kind, values in pairs.items() if any(values)}


def _bytes(job: JobSpec, measured: MeasuredBytes) -> dict[str, list[float]]:
    """Bytes of a step's collectives by axis, as the ledger of a rank counts them: those of a span, over its steps.

    All steps of a span have the batch of the first. If the pipeline never drains, the steps are one stream.
    """
    at_span, num_bytes = job.at_step(measured.first), Counter[str]()
    is_stream = not SCHEDULES[job.plan.schedule].drains
    program = job_program(at_span, measured.num_steps if is_stream else 1)
    for name, traffic in step_ledger(at_span, program, 0).items():
        num_bytes[name.partition(" ")[2]] += traffic.payload_bytes * (1 if is_stream else measured.num_steps)
    pairs = {
        axis: (num_bytes[axis], measured.axis_bytes.get(axis, 0)) for axis in sorted({*num_bytes, *measured.axis_bytes})
    }
    return {axis: [_per_step(size, measured.num_steps) for size in pair] for axis, pair in pairs.items()}


def _per_step(size: int, num_steps: int) -> float:
    """Bytes divided by steps, as an int if there is no remainder."""
    return size / num_steps if size % num_steps else size // num_steps


def compared_text(compared: dict[str, Any], language: str = ENGLISH) -> str:
    """A comparison as text, in a language."""
    step = compared["whole_step_s"]
    rows: list[list[str]] = [[say("  of rank 0"), say("predicted"), say("measured"), ""]]
    rows.append([say("  a step"), *_pair_texts(step, seconds_text), _difference_text(step)])
    for cause, pair in compared["time"].items():
        name = say("    {cause}", cause=_CAUSE_WORDS.get(cause, cause))
        if cause == "replicas":
            name = say("    waiting: replicas")
        elif cause != _COMPUTING:
            name = say("    waiting: {cause}", cause=_CAUSE_WORDS.get(cause, cause))
        rows.append([name, *_pair_texts(pair, seconds_text), ""])
    for kind, pair in compared["memory_bytes"].items():
        name = say("  {kind} in memory", kind=_KIND_WORDS.get(kind, kind))
        rows.append([name, *_pair_texts(pair, bytes_text), _equal_text(pair)])
    for axis, pair in compared["axis_bytes"].items():
        rows.append(
            [say("  bytes of a step on {axis}", axis=axis), *_pair_texts(pair, _whole_bytes_text), _equal_text(pair)]
        )
    steps = counted_phrase(compared["num_steps"], "step")
    lines: list[Part] = [say("predicted beside measured, the median of {steps}:", steps=steps), AlignedRows(rows)]
    if reason := compared["time_not_predicted"]:
        lines.append(say("  time is not predicted: {reason}", reason=reason))
    if device := compared["predicted_for"]:
        lines.append(say("  time is predicted for {device} of the catalog, on which this ran", device=device))
    return Lines(lines).text(language)


def _pair_texts(pair: list[Any], text: Any) -> list[str]:
    return ["-" if value is None else text(value) for value in pair]


def _whole_bytes_text(size: float) -> str:
    return bytes_text(round(size))


def _difference_text(pair: list[float | None]) -> str:
    predicted, measured = pair
    return "" if predicted is None or not measured else percent_text(predicted / measured - 1, "+.1%")


def _equal_text(pair: list[Any]) -> str:
    return say("equal") if pair[0] == pair[1] else ""
