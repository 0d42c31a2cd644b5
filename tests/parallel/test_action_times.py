"""Actions on a device began and ended when its stream came to them, and not when the host asked for them."""

import time
from itertools import pairwise

import pytest
import torch

from shardwright.config.job import JobSpec
from shardwright.measure.step_time import Comparison
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.device_streams import CudaStreams
from shardwright.parallel.pipeline.action_times import DeviceTimes, Performed
from shardwright.schedule.action import Action, Kind
from shardwright.schedule.job_program import job_program
from shardwright.schedule.timing import Costs, Times
from shardwright.train.build import build
from shardwright.train.train_step import train_step
from support.cases import made_up_tokens, small_job
from support.ranks import run_on_mesh

GAP_S = 1e3  # between two moments of the device: no host takes so long


class SlowDevice:
    """Events of a stream that takes `GAP_S` from each to the next."""

    events: list["SlowDevice"]
    num_waits: int

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        SlowDevice.events.append(self)

    def synchronize(self) -> None:
        SlowDevice.num_waits += 1

    def elapsed_time(self, other: "SlowDevice") -> float:
        """Milliseconds, as CUDA has them."""
        return (self.events.index(other) - self.events.index(self)) * GAP_S * 1e3


@pytest.fixture
def slow_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", SlowDevice)
    SlowDevice.events, SlowDevice.num_waits = [], 0


def test_moments_are_those_of_the_device(slow_device: None) -> None:
    job = small_job()
    action = next(iter(build_program(job)))
    times = DeviceTimes(CudaStreams(torch.device("cuda")))
    before_s = time.perf_counter()
    start, began, end = times.now(), times.now(), times.now()
    times.add(action, start, began, end)
    assert SlowDevice.num_waits == 0
    (performed,) = times.performed()
    after_s = time.perf_counter()
    assert performed.began_s - performed.start_s == pytest.approx(GAP_S)
    assert performed.end_s - performed.began_s == pytest.approx(GAP_S)
    assert before_s <= performed.end_s + GAP_S <= after_s  # the last event is of the moment when they are read
    assert times.performed() == [performed]
    assert SlowDevice.num_waits == 1
    times.clear()
    assert times.performed() == []


def build_program(job: JobSpec) -> tuple[Action, ...]:
    return job_program(job).ranks[0]


def performed_on(mesh: Mesh, job: JobSpec) -> list[Performed]:
    torch.cuda.Event = SlowDevice  # type: ignore[assignment, misc]
    SlowDevice.events, SlowDevice.num_waits = [], 0
    replica = build(job, mesh)
    replica.executor._times = DeviceTimes(CudaStreams(torch.device("cuda")))
    train_step(replica, 0, made_up_tokens(job, 0))
    assert SlowDevice.num_waits == 0, "a step waits for nobody to have its times"
    return replica.executor.performed


def test_a_step_is_told_in_them() -> None:
    job = small_job(batch=4)
    (row,) = run_on_mesh(job, performed_on, job)
    costs = Costs((1.0,), (1.0,), (1.0,), latency=0.0, step=1.0)
    executed = Comparison(costs, Times((), [], []), 1.0, [row]).executed()
    (starts,), (ends,) = executed.start, executed.end
    computes = [i for i, entry in enumerate(row) if entry.action.kind in (Kind.FORWARD, Kind.BACKWARD)]
    assert len(computes) == 8
    for i in computes:
        assert ends[i] - starts[i] == pytest.approx(GAP_S)
    assert starts[computes[0]] == pytest.approx(0.0)
    assert all(ends[i] + GAP_S == pytest.approx(starts[j]) for i, j in pairwise(computes))
