"""Readings of GPUs from a stand-in for the driver's library, the use of links, and profiles of steps."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwright.config.cluster import ClusterSpec, LinkSpec, PartSpec
from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.build import build
from shardwright.train.health.gpu_readings import GpuReadings, gpu_sentences, open_readings
from shardwright.train.health.run_health import RunHealth
from shardwright.train.step_metrics import link_use
from shardwright.train.train_step import train_step
from support.cases import my_tokens, small_job
from support.ranks import run_on_mesh

CUDA = torch.device("cuda")


class NVMLError(Exception):
    """The error that the library raises."""


class FakeNvml:
    """Two devices: 0 is held back by heat and has had a fault, 1 answers hardly anything."""

    NVMLError = NVMLError
    nvmlEventTypeXidCriticalError = 8
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 0, 1, 0

    def __init__(self) -> None:
        self.faults = [(0, 79), (0, 48)]

    def nvmlInit(self) -> None:  # noqa: N802
        """Nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.answer(name, *args)

    def answer(self, name: str, *args: Any) -> Any:
        """The answer to any question."""
        match name:
            case "nvmlDeviceGetCount":
                return 2
            case "nvmlDeviceGetHandleByIndex" | "nvmlDeviceGetIndex":
                return args[0]
            case "nvmlEventSetCreate":
                return "events"
            case "nvmlDeviceRegisterEvents":
                return None
            case "nvmlEventSetWait_v2" if self.faults:
                device, xid = self.faults.pop(0)
                return SimpleNamespace(device=device, eventData=xid)
            case "nvmlDeviceGetTemperature":
                return 90
        if args[0] == 1 or name == "nvmlEventSetWait_v2":
            raise NVMLError("Not Supported")
        return {
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=30, total=40),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=98, memory=5),
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x40 | 0x1,
            "nvmlDeviceGetPowerUsage": 651_000,
            "nvmlDeviceGetTotalEccErrors": 3 if args[1:2] == (0,) else 1,
            "nvmlDeviceGetClockInfo": {1: 1410, 2: 2619}.get(args[-1]),
        }[name]


def test_what_the_driver_says_is_read() -> None:
    readings, printed = open_readings(CUDA, load=lambda name: FakeNvml())
    assert readings is not None and printed == ""
    hot, quiet = readings.read()
    assert (hot.index, hot.use_share, hot.memory_share, hot.power_w) == (0, 0.98, 0.75, 651.0)
    assert (hot.temperature_c, hot.sm_clock_mhz, hot.memory_clock_mhz) == (90, 1410, 2619)
    assert (hot.held_back_by, hot.corrected_errors, hot.uncorrected_errors) == (("hardware thermal",), 3, 1)
    assert hot.xids == (79, 48)
    assert (quiet.index, quiet.temperature_c) == (1, 90)
    assert (quiet.use_share, quiet.power_w, quiet.held_back_by, quiet.xids) == (None, None, (), ())
    assert gpu_sentences([hot, quiet]) == [
        "GPU 0 of this node: fault Xid 79; fault Xid 48; 1 memory errors that were not corrected; held back by "
        "hardware thermal"
    ]
    assert readings.read()[0].xids == ()  # each is told once


def test_without_the_library_a_sentence_says_so() -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    readings, printed = open_readings(CUDA, load=missing)
    assert readings is None and "pip install 'shardwright[gpu]'" in printed
    assert open_readings(torch.device("cpu"), load=missing) == (None, "")


def test_a_driver_that_refuses_is_told() -> None:
    nvml = FakeNvml()

    def refuse() -> None:
        raise NVMLError("Driver Not Loaded")

    nvml.nvmlInit = refuse  # type: ignore[method-assign]
    readings, printed = open_readings(CUDA, load=lambda name: nvml)
    assert readings is None and "Driver Not Loaded" in printed


def test_no_events_are_no_reason_to_read_nothing() -> None:
    nvml = FakeNvml()
    nvml.answer = lambda name, *args, ask=nvml.answer: (  # type: ignore[method-assign]
        _raise() if name == "nvmlEventSetCreate" else ask(name, *args)
    )
    assert GpuReadings(nvml).read()[0].temperature_c == 90


def _raise() -> None:
    raise NVMLError("Not Supported")


@pytest.mark.parametrize(
    ("cluster", "sent", "shares"),
    [
        (ClusterSpec(), (10**9, 10**9), (None, None)),
        (ClusterSpec(device="h100-sxm"), None, (None, None)),
        (
            ClusterSpec(intra_node=LinkSpec(bandwidth_gb_per_s=100.0), inter_node=LinkSpec(bandwidth_gb_per_s=25.0)),
            (400 * 10**9, 50 * 10**9),
            (0.5, 0.25),
        ),
        (ClusterSpec(intra_node=LinkSpec(bandwidth_gb_per_s=100.0)), (400 * 10**9, 50 * 10**9), (0.5, None)),
        (ClusterSpec(parts=[PartSpec(device="h100-sxm", devices_per_node=8)]), (1, 1), (None, None)),
    ],
)
def test_link_use_is_of_what_the_cluster_states(cluster: ClusterSpec, sent: Any, shares: Any) -> None:
    """4 ranks in 2 s have 4 x 2 x 100 = 800 GB inside nodes, and 200 between."""
    assert link_use(sent, 2.0, 4, cluster) == shares


def test_links_of_the_catalog_count_where_the_cluster_states_none() -> None:
    inside, between = link_use((10**9, 10**9), 1.0, 8, ClusterSpec(device="h100-sxm"))
    assert inside is not None and between is not None
    assert 0 < inside < between < 1


def profiled(mesh: Mesh, job: JobSpec, folder: Path) -> None:
    replica = build(job, mesh)
    health = RunHealth(replica, folder)
    for step in range(4):
        with health.recording(step, 1):
            train_step(replica, step, my_tokens(mesh, job, step), health.judge)


@pytest.mark.processes
def test_chosen_steps_are_profiled_on_every_rank(tmp_path: Path) -> None:
    job = small_job(dp=2)
    job = job.model_copy(update={"run": job.run.model_copy(update={"profile_first_step": 2, "profile_steps": 2})})
    run_on_mesh(job, profiled, job, tmp_path)
    files = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert files == [f"rank{rank:05d}-step{step:05d}.json.gz" for rank in (0, 1) for step in (2, 3)]
    for rank in (0, 1):
        for step in (2, 3):
            with gzip.open(tmp_path / "profile" / f"rank{rank:05d}-step{step:05d}.json.gz", "rt") as file:
                names = [event.get("name") for event in json.load(file)["traceEvents"]]
            assert f"step {step}" in names
            assert "aten::mm" in names or "aten::addmm" in names
