"""A wait of the host in any function that a step of the loop calls is told."""

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

import pytest

import shardwright
from shardwright.config.job import JobSpec
from shardwright.measure.checks.dry_loop import DryLoop
from shardwright.measure.checks.host_waits import reading_faults, wait_faults
from shardwright.measure.checks.plan_checks import all_wait_faults
from shardwright.measure.checks.recorded_runs import RankAccesses, recorded_accesses
from support.cases import small_job, with_optimizer

SOURCE = Path(shardwright.__file__).parent
ROOMS = tuple(f"{SOURCE / room}/" for room in ("model", "parallel", "precision", "train"))  # of the runtime
LEAST_PLANTED = 40
JOBS = {
    "one rank": small_job(batch=2),
    "zero 1": small_job(batch=2, dp=2, zero=1),
    "zero 3": small_job(batch=2, dp=2, zero=3),
    "pipeline": small_job(batch=4, pp=2, dp=2, zero=2),
    "pairs": small_job(batch=4, pp=2, schedule="dualpipev", virtual_stages=2),
    "sequence parallel": small_job(batch=2, tp=2, sequence_parallel=True),
    "ring": small_job(batch=2, cp=2),
    "experts": small_job("mixtral", batch=2, dp=2, ep=2),
    "compressed": small_job(batch=2, dp=2, compress="powersgd", compress_least=64),
    "muon": with_optimizer(small_job(batch=2, dp=2, zero=1), name="muon"),
    "recomputed": small_job(batch=2, layers=4, recompute="full", offload_activations=True),
}


@dataclass
class Planted:
    """The lines of one function at which the host waits: in steps, and for their measurements."""

    in_steps: list[str] = field(default_factory=list)
    to_read: list[str] = field(default_factory=list)


class Planter:
    """Lets the host wait for the device at the beginning of each call of a function of the runtime, and keeps these
    waits apart, by function."""

    def __init__(self, loop: DryLoop) -> None:
        self.waits: defaultdict[CodeType, Planted] = defaultdict(Planted)
        self._streams = loop.streams
        self._is_reading = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """A profile function of sys.setprofile."""
        code = frame.f_code
        if code is DryLoop.read_measurements.__code__:
            self._is_reading = event == "call"
        if event == "call" and code.co_filename.startswith(ROOMS):
            streams, planted = self._streams, self.waits[code]
            clock = dict(streams.host.clock)
            streams.order_host(streams.current().worker.clock)
            (planted.to_read if self._is_reading else planted.in_steps).append(streams.waits.pop())
            streams.host.clock = clock  # as without this wait


@contextmanager
def planting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Planter]]:
    """Plant waits in the steps of a loop whose waits are counted: those that it does when it is called for the second
    time."""
    planters, go_on = list[Planter](), DryLoop.go_on

    def watched(self: DryLoop, num_steps: int) -> None:
        if self.done > 0:
            planters.append(Planter(self))
            sys.setprofile(planters[0])
        try:
            go_on(self, num_steps)
        finally:
            sys.setprofile(None)

    with monkeypatch.context() as patch:
        patch.setattr(DryLoop, "go_on", watched)
        yield planters


def faults_with(job: JobSpec, ran: RankAccesses, planted: Planted) -> list[str]:
    """The faults of a rank that waits in one function, beside its own waits."""
    in_steps = wait_faults(job, [*ran.waits, *planted.in_steps], ran.num_steps, ran.passes)
    return in_steps + reading_faults(job, [*ran.waits_to_read, *planted.to_read], ran.num_lines)


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", JOBS)
def test_a_wait_in_any_function_of_a_step_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = JOBS[name]
    with planting(monkeypatch) as planters:
        ran = recorded_accesses(job, job.plan.world - 1)
    assert all_wait_faults(job, ran) == [] and ran.faults == ()
    assert len(planters[0].waits) >= LEAST_PLANTED
    untold = [code.co_name for code, planted in planters[0].waits.items() if not faults_with(job, ran, planted)]
    assert untold == []
