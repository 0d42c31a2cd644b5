"""An update in host memory: which bytes a thread moves there, and which copies a step waits for."""

from dataclasses import replace

import pytest

from shardwright.config.load import make_job
from shardwright.config.software import software_of
from shardwright.cost.calibration import rates_of, shipped
from shardwright.cost.from_job import run_of
from shardwright.layers.query import Run
from shardwright.simulate.closed_form import StepTime, step_time

MODEL = {"layers": 4, "hidden": 4096, "heads": 32, "ffn": 8192, "vocab": 1024, "sequence": 1024}


def run(software: str, **plan: object) -> Run:
    cluster = {"device": "a100-sxm-80g", "nodes": 1, "devices_per_node": 8}
    job = {"model": MODEL, "cluster": cluster, "plan": {"dp": 8, "zero": 2, **plan}, "batch": {"global_batch_size": 32}}
    of = run_of(make_job({**job, "precision": {"compute": "bf16"}}))
    return replace(of, software=software)


def step(software: str, **plan: object) -> StepTime:
    return step_time(run(software, offload_optimizer=1.0, **plan), shipped())


@pytest.mark.parametrize(("zero", "moved"), [(2, 42.0), (3, 48.0)])
def test_one_thread_updates_after_all_gradients_came(zero: int, moved: float) -> None:
    """Microbatches of 4 are one, so nothing adds up on the host."""
    of = run("deepspeed-2024", zero=zero, microbatch_size=4)
    rates, elements = rates_of(of, shipped()), of.shape.parameters / 8
    host_s = moved * elements / rates.host_thread_bytes_per_s + 6.0 * elements / (rates.host_thread_bytes_per_s / 2)
    assert step("deepspeed-2024", zero=zero, microbatch_size=4).host == pytest.approx(host_s, rel=0.01)


def test_gradients_of_several_microbatches_come_and_go() -> None:
    of = run("deepspeed-2024")
    each_s = 4.0 * of.shape.parameters / 8 / (rates_of(of, shipped()).host_thread_bytes_per_s / 2)
    one, four = (step("deepspeed-2024", microbatch_size=size).host for size in (4, 1))
    assert four - one == pytest.approx(4 * each_s, rel=0.01)


def test_cores_and_pinned_memory_are_faster() -> None:
    names = "deepspeed-2024", "deepspeed-2024+host-pinned", "deepspeed-2024+host-cores+host-pinned"
    seconds = [step(name).host for name in names]
    assert seconds[0] > 1.3 * seconds[1] > 1.3 * seconds[2] > 0
    assert software_of(names[2]).host == software_of(names[0]).host.model_copy(
        update={"one_thread": False, "pinned": True}
    )


def test_other_software_copies_while_it_updates() -> None:
    """State that is hosted in units hides the shorter of both."""
    of = run("megatron-core", microbatch_size=4)
    rates, elements = rates_of(of, shipped()), of.shape.parameters / 8
    software = software_of("megatron-core")
    host_s = (
        max(software.updated_bytes / rates.host_memory_bytes_per_s, software.gradient_bytes / rates.host_bytes_per_s)
        * elements
    )
    assert step("megatron-core", microbatch_size=4).host == pytest.approx(host_s, rel=0.01)


def test_parameters_come_by_the_same_link() -> None:
    slow, pinned = (
        step_time(run(name, zero=3, offload_parameters=True), shipped()).total
        for name in ("deepspeed-2024", "deepspeed-2024+host-pinned")
    )
    assert slow > pinned
