"""Calibrate this machine: launch ranks, first one and then all; each measures its computing and its collectives."""

import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.phrase import say
from shardwright.config.progress_records import tell_part
from shardwright.config.units import counted_phrase
from shardwright.measure.calibrate.device_file import RanksMeasured, device_entry_of
from shardwright.measure.calibrate.sweep import Sweep, measure_machine
from shardwright.train.launch.launch import launch
from shardwright.train.launch.scratch_folder import scratch_folder
from shardwright.train.launch.this_machine import machine_faults

_MOST_ALONE = 64  # ranks that are busy at once, if the user gives no number


def ranks_here() -> int:
    """Ranks that keep this machine busy: one for each GPU, or for each core."""
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else os.cpu_count() or 1
    return max(1, min(_MOST_ALONE, num_devices))


def numbers_of_ranks(num_ranks: int) -> list[int]:
    """Numbers of busy ranks, launch by launch: one, two, and all."""
    return sorted({1, min(2, num_ranks), num_ranks})


def calibrate_here(sweep: Sweep, ranks: int, device: str) -> tuple[dict[str, Any], Sequence[RanksMeasured]]:
    """Measure with up to `ranks` ranks, on run.device cpu, cuda or auto. Returns the fields of a device's file.

    Raises PlanError if this machine can't start the ranks, and RunError if one fails.
    """
    if faults := machine_faults(_job(ranks, device)):
        raise PlanError(
            "calibrate", [*faults, say("ask for fewer than {ranks} with --ranks", ranks=counted_phrase(ranks, "rank"))]
        )
    start_s, launches = time.perf_counter(), []
    with scratch_folder() as scratch:
        numbers = numbers_of_ranks(ranks)
        for place, number in enumerate(numbers):
            tell_part(say("measuring with {ranks}", ranks=counted_phrase(number, "rank")), place, len(numbers))
            job = _job(number, device)
            reports = launch(partial(measure_machine, sweep), job, scratch / f"{number}")
            launches.append(RanksMeasured(number, job, reports))
        return device_entry_of(launches, time.perf_counter() - start_s, scratch), launches


def _job(ranks: int, device: str) -> JobSpec:
    """A small job for `ranks` ranks, each of which is a replica."""
    return make_job(
        {
            "name": "calibrate",
            "model": {"layers": 2, "hidden": 64, "heads": 2, "vocab": 256, "sequence": 64},
            "plan": {"dp": ranks},
            "batch": {"global_batch_size": ranks},
            "run": {"device": device},
        }
    )
