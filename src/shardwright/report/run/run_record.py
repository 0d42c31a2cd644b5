"""The record of a run, read from its metrics.jsonl: curves, checkpoints, skipped steps, the comparison of prediction
and measurement, and the times of the last step's actions."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from shardwright.config.base import PlanError, error_text
from shardwright.config.phrase import of_data, say
from shardwright.config.run_file_names import METRICS
from shardwright.config.user_file import FileFault, open_file, system_reason

_MOST_POINTS = 1200  # of a curve: more than a screen has pixels
_WARMING = 2  # first steps of a run, which are slower than later ones
_TYPICAL = 100  # newest steps, over which medians are taken
CURVES = (
    "loss",
    "grad_norm",
    "learning_rate",
    "step_s",
    "tokens_per_s",
    "mfu",
    "compute_share",
    "exposed_communication_share",
    "pipeline_idle_share",
    "peak_memory_bytes",
    "inside_link_use",
    "between_link_use",
)
_Rows = Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class RunRecord:
    """The lines of a metrics file by their kinds. `curves` are (step, value) by name: those of CURVES, "held_out", and
    "held_out:NAME" for other sets. `performed_s` are start and end of each action of a step, by pipeline rank."""

    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[tuple[int, str]] = field(default_factory=list)
    num_spikes: int = 0
    done_again: list[dict[str, Any]] = field(default_factory=list)
    device: str = ""
    data: dict[str, str] = field(default_factory=dict)
    compared: dict[str, Any] | None = None
    performed_s: list[list[list[float]]] = field(default_factory=list)
    has_experts: bool = False

    @property
    def last_step(self) -> int | None:
        """The last step that is recorded; None without any."""
        steps = self.curves.get("step_s", [])
        return steps[-1][0] if steps else None

    @property
    def first_step(self) -> int | None:
        """The first step that is recorded; None without any."""
        steps = self.curves.get("step_s", [])
        return steps[0][0] if steps else None

    @property
    def peak_memory_bytes(self) -> int | None:
        """The largest peak memory of any rank; None without a step."""
        points = self.curves.get("peak_memory_bytes", [])
        return int(max(value for _, value in points)) if points else None

    def last(self, name: str) -> float | None:
        """The last value of a curve; None if it has none."""
        points = self.curves.get(name, [])
        return points[-1][1] if points else None

    def median(self, name: str) -> float | None:
        """The median of a curve over the newest steps, without the first ones of the run; None if it has none."""
        values = [value for _, value in self.curves.get(name, [])]
        typical = values[_WARMING:][-_TYPICAL:] or values[-1:]
        return median(typical) if typical else None

    def rate(self, name: str) -> float | None:
        """A curve of something a second, at the median step: the median of what a step has of it, divided by the median
        seconds. So it fits the step time beside it, as medians of both do not. None if the run has no such curve."""
        steps = dict(self.curves.get("step_s", []))
        amounts = [value * steps[step] for step, value in self.curves.get(name, []) if step in steps]
        typical, step_s = amounts[_WARMING:][-_TYPICAL:] or amounts[-1:], self.median("step_s")
        return median(typical) / step_s if typical and step_s else None

    def thinned(self) -> dict[str, list[tuple[int, float]]]:
        """The curves with as many points as a screen can show."""
        return {name: thinned(points) for name, points in self.curves.items()}


def read_record(folder: Path) -> RunRecord:
    """The record of a run, which may still go on. Raises PlanError if there is none."""
    path, fault = folder / METRICS, ""
    try:
        with open_file(path) as file:
            return record_of(filter(None, map(_row, file)))
    except FileNotFoundError:
        fault = say("there is no {path}; name the folder of a run, such as runs/quickstart", path=path)
    except FileFault as error:
        fault = error_text(error)
    except OSError as error:
        fault = say("{path} can't be read: {reason}; name the folder of a run", path=path, reason=system_reason(error))
    raise PlanError(say("run {folder}", folder=str(folder)), [fault])


def _row(line: bytes) -> dict[str, Any] | None:
    """The values of a line; None if it is not whole, as the last one of a run that goes on."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def record_of(rows: _Rows) -> RunRecord:
    """The record in the rows of a metrics file. Rows and values of unknown kinds are left out."""
    curves: dict[str, list[tuple[int, float]]] = {}
    lists: dict[str, list[Any]] = {"checkpoints": [], "skipped": [], "done_again": []}
    values: dict[str, Any] = {}
    for row in rows:
        _add_to_curves(curves, row)
        _add_to_lists(lists, row)
        begun = _dict(row.get("begun"))
        values |= {name: begun[name] for name in ("device", "data") if name in begun}
        if compared := _dict(row.get("predicted_and_measured")):
            values["compared"] = compared | _reason(row)
        if performed := _dict(row.get("performed")):
            values["performed_s"] = performed.get("rows", [])
        if isinstance(row.get("num_spikes"), int):
            values["num_spikes"] = row["num_spikes"]
        if row.get("experts"):
            values["has_experts"] = True
    return RunRecord(curves, lists["checkpoints"], lists["skipped"], done_again=lists["done_again"], **values)


def newest_values(record: RunRecord) -> dict[str, Any]:
    """The newest value of each curve, and of all else that changes while a run goes on; null is unknown."""
    values = {name: record.last(name) for name in (*CURVES, "held_out")}
    return {
        "step": record.last_step,
        **values,
        "largest_peak_memory_bytes": record.peak_memory_bytes,
        "checkpoint": record.checkpoints[-1] if record.checkpoints else None,
        "num_skipped": len(record.skipped),
        "num_spikes": record.num_spikes,
    }


def _add_to_curves(curves: dict[str, list[tuple[int, float]]], row: Mapping[str, Any]) -> None:
    step = row.get("step")
    if not isinstance(step, int):
        return
    values = {name: row.get(name) for name in CURVES} | {"held_out": row.get("validation_loss")}
    values |= {f"held_out:{name}": loss for name, loss in _dict(row.get("validation_losses")).items()}
    for name, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            curves.setdefault(name, []).append((step, value))


def _add_to_lists(lists: dict[str, list[Any]], row: Mapping[str, Any]) -> None:
    if checkpoint := _dict(row.get("checkpoint")):
        lists["checkpoints"].append(checkpoint)
    if again := _dict(row.get("done_again")):
        lists["done_again"].append(again)
    if row.get("skipped"):
        lists["skipped"].append((row.get("step"), row.get("skipped_because") or "overflow"))


def _reason(row: Mapping[str, Any]) -> dict[str, str]:
    """Why the time of a comparison was not predicted, as a phrase; empty where a row says nothing that can be one."""
    try:
        return {"time_not_predicted": of_data(row["time_not_predicted"])}
    except (KeyError, TypeError, ValueError):
        return {}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def thinned(points: Sequence[tuple[int, float]], most: int = _MOST_POINTS) -> list[tuple[int, float]]:
    """At most some `most` points of a curve: of each stretch of steps the lowest and the highest, so that a spike stays
    to be seen."""
    if len(points) <= most:
        return list(points)
    size = -(-2 * len(points) // most)
    kept: dict[int, float] = {}
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        kept |= dict(sorted((min(stretch, key=_value), max(stretch, key=_value))))
    return [*kept.items(), points[-1]] if points[-1][0] not in kept else list(kept.items())


def _value(point: tuple[int, float]) -> float:
    return point[1]
