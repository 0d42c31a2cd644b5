"""From what ranks measured to the entry of a device: its tables, its rates and its constants."""

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from shardwright.config.calibration_file import CalibrationSpec
from shardwright.config.cluster import PEAK_NAMES, DeviceSpec
from shardwright.config.job import JobSpec
from shardwright.config.measured_table import Carried, MeasuredTable, sizes_of
from shardwright.config.software import software_of
from shardwright.config.toml_text import toml_text
from shardwright.config.units import GIB, counted
from shardwright.cost.calibration import constant, shipped
from shardwright.cost.from_job import run_of
from shardwright.cost.measured_time import PASSES, powers_of
from shardwright.measure.calibrate.catalog_floor import known_fields, raised_to
from shardwright.measure.calibrate.sweep import (
    MORE_LAYERS,
    Machine,
    Probe,
    RankReport,
    Samples,
    num_calls,
    spread,
    undisturbed,
    work_of,
)
from shardwright.simulate.closed_form import step_time
from shardwright.train.launch.out_of_memory import available_bytes

_CONTEXT_BYTES = 250e6  # of a process with torch loaded, on a CPU
_LEAST_S = 1e-9  # of a part of a call that was not longer than what it was measured beside
_CARRIED = get_args(Carried)


@dataclass(frozen=True)
class RanksMeasured:
    """The measurements of all ranks of one launch, and the number of ranks."""

    ranks: int
    job: JobSpec
    reports: Sequence[RankReport]

    @property
    def machine(self) -> Machine:
        """The machine that was measured: of the ranks' contexts the largest."""
        return max((report.machine for report in self.reports), key=lambda machine: machine.context_bytes)

    @property
    def samples(self) -> Samples:
        """The samples of all ranks."""
        found: Samples = {}
        for report in self.reports:
            for point, of_rank in report.samples.items():
                found.setdefault(point, []).extend(of_rank)
        return found

    def seconds(self) -> dict[Probe, tuple[float, ...]]:
        """The undisturbed seconds of each rank, in the mean over ranks."""
        found = {}
        for point in self.reports[0].samples:
            of_ranks = [undisturbed(report.samples[point]) for report in self.reports]
            found[point] = tuple(map(statistics.fmean, zip(*of_ranks, strict=True)))
        return found


def device_entry_of(launches: Sequence[RanksMeasured], taken_s: float, scratch: Path) -> dict[str, Any]:
    """The fields of a device's file. `scratch` is a folder for files that are read once."""
    machine = launches[-1].machine
    fields = _of_cpu(launches, taken_s) if machine.kind == "cpu" else _of_device(machine, launches, taken_s)
    constants = fields["constants"]
    leaks = [of[Probe("leak", "float32", ())][0] for of in (m.seconds() for m in launches) if _leaks(of)]
    if leaks:
        constants["leak"] = leaks[-1]
    fields["measured"] = [table.model_dump(exclude_defaults=True) for table in tables(launches)]
    constants["step_s"], gap_s = _beside_s(launches, fields, scratch)
    if machine.kind == "cpu":  # a device computes while its host launches what comes next
        constants["gap_s"] = gap_s
    return fields


def _leaks(seconds: Mapping[Probe, tuple[float, ...]]) -> bool:
    return Probe("leak", "float32", ()) in seconds


def _of_cpu(launches: Sequence[RanksMeasured], taken_s: float) -> dict[str, Any]:
    """The entry of a CPU: the facts of the system and the rates that were reached, of which nothing is lost again."""
    most = launches[-1]
    copied = _copied(launches)
    memory_gib = available_bytes() / GIB / most.ranks
    constants = {"product": 1.0, "memory": 1.0, "link": 1.0, "host": 1.0, "gap_s": 0.0, "jitter": 0.0, "step_s": 0.0}
    fields = {
        "generation": "cpu", "link_domain": 1, "multiprocessors": os.cpu_count() or 1, "peak_tflops": _peaks(launches),
        "memory_gb_per_s": 2 * copied["copy"], "memory_gib": memory_gib, "host_memory_gib": memory_gib,
        "host_gb_per_s": copied["host copy"], "host_memory_gb_per_s": 2 * copied["copy"],
        "source": _source(launches, taken_s, counted(os.cpu_count() or 1, "core")),
        "constants": constants | {"context_bytes": _CONTEXT_BYTES},
    }  # fmt: skip
    seconds = {point: of for m in launches for point, of in m.seconds().items()}
    sent = [point.sizes[1] / of[0] / 1e9 for point, of in seconds.items() if point.work == "message"]
    return fields | ({"link_gb_per_s": max(sent)} if sent else {})


def _of_device(machine: Machine, launches: Sequence[RanksMeasured], taken_s: float) -> dict[str, Any]:
    """The entry of a device: the facts of the catalog, and no peak, bandwidth or context below them; measured rates are
    shares of these. What no single constant was measured for holds as for its generation."""
    known, copied = known_fields(machine.name), _copied(launches)
    rates = {
        "peak_tflops": _peaks(launches), "memory_gb_per_s": 2 * copied["copy"], "host_gb_per_s": copied["host copy"],
    }  # fmt: skip
    rates, constants, lower = raised_to(known, rates)
    usual = constant(shipped(), known.get("generation", "common"), "context_bytes")
    if machine.context_bytes < usual:
        lower += f"{'; ' * bool(lower)}context {machine.context_bytes / 1e9:.3g} of {usual / 1e9:.3g} GB"
    source = _source(launches, taken_s, machine.name)
    source += f"; lower than the catalog says, which holds: {lower}" if lower else ""
    here = {"memory_gib": machine.memory_bytes / GIB, "multiprocessors": machine.multiprocessors}
    constants |= {"step_s": 0.0, "context_bytes": max(usual, machine.context_bytes)}
    return here | known | rates | {"source": source, "constants": constants}


def _peaks(launches: Sequence[RanksMeasured]) -> dict[str, float]:
    """The fastest pass of all products, in TFLOP/s by number type."""
    peaks: dict[str, float] = {}
    for m in launches:
        for point, of in m.seconds().items():
            if point.work == "product":
                name = PEAK_NAMES[point.number]
                peaks[name] = max(peaks.get(name, 0.0), work_of(point) / min(of) / 1e12)
    return peaks


def _copied(launches: Sequence[RanksMeasured]) -> dict[str, float]:
    """Bytes that were copied in memory and to the host, in GB/s."""
    seconds = {point: of for m in launches for point, of in m.seconds().items()}
    return {
        kind: max(4.0 * point.sizes[0] / of[0] for point, of in seconds.items() if point.work == kind) / 1e9
        for kind in ("copy", "host copy")
    }


def _source(launches: Sequence[RanksMeasured], taken_s: float, where: str) -> str:
    busy = " and ".join(str(m.ranks) for m in launches)
    calls = sum(num_calls(m.samples) for m in launches)
    return (
        f"shardwright calibrate on {where} ({platform.machine()}) with torch {torch.__version__}, {busy} ranks busy: "
        f"{calls:,} calls in {taken_s:.0f} s"
    )


def tables(launches: Sequence[RanksMeasured]) -> list[MeasuredTable]:
    """All tables. Collectives of all numbers of ranks are one."""
    grouped: dict[tuple[str, str, int], dict[tuple[int, ...], tuple[float, ...]]] = {}
    for m in launches:
        for point, of in m.seconds().items():
            if point.work in (*_CARRIED, "product", "attention", "update") or len(of) == 2:
                busy = 1 if point.work in _CARRIED else m.ranks
                grouped.setdefault((point.work, point.number, busy), {})[point.sizes] = of
    return [_table(work, number, busy, found) for (work, number, busy), found in grouped.items()]


def _table(work: str, number: str, busy: int, found: Mapping[tuple[int, ...], tuple[float, ...]]) -> MeasuredTable:
    """A whole table. Points that were not looked at take what those before them do, for more work; and nothing takes
    longer than what is larger, which can only have been disturbed less."""
    sides = [sorted({sizes[side] for sizes in found}) for side in range(len(sizes_of(work)))]
    powers = powers_of(work)
    shape = tuple(map(len, sides))
    columns = np.zeros((len(next(iter(found.values()))), *shape))
    for index in np.ndindex(shape):
        known, longer = list(index), 1.0
        while (sizes := tuple(side[i] for side, i in zip(sides, known, strict=True))) not in found:
            side = max(range(len(known)), key=lambda n: (known[n] > 0, sides[n][known[n]]))
            longer *= (sides[side][known[side]] / sides[side][known[side] - 1]) ** powers[side]
            known[side] -= 1
        columns[(slice(None), *index)] = [max(_LEAST_S, longer * seconds) for seconds in found[sizes]]
    for side in range(len(shape)):
        columns = np.flip(np.minimum.accumulate(np.flip(columns, side + 1), side + 1), side + 1)
    fields = {name: [float(f"{s:.4g}") for s in column.ravel()] for name, column in zip(PASSES, columns, strict=False)}
    whole = [[float(size) for size in side] for side in sides]
    return MeasuredTable.model_validate({"work": work, "number": number, "busy": busy, "sizes": whole, **fields})


def _beside_s(launches: Sequence[RanksMeasured], fields: Mapping[str, Any], scratch: Path) -> tuple[float, float]:
    """Seconds (of a step, of each kernel of a layer) beside operators and collectives: what the steps of small jobs
    took more than is said of them, in the mean of the launches."""
    of_steps, of_kernels = [], []
    kernels = sum(software_of("shardwright").kernels)
    for m in launches:
        file = scratch / f"of-{m.ranks}-ranks.toml"
        file.write_text(toml_text(fields), encoding="utf-8")
        cluster = m.job.cluster.model_copy(update={"device": str(file)})
        more_s = []
        for layers in (1, MORE_LAYERS):
            model = m.job.model.model_copy(update={"layers": layers})
            said = step_time(run_of(m.job.model_copy(update={"cluster": cluster, "model": model})), shipped())
            more_s.append(m.seconds()[Probe("step", "float32", (layers,))][0] - float(said.total))
        of_layer_s = max(0.0, (more_s[1] - more_s[0]) / (MORE_LAYERS - 1))
        of_kernels.append(of_layer_s / kernels)
        of_steps.append(max(0.0, more_s[0] - of_layer_s))
    return statistics.fmean(of_steps), statistics.fmean(of_kernels)


def summary(launches: Sequence[RanksMeasured]) -> list[list[str]]:
    """Rows of a table for reading: work, number type, busy ranks, how many sizes, the best rate, and the spread."""
    rows = [["", "number", "ranks", "sizes", "best", "quartiles"]]
    for m in launches:
        seconds, samples = m.seconds(), m.samples
        kinds = dict.fromkeys((point.work, point.number) for point in seconds)
        for work, number in kinds:
            same = [point for point in seconds if (point.work, point.number) == (work, number)]
            middle = statistics.median(spread(samples[point]) for point in same)
            rows.append([work, number, str(m.ranks), str(len(same)), _best(work, same, seconds), f"+-{middle:.0%}"])
    return rows


def _best(work: str, same: Sequence[Probe], seconds: Mapping[Probe, tuple[float, ...]]) -> str:
    if work == "product":
        return f"{max(work_of(p) / min(seconds[p]) for p in same) / 1e9:,.0f} GFLOP/s"
    if work in _CARRIED:
        return f"{max(work_of(p) / seconds[p][0] for p in same) / 1e9:.2f} GB/s"
    if work in ("copy", "host copy"):
        return f"{max(8 * work_of(p) / seconds[p][0] for p in same) / 1e9:.1f} GB/s"
    if work == "attention":
        return f"{max(128.0 * p.sizes[0] ** 2 * p.sizes[1] / seconds[p][0] for p in same) / 1e9:,.0f} GFLOP/s"
    if work == "leak":
        return f"{seconds[same[0]][0]:.0%} seen"
    if work == "step":
        return f"{1e3 * seconds[same[0]][0]:.1f} ms"
    if not same[0].sizes:
        return ""
    return f"{max(prod(p.sizes) / max(_LEAST_S, sum(seconds[p])) for p in same) / 1e6:,.0f} Melements/s"


def entry(fields: Mapping[str, Any], name: str) -> DeviceSpec:
    """The device that a file with these fields describes."""
    constants = CalibrationSpec.model_validate(fields["constants"])
    measured = [MeasuredTable.model_validate(table) for table in fields["measured"]]
    return DeviceSpec.model_validate({"name": name, **fields, "constants": constants, "measured": measured})
