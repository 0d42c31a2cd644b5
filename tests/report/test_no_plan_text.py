"""By how much no plan fits."""

import re

from shardwright.config.job import JobSpec
from shardwright.config.load import load_job
from shardwright.report.fit_verdict import no_plan_text


def job(model: str, nodes: int) -> JobSpec:
    cluster = ['cluster.device="h100-sxm"', "cluster.devices_per_node=8", f"cluster.nodes={nodes}"]
    batch = [f"plan.dp={2 * nodes}", f"batch.global_batch_size={64 * nodes}"]
    return load_job("quickstart", [f'model.name="{model}"', *cluster, *batch])


def test_the_devices_that_could_hold_it_are_enough_and_fewer_are_not() -> None:
    """Llama 3 405B has 16 bytes a parameter and more over 8 devices; the number that is told is past that bound."""
    text = no_plan_text(job("llama3-405b", 1))
    (state,) = (float(number) for number in re.findall(r"are about ([0-9.]+) GiB of each device", text))
    assert 16 * 405e9 / 8 < state * 2**30 < 20 * 406e9 / 8
    (devices,) = (int(number) for number in re.findall(r"(\d+) devices or more could hold them", text))
    assert 8 < devices < 80 and "Use more devices" in text
    assert "or more could hold them" not in no_plan_text(job("llama3-405b", devices // 8 + 1))


def test_where_the_state_alone_would_fit_the_rest_is_named() -> None:
    text = no_plan_text(job("llama3-8b", 1))
    assert "Each plan that may be chosen needs more: activations and buffers lie beside that" in text


def test_host_memory_that_is_not_known_is_not_told() -> None:
    """Nobody knows then how many devices would do: no number is told, and none that is endless."""
    known = job("llama3-405b", 1)
    unknown = known.model_copy(update={"cluster": known.cluster.model_copy(update={"device": "a100-pcie-40g"})})
    text = no_plan_text(unknown)
    assert "inf" not in text and "host's memory" not in text and "devices or more" not in text
