"""The longest time that a run needs to save and leave, from the request until the end of its processes.

A run acts on a request at the end of the current step. It waits for a checkpoint that is being written, and writes
another one. So the time is that of a step, of two checkpoints, and of the ranks' shutdown. The times of a step and of a
checkpoint are measured by this very run, or else predicted.
"""

import json
import math
import statistics
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.run_file_names import METRICS
from shardwright.config.units import seconds_text
from shardwright.config.user_file import FileFault, open_file
from shardwright.planner.own_plan import Estimate

LEAVING_S = 30.0  # to end communicators and processes
_TAIL_BYTES, _MOST_STEPS, _MOST_SAVES = 2**20, 20, 5


@dataclass(frozen=True)
class SaveTime:
    """Whole seconds to save and leave, and a sentence with their source. `is_known` is False if they are only the
    timeout of one rank for another."""

    seconds: int
    sentence: str
    is_known: bool = True


def save_time(job: JobSpec, folder: Path, predicted: Estimate | None) -> SaveTime:
    """The time of a job whose run writes to `folder`. `predicted` is None if nothing is known of its device."""
    measured = _measured(folder / METRICS)
    if measured is not None:
        return _summed(*measured, say("measured by the run in {folder}", folder=str(folder)))
    if predicted is not None and job.cluster.checkpoint_gb_per_s:
        checkpoint_s = predicted.checkpoint_bytes / (1e9 * job.cluster.checkpoint_gb_per_s)
        return _summed(predicted.step.total, checkpoint_s, "predicted")
    seconds = math.ceil(job.run.timeout_s)
    way_out = say("--save-before SECONDS says it, and cluster.device with cluster.checkpoint_gb_per_s predict it")
    sentence = say(
        "how long a checkpoint takes is not known, so a run has run.timeout_s, {seconds}, to save and leave; {way_out}",
        seconds=seconds_text(seconds),
        way_out=way_out,
    )
    return SaveTime(seconds, sentence, is_known=False)


def _summed(step_s: float, checkpoint_s: float, source: str) -> SaveTime:
    seconds = math.ceil(step_s + 2 * checkpoint_s + LEAVING_S)
    sentence = say(
        "to save and leave takes at most a step of {step_s}, a checkpoint under way and one more of {checkpoint_s} "
        "({source}) and {leaving_s} to leave: {seconds}",
        step_s=seconds_text(step_s),
        checkpoint_s=seconds_text(checkpoint_s),
        source=source,
        leaving_s=seconds_text(LEAVING_S),
        seconds=seconds_text(seconds),
    )
    return SaveTime(seconds, sentence)


def _measured(file: Path) -> tuple[float, float] | None:
    """Seconds from metrics.jsonl: the median of the last steps, and the longest of the last checkpoints."""
    lines: list[Any] = []
    with suppress(OSError, FileFault), open_file(file) as opened:
        opened.seek(max(0, file.stat().st_size - _TAIL_BYTES))
        for line in opened.read(_TAIL_BYTES).decode("utf-8", "replace").splitlines():
            # The first line may lack its beginning, and the last line its end.
            with suppress(ValueError, RecursionError):
                lines.append(json.loads(line))
    entries = [line for line in lines if isinstance(line, dict)]
    steps_s = [line["step_s"] for line in entries if _is_time(line.get("step_s"))]
    saves = [line["checkpoint"] for line in entries if isinstance(line.get("checkpoint"), dict)]
    saves_s = [save["durable_s"] for save in saves if _is_time(save.get("durable_s"))]
    if not steps_s or not saves_s:
        return None
    return statistics.median(steps_s[-_MOST_STEPS:]), max(saves_s[-_MOST_SAVES:])


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
