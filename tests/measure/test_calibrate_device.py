"""`shardwright calibrate` on a device: by rounds between its events, never below the catalog. A CPU stands for it."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.config.job import JobSpec
from shardwright.measure.calibrate import device_rounds, measuring_place
from shardwright.measure.calibrate.calibration_run import _job
from shardwright.measure.calibrate.device_file import RanksMeasured, device_entry_of, entry, known_fields, raised_to
from shardwright.measure.calibrate.operator_probes import ELEMENTWISE
from shardwright.measure.calibrate.sweep import (
    QUICK,
    Machine,
    Probe,
    RankReport,
    Sweep,
    call_of,
    machine_of,
    points,
    sweep_on,
    work_of,
)
from shardwright.train.build import job_mesh

H100 = Machine("cuda", "NVIDIA H100 80GB HBM3", 85e9, 5e8, 132)


class Clock:
    """The clock of a made-up device, which takes a second for all between two marks."""

    def __init__(self) -> None:
        self.marks, self.slept = 0, list[float]()

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def seconds(self, first: int, last: int) -> float:
        return float(last - first)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def test_a_round_is_many_calls_between_two_marks_launched_while_the_device_sleeps() -> None:
    calls, clock = list[tuple[str, int, int]](), Clock()
    passes = [lambda n: calls.append(("forward", n, clock.marks)), lambda n: calls.append(("backward", n, clock.marks))]
    call = device_rounds.rounds_call(clock, passes)
    assert len(call()) == 2 and clock.marks == 3
    numbers = range(device_rounds.CALLS)
    assert calls == [("forward", n, 1) for n in numbers] + [("backward", n, 2) for n in numbers]
    assert device_rounds.CALLS >= 20 and clock.slept == [0.0]
    call()
    assert clock.slept[1] > 0.0  # by what the host took for the first


@pytest.mark.parametrize("number", ["float32", "bf16"])
def test_all_work_is_timed_by_rounds_on_a_device(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    def waits(self: measuring_place.Place) -> float:
        raise AssertionError("nothing is waited for within a round")

    clock = Clock()
    monkeypatch.setattr(measuring_place, "clock_of", lambda device: clock)
    monkeypatch.setattr(measuring_place.Place, "now_s", waits)
    monkeypatch.setattr(measuring_place, "COLD_BYTES", 2**18)
    mesh = job_mesh(_job(1, "cpu"), 0, torch.device("cpu"))
    # Of 64 tokens and more torch's attention in bf16 packs for AVX-512 wherever a CPU has it, though told to use less.
    parts = {"product": ((64, 32, 48), 3), "attention": ((32, 8), 2), "copy": ((4096,), 1), "host copy": ((4096,), 1)}
    parts |= {work: ((8192,), 1 if work == "update" else 2) for work in ELEMENTWISE}
    for work, (sizes, count) in parts.items():
        call = call_of(Probe(work, number, sizes), mesh)
        for _ in range(2):
            before, seconds = clock.marks, call()
            if work == "loss":  # the rounds of its norm and of its product are taken off, and here they take as long
                assert seconds == (0.0, 0.0) and clock.marks - before == 3 + 3 + 4
            else:
                assert seconds == (1 / device_rounds.CALLS,) * count and clock.marks - before == count + 1, work


def test_a_device_is_asked_for_sizes_that_fill_it() -> None:
    sweep = sweep_on(H100, Sweep())
    flops = [work_of(point) for point in points(sweep, ["bf16"], 1) if point.work == "product"]
    assert 9e11 < max(flops) <= 1e12
    assert 4 * max(sweep.elements) == 2**30 and sweep.elements == tuple(sorted(sweep.elements))
    small = sweep_on(Machine("cuda", "small", 4e9), Sweep())
    assert 4 * max(small.elements) == pytest.approx(4e8) and max(small.collective_bytes) <= 4e8
    assert sweep_on(Machine(), Sweep()) == Sweep() and sweep_on(H100, QUICK) == QUICK
    assert machine_of(torch.device("cpu")) == Machine()


def test_what_was_measured_lower_is_a_share_and_said() -> None:
    known = {"peak_tflops": {"bfloat16": 1000.0, "float8": 2000.0}, "memory_gb_per_s": 3000.0, "host_gb_per_s": 60.0}
    measured: dict[str, Any] = {
        "peak_tflops": {"bfloat16": 700.0, "float32": 50.0}, "memory_gb_per_s": 3100.0, "host_gb_per_s": 45.0,
    }  # fmt: skip
    fields, shares, lower = raised_to(known, measured)
    assert fields["peak_tflops"] == {"bfloat16": 1000.0, "float8": 2000.0, "float32": 50.0}
    assert fields["memory_gb_per_s"] == 3100.0 and fields["host_gb_per_s"] == 60.0
    assert shares == {"product": 0.7, "memory": 1.0, "host": 0.75}
    assert lower == "bfloat16 products 700 of 1000 TFLOP/s; host 45 of 60 GB/s"
    assert raised_to({}, measured)[0] == measured and not raised_to({}, measured)[2]


def made_up(machine: Machine, job: JobSpec) -> RanksMeasured:
    """Measurements that a device of 1e14 FLOPs and 1e12 bytes a second would have given."""

    def seconds(point: Probe) -> tuple[float, ...]:
        parts = 3 if point.work == "product" else 1 if point.work in ("update", "copy", "host copy", "step") else 2
        rates = {"product": 2e-14, "host copy": 1e-10}
        one_s = prod(map(float, point.sizes)) * rates.get(point.work, 4e-12) + 1e-6
        return (one_s if point.work != "step" else 0.02 * (1 + point.sizes[0]),) * parts

    numbers = ["float32", "bf16"]
    sweep = Sweep(product_rows=(64, 4096), product_sides=(64, 4096), elements=(2**12, 2**24), most_flops=1e12)
    whole = [*points(sweep, numbers, 1), *(Probe("step", "float32", (layers,)) for layers in (1, 6))]
    return RanksMeasured(1, job, [RankReport({point: [seconds(point)] * 4 for point in whole}, numbers, machine)])


def test_a_device_s_file_has_no_peak_and_no_context_below_the_catalog(tmp_path: Path) -> None:
    known = known_fields(H100.name)
    fields = device_entry_of([made_up(H100, _job(1, "cpu"))], 10.0, tmp_path)
    device = entry(fields, "mine")
    assert device.peak_tflops == known["peak_tflops"] | {"float32": fields["peak_tflops"]["float32"]}
    assert device.peak_tflops["float32"] > known["peak_tflops"]["float32"]  # it reached more, and that is written
    assert device.memory_gb_per_s == known["memory_gb_per_s"] and device.host_gb_per_s == known["host_gb_per_s"]
    assert device.constants is not None and device.constants.context_bytes == 1.2e9
    assert 0.09 < device.constants.product < 0.11 and device.generation == "hopper"
    assert not {"gap_s", "link", "jitter"} & device.constants.model_fields_set  # as for its generation
    printed = device.source
    assert (
        "lower than the catalog says, which holds: bfloat16 products" in printed and "context 0.5 of 1.2 GB" in printed
    )
    wide = Machine("cuda", H100.name, 85e9, 2e9, 132)
    assert device_entry_of([made_up(wide, _job(1, "cpu"))], 10.0, tmp_path)["constants"]["context_bytes"] == 2e9


def test_a_cpu_s_file_has_what_it_reached(tmp_path: Path) -> None:
    fields = device_entry_of([made_up(Machine(), _job(1, "cpu"))], 10.0, tmp_path)
    assert fields["generation"] == "cpu" and fields["constants"]["product"] == 1.0 and "gap_s" in fields["constants"]
    assert 90 < fields["peak_tflops"]["bfloat16"] < 101 and "catalog" not in fields["source"]
