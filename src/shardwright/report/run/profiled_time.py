"""The causes of a profiled step's time, from the traces that `run.profile_steps` writes: each moment of a rank counts
for one cause.

On a GPU a moment is that of the kernel that runs, computation before communication beside it. Without a GPU it is that
of the innermost operator of the rank's main thread, and only products, attention and the update are told apart: a rank
waits for messages within operators and between them, of which such a trace says nothing.
"""

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from shardwright.config.base import error_text
from shardwright.config.phrase import fixed, say
from shardwright.config.run_file_names import PROFILE
from shardwright.config.user_file import open_file

COMPUTING = ("products", "attention", "other operators")
COMMUNICATION, OPTIMIZER, NOTHING = "communication", "optimizer", "no kernel runs"
REST = "all else: other operators, waits, host"  # without a GPU
# Causes by the names of operators and kernels, the first that fits; all others are "other operators".
_SIGNS = (
    (COMMUNICATION, re.compile(r"^(gloo|nccl|c10d)[:_]|record_param_comms|ncclDevKernel")),
    (OPTIMIZER, re.compile(r"^Optimizer\.step|multi_tensor_apply|[Aa]dam")),
    ("attention", re.compile(r"scaled_dot_product|flash|fmha")),
    ("products", re.compile(r"^aten::(_scaled_mm|addmm_?|b?mm|baddbmm|linear|matmul|einsum)$|gemm|cutlass|xmma|nvjet")),
)
# Parts of a predicted step (report/step_cost.py) by cause. A rank that waits for another one waits in communication.
_PREDICTED = {
    "computing": ("compute", "again"),
    COMMUNICATION: ("tensor", "context", "expert", "data", "messages", "bubble"),
    OPTIMIZER: ("optimizer",),
    NOTHING: ("host", "other"),
}
_TOLD = ("products", "attention", OPTIMIZER)  # without a GPU
_STEP = re.compile(r"steps? (\d+)(?: to (\d+))?")
_FILE = re.compile(r"rank(\d+)-step(\d+)\.json\.gz")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_MOST_RANKS, _MOST_FILE_BYTES, _MOST_TEXT_BYTES = 16, 2**25, 2**29
_NO_NUMBERS = (ValueError, LookupError, ArithmeticError, TypeError, AttributeError, RecursionError)
_NO_TRACE = (OSError, EOFError, zlib.error, *_NO_NUMBERS)
Event = Mapping[str, Any]


@dataclass(frozen=True)
class ProfiledStep:
    """A step of a rank, and its seconds by cause, which add up to it."""

    rank: int
    step: int
    seconds: float
    by_cause: Mapping[str, float]


def read_profiles(folder: Path) -> tuple[list[ProfiledStep], list[str]]:
    """The last profiled step of the first ranks of a run, and a note for each trace that could not be read."""
    files = {(int(match[2]), int(match[1])): file for file, match in _traces(folder / PROFILE)}
    last = max((step for step, _ in files), default=0)
    steps, notes = list[ProfiledStep](), list[str]()
    for (step, rank), file in sorted(files.items()):
        if step != last or len(steps) >= _MOST_RANKS:
            continue
        try:
            steps.append(profiled_step(rank, step, _events(file)))
        except _NO_TRACE as error:
            notes.append(say("the trace {file} is not read: {reason}", file=file.name, reason=error_text(error)))
    return steps, notes


def _traces(folder: Path) -> Iterable[tuple[Path, re.Match[str]]]:
    for file in sorted(folder.glob("rank*.json.gz")):
        if not file.is_symlink() and (match := _FILE.fullmatch(file.name)):
            yield file, match


def _events(file: Path) -> list[Event]:
    """The events of a trace with a start and a length, which are finite. ValueError if it is too large, or no trace."""
    if file.stat().st_size > _MOST_FILE_BYTES:
        raise ValueError(say("it has more than {most} MiB; open it with Perfetto", most=_MOST_FILE_BYTES >> 20))
    with open_file(file, _MOST_FILE_BYTES) as compressed, gzip.open(compressed) as stream:
        text = stream.read(_MOST_TEXT_BYTES + 1)
    if len(text) > _MOST_TEXT_BYTES:
        raise ValueError(say("it has more than {most} MiB of text; open it with Perfetto", most=_MOST_TEXT_BYTES >> 20))
    return [
        event
        for event in json.loads(text)["traceEvents"]
        if event.get("ph") == "X" and 0 <= event.get("dur", -1) < inf and -inf < event["ts"] < inf
    ]


def profiled_step(rank: int, step: int, events: Sequence[Event]) -> ProfiledStep:
    """The time of a step by cause, from the events of its trace; of several steps that run as one, the mean. ValueError
    if no event is the step."""
    whole = next((event for event in events if _STEP.fullmatch(event["name"]) and "tid" in event), None)
    if whole is None or whole["dur"] <= 0:
        raise ValueError(say("no event of it is a step"))
    match = _STEP.fullmatch(whole["name"])
    assert match is not None
    num_steps = int(match[2] or match[1]) - int(match[1]) + 1
    if num_steps < 1:
        raise ValueError(say("its steps {first} to {last} end before they begin", first=match[1], last=match[2]))
    on_device = [event for event in events if event.get("cat") in _ON_DEVICE]
    microseconds = _of_kernels(whole, on_device) if on_device else _of_operators(whole, events)
    seconds = {cause: time / 1e6 / num_steps for cause, time in microseconds.items()}
    return ProfiledStep(rank, step, whole["dur"] / 1e6 / num_steps, seconds)


def _cause(name: str) -> str | None:
    return next((cause for cause, sign in _SIGNS if sign.search(name)), None)


def _of_operators(whole: Event, events: Sequence[Event]) -> dict[str, float]:
    """Microseconds by cause on the thread of a step: those of the innermost operator, which has the cause of the one
    around it if its name says none that can be told."""
    end = whole["ts"] + whole["dur"]
    inner = [
        event
        for event in events
        if event.get("tid") == whole["tid"] and event is not whole and whole["ts"] <= event["ts"] < end
    ]
    times: dict[str, float] = defaultdict(float)
    stack, now = [(end, REST)], whole["ts"]  # (end, cause) of the operators that run
    for event in sorted(inner, key=lambda event: (event["ts"], -event["dur"])):
        while len(stack) > 1 and stack[-1][0] <= event["ts"]:
            times[stack[-1][1]] += max(0.0, stack[-1][0] - now)
            now = max(now, stack.pop()[0])
        times[stack[-1][1]] += event["ts"] - now
        now = event["ts"]
        cause = _cause(event["name"])
        known = cause if cause in _TOLD else stack[-1][1]
        stack.append((min(event["ts"] + event["dur"], stack[-1][0]), known))
    for until, cause in reversed(stack):
        times[cause] += max(0.0, until - now)
        now = max(now, until)
    return dict(times)


def _of_kernels(whole: Event, kernels: Sequence[Event]) -> dict[str, float]:
    """Microseconds by cause of the kernels that run during a step; computation comes before communication beside it."""
    order = (*COMPUTING, OPTIMIZER, COMMUNICATION)
    start, end = whole["ts"], whole["ts"] + whole["dur"]
    changes = []
    for kernel in kernels:
        first, last = max(start, kernel["ts"]), min(end, kernel["ts"] + kernel["dur"])
        if first < last:
            cause = _cause(kernel["name"]) or COMPUTING[-1]
            changes += [(first, 1, cause), (last, -1, cause)]
    times: dict[str, float] = defaultdict(float)
    running, now = dict.fromkeys(order, 0), start
    for moment, change, cause in sorted(changes):
        times[next((one for one in order if running[one]), NOTHING)] += moment - now
        now = moment
        running[cause] += change
    times[NOTHING] += end - now
    return dict(times)


def cause_rows(steps: Sequence[ProfiledStep], predicted: Mapping[str, float] | None) -> list[dict[str, Any]]:
    """Rows of a table: each cause with its mean seconds over the ranks, the most of any rank, and the predicted
    seconds. `predicted` are the parts of the predicted step, None without a price."""
    rows = []
    has_kernels = any(COMMUNICATION in step.by_cause or NOTHING in step.by_cause for step in steps)
    causes = ("computing", *COMPUTING, COMMUNICATION, OPTIMIZER, NOTHING) if has_kernels else (*_TOLD, REST)
    for cause in causes:
        names = COMPUTING if cause == "computing" else (cause,)
        seconds = [sum(step.by_cause.get(name, 0.0) for name in names) for step in steps]
        parts = _PREDICTED.get(cause)
        predicted_s = sum(predicted[part] for part in parts) if predicted and parts else None
        rows.append(
            {
                "cause": fixed(cause),
                "is_part": has_kernels and cause in COMPUTING,
                "seconds": sum(seconds) / len(seconds),
                "most_seconds": max(seconds),
                "predicted_s": predicted_s,
            }
        )
    return rows
