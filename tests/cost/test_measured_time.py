"""Seconds by measured tables: between what was measured, monotone, and the same for one plan and for many."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.catalog_entry import read_entry
from shardwright.config.cluster import DeviceSpec
from shardwright.config.load import make_job
from shardwright.config.measured_table import MeasuredTable
from shardwright.config.toml_text import toml_text
from shardwright.cost.calibration import shipped
from shardwright.cost.from_job import run_of
from shardwright.cost.measured_time import MeasuredDevice, Surface, measured_device
from shardwright.layers.query import stacked
from shardwright.simulate.closed_form import step_time

SIDES = st.lists(st.integers(1, 2**20), min_size=1, max_size=5, unique=True).map(sorted)
SIZE = st.floats(0.5, 2**24)


@st.composite
def monotone_tables(draw: st.DrawFn) -> MeasuredTable:
    """Products whose seconds grow along every side."""
    sides = [draw(SIDES) for _ in range(3)]
    grid = np.zeros([len(side) for side in sides])
    for index in np.ndindex(grid.shape):
        grid[index] = draw(st.floats(1e-9, 1.0))
    for axis in range(3):
        grid = np.maximum.accumulate(grid, axis=axis)
    sizes = [[float(size) for size in side] for side in sides]
    seconds = grid.ravel().tolist()
    return MeasuredTable(work="product", sizes=sizes, seconds=seconds, backward=seconds, weight_grad=seconds)


@given(monotone_tables(), st.tuples(SIZE, SIZE, SIZE), st.integers(0, 2), st.floats(1.0, 100.0))
@settings(deadline=None, max_examples=60)
def test_more_work_never_takes_less(
    table: MeasuredTable, sizes: tuple[float, float, float], side: int, factor: float
) -> None:
    surface = Surface.of(table, "seconds")
    larger = [size * (factor if n == side else 1.0) for n, size in enumerate(sizes)]
    assert surface.at(*larger) >= surface.at(*sizes) * (1 - 1e-9)


@given(monotone_tables(), st.tuples(SIZE, SIZE, SIZE))
@settings(deadline=None, max_examples=60)
def test_it_stays_between_what_was_measured_around(table: MeasuredTable, sizes: tuple[float, float, float]) -> None:
    surface = Surface.of(table, "seconds")
    inside = [min(max(size, side[0]), side[-1]) for size, side in zip(sizes, table.sizes, strict=True)]
    result = float(surface.at(*inside))
    assert min(table.seconds) * (1 - 1e-9) <= result <= max(table.seconds) * (1 + 1e-9)
    more = math.prod(max(1.0, size / side[-1]) for size, side in zip(sizes, table.sizes, strict=True))
    assert float(surface.at(*sizes)) == pytest.approx(result * more)


@given(monotone_tables(), st.lists(st.tuples(SIZE, SIZE, SIZE), min_size=1, max_size=4))
@settings(deadline=None, max_examples=30)
def test_many_are_each_alone(table: MeasuredTable, many: list[tuple[float, float, float]]) -> None:
    surface = Surface.of(table, "seconds")
    together = surface.at(*map(np.array, zip(*many, strict=True)))
    assert together.tolist() == pytest.approx([float(surface.at(*sizes)) for sizes in many])


@given(st.floats(0.0, 2.0), st.floats(1e-9, 1e-6), st.floats(1.0, 2.0**20))
def test_a_power_of_a_size_is_met_exactly(power: float, unit_s: float, size: float) -> None:
    sides = [1.0, 37.0, 4096.0, 2.0**20]
    seconds = [unit_s * side**power for side in sides]
    table = MeasuredTable(work="join", sizes=[sides], seconds=seconds, backward=seconds)
    assert float(Surface.of(table, "backward").at(size)) == pytest.approx(unit_s * size**power)


def test_what_was_measured_is_what_is_said() -> None:
    sizes = [[16.0, 64.0], [32.0, 128.0, 512.0]]
    seconds = [1e-3, 2e-3, 5e-3, 3e-3, 8e-3, 9e-3]
    surface = Surface.of(MeasuredTable(work="attention", sizes=sizes, seconds=seconds, backward=seconds), "seconds")
    at = [float(surface.at(length, heads)) for length in sizes[0] for heads in sizes[1]]
    assert at == pytest.approx(seconds)
    assert float(surface.at(128.0, 512.0)) == pytest.approx(4 * 9e-3)  # twice the length: four times the scores


def device(*tables: MeasuredTable) -> MeasuredDevice:
    result = measured_device(DeviceSpec(name="mine", memory_gib=1.0, measured=list(tables)))
    assert result is not None
    return result


def test_as_many_ranks_are_busy_as_the_job_has() -> None:
    one, two, four = (
        MeasuredTable(work="update", busy=busy, sizes=[[1.0]], seconds=[1e-6 * busy]) for busy in (1, 2, 4)
    )
    measured = device(four, one, two)
    (result,) = measured.seconds("update", "float32", np.array([1, 2, 3, 4, 64]), 1.0)
    assert result.tolist() == pytest.approx([1e-6, 2e-6, 2e-6, 4e-6, 4e-6])
    assert not measured.knows("update", "bf16")
    on_cpu = DeviceSpec(name="mine", memory_gib=1.0, generation="cpu", measured=[one, two])
    shared = measured_device(on_cpu)
    assert shared is not None
    (result,) = shared.seconds("update", "float32", np.array([1, 2, 8]), 1.0)
    assert result.tolist() == pytest.approx([1e-6, 2e-6, 8e-6])  # eight in turn on the cores of two


def test_a_collective_among_more_ranks_sends_as_much_of_a_larger_tensor() -> None:
    measured = device(MeasuredTable(work="all_gather", sizes=[[2.0], [1.0, 1e9]], seconds=[1e-9, 1.0]))
    assert float(measured.collective_s("all_gather", "float32", 2, 1e6)) == pytest.approx(1e-3)
    assert float(measured.collective_s("all_gather", "float32", 4, 1e6)) == pytest.approx(1.5e-3)
    assert float(measured.collective_s("all_gather", "float32", 2, 0.0)) == 0.0


def test_nothing_measured_is_nothing() -> None:
    assert measured_device(DeviceSpec(name="mine", memory_gib=1.0)) is None


WIDE = [16.0, 4096.0]


def tables() -> list[MeasuredTable]:
    """A machine on which everything takes a nanosecond by element or byte, and products one by 100 FLOPs."""
    results = []
    for busy in (1, 2):
        grid = [2e-11 * busy * r * i * c for r in WIDE for i in WIDE for c in WIDE]
        results.append(
            MeasuredTable(work="product", busy=busy, sizes=[WIDE] * 3, seconds=grid, backward=grid, weight_grad=grid)
        )
        scores = [1e-9 * busy * length**2 * heads for length in WIDE for heads in WIDE]
        results.append(MeasuredTable(work="attention", busy=busy, sizes=[WIDE] * 2, seconds=scores, backward=scores))
        for work in ("rms norm", "rotary", "gated activation", "join", "embedding", "loss", "merge"):
            each = [1e-9 * busy, 1e-3 * busy]
            results.append(MeasuredTable(work=work, busy=busy, sizes=[[1.0, 1e6]], seconds=each, backward=each))
        results.append(MeasuredTable(work="update", busy=busy, sizes=[[1.0, 1e6]], seconds=[1e-9, 1e-3]))
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange", "message"):
        results.append(MeasuredTable(work=kind, sizes=[[2.0], [1.0, 1e6]], seconds=[1e-9, 1e-3]))
    return results


def fields() -> dict[str, Any]:
    return {
        "memory_gib": 4.0, "peak_tflops": {"float32": 0.2}, "memory_gb_per_s": 20.0, "multiprocessors": 2,
        "link_gb_per_s": 1.0, "link_domain": 1, "generation": "cpu",
        "constants": {"gap_s": 0.0, "step_s": 0.0, "jitter": 0.0, "leak": 0.5},
        "measured": [table.model_dump(exclude_defaults=True) for table in tables()],
    }  # fmt: skip


def job(file: Path, **plan: Any) -> Any:
    return make_job(
        {
            "model": {"layers": 4, "hidden": 64, "heads": 4, "ffn": 192, "vocab": 256, "sequence": 64},
            "cluster": {"device": str(file)},
            "plan": plan,
            "batch": {"global_batch_size": 16},
        }
    )


def test_a_file_prices_a_step_by_its_tables(tmp_path: Path) -> None:
    """Products alone, by hand: twice the seconds by FLOP where two ranks are busy, and half of the FLOPs each."""
    file = tmp_path / "mine.toml"
    file.write_text(toml_text(fields()), encoding="utf-8")
    one, two = job(file), job(file, dp=2)
    entry = read_entry("devices", str(file), DeviceSpec)
    assert entry.measured == tables()
    times = [step_time(run_of(of), shipped()) for of in (one, two)]
    assert times[1].compute == pytest.approx(times[0].compute)
    tokens, matrices = 64, 4 * (64 * 192 + 64 * 64 + 64 * 384 + 192 * 64) + 256 * 64
    products_s = 16 * 3 * 2e-11 * tokens * matrices
    assert products_s < times[0].compute < 2 * products_s + 0.2
    assert times[0].data == 0.0 < times[1].data


def test_plans_priced_at_once_are_as_each_alone(tmp_path: Path) -> None:
    file = tmp_path / "again.toml"
    file.write_text(toml_text(fields()), encoding="utf-8")
    jobs = [job(file), job(file, dp=2), job(file, tp=2), job(file, dp=2, zero=3), job(file, dp=4, microbatch_size=2)]
    runs = [run_of(of) for of in jobs]
    together = step_time(
        type(runs[0])(
            **{f: getattr(runs[0], f) for f in runs[0].__dataclass_fields__} | {"grid": stacked([r.grid for r in runs])}
        ),
        shipped(),
    )
    # A node has as many devices as a job has ranks, where nobody says how many; on this machine that prices nothing.
    alone = [step_time(run, shipped()).total for run in runs]
    assert together.total.tolist() == pytest.approx(alone)
