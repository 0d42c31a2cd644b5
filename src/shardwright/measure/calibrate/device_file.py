"""The entry of a device from the measurements of ranks: its tables, its rates and its constants."""

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

from shardwright.config import catalog
from shardwright.config.calibration_file import CalibrationSpec
from shardwright.config.cluster import DeviceSpec
from shardwright.config.job import JobSpec
from shardwright.config.measured_table import Carried, MeasuredTable, sizes_of
from shardwright.config.number_types import NUMBER_TYPES
from shardwright.config.percent import whole_percent_text
from shardwright.config.phrase import fixed, say
from shardwright.config.software import software_of
from shardwright.config.toml_text import toml_text
from shardwright.config.units import GIB, counted
from shardwright.cost.calibration import constant, shipped
from shardwright.cost.from_job import run_of
from shardwright.cost.measured_time import PASSES, powers_of
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

_BANDWIDTHS = {"memory_gb_per_s": "memory", "host_gb_per_s": "host"}  # with the constants that are shares of them


_CONTEXT_BYTES = 250e6  # of a process with torch loaded, on a CPU
_LEAST_S = 1e-9  # of a part of a call that measured no longer than what is subtracted from it
_CARRIED = get_args(Carried)


@dataclass(frozen=True)
class RanksMeasured:
    """The measurements of all ranks of one launch, and the number of ranks."""

    ranks: int
    job: JobSpec
    reports: Sequence[RankReport]

    @property
    def machine(self) -> Machine:
        """The machine that was measured, with the largest context of all ranks."""
        return max((report.machine for report in self.reports), key=lambda machine: machine.context_bytes)

    @property
    def samples(self) -> Samples:
        """The samples of all ranks."""
        samples: Samples = {}
        for report in self.reports:
            for point, rank_samples in report.samples.items():
                samples.setdefault(point, []).extend(rank_samples)
        return samples

    def seconds(self) -> dict[Probe, tuple[float, ...]]:
        """The undisturbed seconds of each probe's passes, in the mean over ranks."""
        means = {}
        for point in self.reports[0].samples:
            rank_seconds = [undisturbed(report.samples[point]) for report in self.reports]
            means[point] = tuple(map(statistics.fmean, zip(*rank_seconds, strict=True)))
        return means


def device_entry_of(launches: Sequence[RanksMeasured], taken_s: float, scratch: Path) -> dict[str, Any]:
    """The fields of a device's file. `scratch` is a folder for temporary files."""
    machine = launches[-1].machine
    fields = _of_cpu(launches, taken_s) if machine.kind == "cpu" else _of_device(machine, launches, taken_s)
    constants = fields["constants"]
    leaks = [seconds[Probe("leak", "float32", ())][0] for seconds in (m.seconds() for m in launches) if _leaks(seconds)]
    if leaks:
        constants["leak"] = leaks[-1]
    fields["measured"] = [table.model_dump(exclude_defaults=True) for table in tables(launches)]
    constants["step_s"], gap_s = _beside_s(launches, fields, scratch)
    if machine.kind == "cpu":  # a device computes while its host launches the next kernels
        constants["gap_s"] = gap_s
    return fields


def _leaks(seconds: Mapping[Probe, tuple[float, ...]]) -> bool:
    return Probe("leak", "float32", ()) in seconds


def _of_cpu(launches: Sequence[RanksMeasured], taken_s: float) -> dict[str, Any]:
    """The entry of a CPU: the facts of the system and the reached rates, which therefore count in full."""
    last_launch = launches[-1]
    copied = _copied(launches)
    memory_gib = available_bytes() / GIB / last_launch.ranks
    constants = {"product": 1.0, "memory": 1.0, "link": 1.0, "host": 1.0, "gap_s": 0.0, "jitter": 0.0, "step_s": 0.0}
    fields = {
        "generation": "cpu",
        "link_domain": 1,
        "multiprocessors": os.cpu_count() or 1,
        "peak_tflops": _peaks(launches),
        "memory_gb_per_s": 2 * copied["copy"],
        "memory_gib": memory_gib,
        "host_memory_gib": memory_gib,
        "host_gb_per_s": copied["host copy"],
        "host_memory_gb_per_s": 2 * copied["copy"],
        "source": _source(launches, taken_s, counted(os.cpu_count() or 1, "core")),
        "constants": constants | {"context_bytes": _CONTEXT_BYTES},
    }
    probe_seconds = {point: seconds for m in launches for point, seconds in m.seconds().items()}
    message_rates = [
        point.sizes[1] / seconds[0] / 1e9 for point, seconds in probe_seconds.items() if point.work == "message"
    ]
    return fields | ({"link_gb_per_s": max(message_rates)} if message_rates else {})


def _of_device(machine: Machine, launches: Sequence[RanksMeasured], taken_s: float) -> dict[str, Any]:
    """The entry of a device: the facts of the catalog, raised to any higher measured peak, bandwidth or context; the
    measured rates become shares of these. Constants that were not measured are those of its generation."""
    catalog_fields, copied = known_fields(machine.name), _copied(launches)
    rates = {
        "peak_tflops": _peaks(launches),
        "memory_gb_per_s": 2 * copied["copy"],
        "host_gb_per_s": copied["host copy"],
    }
    rates, constants, lower = raised_to(catalog_fields, rates)
    usual = constant(shipped(), catalog_fields.get("generation", "common"), "context_bytes")
    if machine.context_bytes < usual:
        lower += f"{'; ' * bool(lower)}context {machine.context_bytes / 1e9:.3g} of {usual / 1e9:.3g} GB"
    source = _source(launches, taken_s, machine.name)
    source += f"; lower than the catalog says, which holds: {lower}" if lower else ""
    facts = {"memory_gib": machine.memory_bytes / GIB, "multiprocessors": machine.multiprocessors}
    constants |= {"step_s": 0.0, "context_bytes": max(usual, machine.context_bytes)}
    return facts | catalog_fields | rates | {"source": source, "constants": constants}


def known_fields(cuda_name: str) -> dict[str, Any]:
    """The entry of the catalog with CUDA's name of a device; empty if there is none."""
    entries = [catalog.read("devices", entry) for entry in catalog.names("devices")]
    fields = next((fields for fields in entries if cuda_name in fields.get("cuda_names", ())), {})
    return {key: value for key, value in fields.items() if key != "name"}


def raised_to(
    catalog_fields: Mapping[str, Any], measured: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, float], str]:
    """Peaks and bandwidths, the higher of the measured and the catalog's; the shares of them that were reached; and the
    measured ones that were lower, in words.

    A peak is the maker's number, and the reached rate is a share of it. A disturbed run, or too small sizes, lower only
    the share.
    """
    fields, shares, lower = dict(measured), dict[str, float](), list[str]()
    stated, reached = catalog_fields.get("peak_tflops", {}), measured["peak_tflops"]
    fields["peak_tflops"] = {
        number: max(stated.get(number, 0.0), reached.get(number, 0.0)) for number in stated | reached
    }
    of_peaks = {number: value / fields["peak_tflops"][number] for number, value in reached.items()}
    shares["product"] = of_peaks.get("bfloat16", max(of_peaks.values()))
    lower += [
        f"{number} products {value:.4g} of {stated[number]:.4g} TFLOP/s"
        for number, value in reached.items()
        if value < stated.get(number, 0.0)
    ]
    for name, share in _BANDWIDTHS.items():
        if name in measured:
            fields[name] = max(catalog_fields.get(name, 0.0), measured[name])
            shares[share] = measured[name] / fields[name]
            if measured[name] < fields[name]:
                lower.append(f"{share} {measured[name]:.4g} of {fields[name]:.4g} GB/s")
    return fields, shares, "; ".join(lower)


def _peaks(launches: Sequence[RanksMeasured]) -> dict[str, float]:
    """The fastest pass of all products, in TFLOP/s by dtype."""
    peaks: dict[str, float] = {}
    for m in launches:
        for point, seconds in m.seconds().items():
            if point.work == "product":
                name = NUMBER_TYPES[point.number].peak
                peaks[name] = max(peaks.get(name, 0.0), work_of(point) / min(seconds) / 1e12)
    return peaks


def _copied(launches: Sequence[RanksMeasured]) -> dict[str, float]:
    """Rates of copies in memory and to the host, in GB/s."""
    seconds = {point: pass_seconds for m in launches for point, pass_seconds in m.seconds().items()}
    return {
        kind: max(
            4.0 * point.sizes[0] / pass_seconds[0] for point, pass_seconds in seconds.items() if point.work == kind
        )
        / 1e9
        for kind in ("copy", "host copy")
    }


def _source(launches: Sequence[RanksMeasured], taken_s: float, name: str) -> str:
    busy = " and ".join(str(m.ranks) for m in launches)
    calls = sum(num_calls(m.samples) for m in launches)
    return (
        f"shardwright calibrate on {name} ({platform.machine()}) with torch {torch.__version__}, {busy} ranks busy: "
        f"{calls:,} calls in {taken_s:.0f} s"
    )


def tables(launches: Sequence[RanksMeasured]) -> list[MeasuredTable]:
    """All tables. Collectives of all numbers of ranks are in one table."""
    grouped: dict[tuple[str, str, int], dict[tuple[int, ...], tuple[float, ...]]] = {}
    for m in launches:
        for point, seconds in m.seconds().items():
            if point.work in (*_CARRIED, "product", "attention", "update") or len(seconds) == 2:
                busy = 1 if point.work in _CARRIED else m.ranks
                grouped.setdefault((point.work, point.number, busy), {})[point.sizes] = seconds
    return [_table(work, number, busy, grid) for (work, number, busy), grid in grouped.items()]


def _table(work: str, number: str, busy: int, points: Mapping[tuple[int, ...], tuple[float, ...]]) -> MeasuredTable:
    """A whole table. A point that was not measured is extrapolated from the previous one, for more work. No point takes
    longer than a larger one: the smaller one was only more disturbed."""
    sides = [sorted({sizes[side] for sizes in points}) for side in range(len(sizes_of(work)))]
    powers = powers_of(work)
    shape = tuple(map(len, sides))
    columns = np.zeros((len(next(iter(points.values()))), *shape))
    for index in np.ndindex(shape):
        nearest, factor = list(index), 1.0
        while (sizes := tuple(side[i] for side, i in zip(sides, nearest, strict=True))) not in points:
            side = max(range(len(nearest)), key=lambda n: (nearest[n] > 0, sides[n][nearest[n]]))
            factor *= (sides[side][nearest[side]] / sides[side][nearest[side] - 1]) ** powers[side]
            nearest[side] -= 1
        columns[(slice(None), *index)] = [max(_LEAST_S, factor * seconds) for seconds in points[sizes]]
    for side in range(len(shape)):
        columns = np.flip(np.minimum.accumulate(np.flip(columns, side + 1), side + 1), side + 1)
    fields = {name: [float(f"{s:.4g}") for s in column.ravel()] for name, column in zip(PASSES, columns, strict=False)}
    size_lists = [[float(size) for size in side] for side in sides]
    return MeasuredTable.model_validate({"work": work, "number": number, "busy": busy, "sizes": size_lists, **fields})


def _beside_s(launches: Sequence[RanksMeasured], fields: Mapping[str, Any], scratch: Path) -> tuple[float, float]:
    """Seconds (of a step, of each kernel of a layer) besides operators and collectives: the steps of small jobs minus
    their predictions, in the mean of the launches."""
    step_gaps, kernel_gaps = [], []
    kernels = sum(software_of("shardwright").kernels)
    for m in launches:
        file = scratch / f"of-{m.ranks}-ranks.toml"
        file.write_text(toml_text(fields), encoding="utf-8")
        cluster = m.job.cluster.model_copy(update={"device": str(file)})
        excess_s = []
        for layers in (1, MORE_LAYERS):
            model = m.job.model.model_copy(update={"layers": layers})
            predicted = step_time(run_of(m.job.model_copy(update={"cluster": cluster, "model": model})), shipped())
            excess_s.append(m.seconds()[Probe("step", "float32", (layers,))][0] - float(predicted.total))
        of_layer_s = max(0.0, (excess_s[1] - excess_s[0]) / (MORE_LAYERS - 1))
        kernel_gaps.append(of_layer_s / kernels)
        step_gaps.append(max(0.0, excess_s[0] - of_layer_s))
    return statistics.fmean(step_gaps), statistics.fmean(kernel_gaps)


def summary(launches: Sequence[RanksMeasured]) -> list[list[str]]:
    """Rows of a table for the user: work, dtype, busy ranks, number of sizes, the best rate, and the spread."""
    rows: list[list[str]] = [["", say("number"), say("ranks"), say("sizes"), say("best"), say("quartiles")]]
    for m in launches:
        seconds, samples = m.seconds(), m.samples
        kinds = dict.fromkeys((point.work, point.number) for point in seconds)
        for work, number in kinds:
            kind_points = [point for point in seconds if (point.work, point.number) == (work, number)]
            middle = statistics.median(spread(samples[point]) for point in kind_points)
            rows.append(
                [
                    fixed(work),
                    number,
                    str(m.ranks),
                    str(len(kind_points)),
                    _best(work, kind_points, seconds),
                    f"+-{whole_percent_text(middle)}",
                ]
            )
    return rows


def _best(work: str, points: Sequence[Probe], seconds: Mapping[Probe, tuple[float, ...]]) -> str:
    if work == "product":
        return f"{max(work_of(p) / min(seconds[p]) for p in points) / 1e9:,.0f} GFLOP/s"
    if work in _CARRIED:
        return f"{max(work_of(p) / seconds[p][0] for p in points) / 1e9:.2f} GB/s"
    if work in ("copy", "host copy"):
        return f"{max(8 * work_of(p) / seconds[p][0] for p in points) / 1e9:.1f} GB/s"
    if work == "attention":
        return f"{max(128.0 * p.sizes[0] ** 2 * p.sizes[1] / seconds[p][0] for p in points) / 1e9:,.0f} GFLOP/s"
    if work == "leak":
        return f"{whole_percent_text(seconds[points[0]][0])} seen"
    if work == "step":
        return f"{1e3 * seconds[points[0]][0]:.1f} ms"
    if not points[0].sizes:
        return ""
    return f"{max(prod(p.sizes) / max(_LEAST_S, sum(seconds[p])) for p in points) / 1e6:,.0f} Melements/s"


def entry(fields: Mapping[str, Any], name: str) -> DeviceSpec:
    """The device that these fields of a file describe."""
    constants = CalibrationSpec.model_validate(fields["constants"])
    measured = [MeasuredTable.model_validate(table) for table in fields["measured"]]
    return DeviceSpec.model_validate({"name": name, **fields, "constants": constants, "measured": measured})
