"""A timeline as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing, in the Trace Event Format.

A process is a rank, and a thread is one of its resources. A flow joins a send and its receive. Counters show buffers:
activations and others, and their bytes if known. The format counts in microseconds. Costs without a unit, F = 1, are
drawn as milliseconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwright.config.phrase import say
from shardwright.report.timeline.colours import NAMES
from shardwright.schedule.action import RECV, SEND, Action, Kind
from shardwright.schedule.dependencies import RECEIVED, TRAVELS, Product
from shardwright.schedule.schedule import Program
from shardwright.simulate.buffer_curves import Curve
from shardwright.simulate.timeline import Resource, Span, Timeline


@dataclass(frozen=True, slots=True)
class Message:
    """An activation or a gradient between two ranks. `about` is (stage that made it, microbatch, step).

    It begins to leave at the start of `send`, frees its link at the end of `send`, and has arrived at the end of
    `receive`.
    """

    sender: int
    receiver: int
    backward: bool
    about: tuple[int, int, int]
    send: Span
    receive: Span


def messages(timeline: Timeline) -> Iterator[Message]:
    """All messages, by sender and in the order of its sends."""
    receives: dict[tuple[bool, tuple[int, int, int]], Span] = {}
    for row in timeline.ranks:
        for span in row.spans:
            action = span.action
            if action.kind in RECV:
                product = RECEIVED[action.kind]
                source_stage = action.stage - TRAVELS[product]
                receives[product is Product.GRADIENT, (source_stage, action.microbatch, span.step)] = span
    for rank, row in enumerate(timeline.ranks):
        for span in row.spans:
            action = span.action
            if action.kind in SEND:
                backward = action.kind is Kind.SEND_BACKWARD
                about = action.stage, action.microbatch, span.step
                yield Message(rank, action.peer, backward, about, send=span, receive=receives[backward, about])


_KINDS = NAMES | {
    "SF": "send forward",
    "RF": "receive forward",
    "SB": "send backward",
    "RB": "receive backward",
    "O": "forward and backward as one",
}


def trace(timeline: Timeline, name: str, microseconds: float = 1000.0, unit: str = "") -> dict[str, Any]:
    """The JSON object of a timeline. `microseconds` is the length of one unit of the timeline's times."""
    note = unit or say(
        "the costs have no unit; one of theirs is drawn as {microseconds:g} us", microseconds=microseconds
    )
    events: list[dict[str, Any]] = []
    threads: dict[int, tuple[int, int]] = {}  # (pid, tid) by the identity of the span
    for rank, row in enumerate(timeline.ranks):
        events.append(_metadata("process_name", rank, 0, f"rank {rank}"))
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
        lanes = _lanes(row.spans)
        for tid, (lane, spans) in enumerate(lanes):
            events.append(_metadata("thread_name", rank, tid, lane))
            for span in spans:
                threads[id(span)] = rank, tid
                events.append(_slice(timeline.program, span, rank, tid, microseconds=microseconds))
        for buffer, use in row.kept.items():
            events += _counter(f"{buffer} alive", "alive", use.count, rank, microseconds=microseconds)
            events += _counter(f"bytes of {buffer}", "bytes", use.num_bytes or (), rank, microseconds=microseconds)
    for number, message in enumerate(messages(timeline)):
        common = {"name": "backward" if message.backward else "forward", "cat": "message", "id": number}
        for phase, span, extra in (("s", message.send, {}), ("f", message.receive, {"bp": "e"})):
            pid, tid = threads[id(span)]
            events.append({"ph": phase, **common, "pid": pid, "tid": tid, "ts": span.start * microseconds, **extra})
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"name": name, "time": note, "program": timeline.program.name},
    }


def _lanes(spans: tuple[Span, ...]) -> list[tuple[str, list[Span]]]:
    """The threads of a rank, with their spans. Slices of a thread must not overlap, so messages that arrive at one time
    get several threads."""
    lanes: list[tuple[str, list[Span]]] = [(str(resource), []) for resource in Resource if resource != "arrival"]
    lane_of = dict(lanes)
    arrivals: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if span.resource is not Resource.ARRIVAL:
            lane_of[span.resource].append(span)
            continue
        free_lane = next((lane for lane in arrivals if lane[-1].end <= span.start), None)
        if free_lane is None:
            arrivals.append([span])
        else:
            free_lane.append(span)
    lanes += [(f"arrival {n}" if n else "arrival", lane) for n, lane in enumerate(arrivals)]
    return [(name, spans_of) for name, spans_of in lanes if spans_of]


def _slice(program: Program, span: Span, rank: int, tid: int, microseconds: float) -> dict[str, Any]:
    action, size = span.action, program.num_bytes(span.action)
    return {
        "ph": "X",
        "name": _title(action),
        "cat": _KINDS[action.kind],
        "pid": rank,
        "tid": tid,
        "ts": span.start * microseconds,
        "dur": (span.end - span.start) * microseconds,
        "args": {"action": str(action), "step": span.step} | _arguments(action) | ({"bytes": size} if size else {}),
    }


def _counter(name: str, unit: str, curve: Curve, rank: int, microseconds: float) -> list[dict[str, Any]]:
    return [
        {"ph": "C", "name": name, "pid": rank, "tid": 0, "ts": time * microseconds, "args": {unit: value}}
        for time, value in curve
    ]


def _title(action: Action) -> str:
    if action.kind is Kind.OVERLAP:
        return "+".join(_title(part) for part in action.parts)
    return f"{action.kind}{action.microbatch if action.microbatch >= 0 else ''}"


def _arguments(action: Action) -> dict[str, Any]:
    if action.kind is Kind.OVERLAP:
        return {"what": " and ".join(_KINDS[part.kind] for part in action.parts)}
    numbers = {"stage": action.stage, "microbatch": action.microbatch, "peer": action.peer}
    return {key: value for key, value in numbers.items() if value >= 0}


def _metadata(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
