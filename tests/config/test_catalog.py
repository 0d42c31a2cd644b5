"""The catalog: models have the sizes that were published, and jobs the steps that were measured."""

import json
import re
from pathlib import Path

import pytest

from shardwright.cli.checked_job import load, load_to_run
from shardwright.config import catalog
from shardwright.config.cluster import ClusterSpec
from shardwright.config.job import JobSpec
from shardwright.config.model import ModelSpec
from shardwright.cost.calibration import device_of, shipped
from shardwright.cost.from_job import run_of
from shardwright.memory.rank_estimate import peak_memory
from shardwright.sharding.stage_parameters import num_active_parameters, num_parameters
from shardwright.simulate.closed_form import StepTime, step_time

# Parameters of released checkpoints, as the headers of their files say, and what of them this decoder does not have.
CHECKPOINTS = {
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "opt-6.7b": 6_658_473_984,
    "opt-30b": 29_974_540_288,
    "bloom-176b": 176_247_271_424,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "yi-6b": 6_061_035_520,
    "yi-34b": 34_388_917_248,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
}
# Billions, as papers say of models that were not released, or not with a count.
ROUNDED = {
    "gpt3-175b": 175, "opt-66b": 66, "opt-175b": 175, "mt-nlg-530b": 530, "megatron-1.7b": 1.7, "megatron-3.6b": 3.6,
    "megatron-7.5b": 7.5, "megatron-18b": 18.4, "megatron-39b": 39.1, "megatron-76b": 76.1, "megatron-145b": 145.6,
    "megatron-310b": 310.1, "megatron-530b": 529.6, "megatron-1t": 1008.0, "gpt-100b": 102.4,
}  # fmt: skip


def model_of(name: str) -> ModelSpec:
    return ModelSpec.model_validate(catalog.read("models", name))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_models_have_the_parameters_of_their_checkpoints(name: str) -> None:
    assert num_parameters(model_of(name)) == CHECKPOINTS[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_models_have_the_size_of_their_papers(name: str) -> None:
    decimals = 1 if isinstance(ROUNDED[name], float) else 0
    assert round(num_parameters(model_of(name)) / 1e9, decimals) == pytest.approx(ROUNDED[name], abs=0.06)


def test_mixtral_8x22b_computes_a_token_with_39_billion() -> None:
    assert num_active_parameters(model_of("mixtral-8x22b")) / 1e9 == pytest.approx(39, rel=0.01)


@pytest.mark.parametrize("name", [name for name in catalog.names("clusters") if name != "this-machine"])
def test_clusters_are_of_known_devices_and_have_as_many_as_their_name_says(name: str) -> None:
    cluster = ClusterSpec.model_validate_json(json.dumps(catalog.read("clusters", name)))
    device = device_of(cluster.device)
    last = name.rsplit("-", 1)[-1]
    assert not last.isdigit() or cluster.num_devices == int(last)
    assert cluster.devices_per_node <= max(device.link_domain, 4)
    assert cluster.intra_node.bandwidth_gb_per_s == device.link_gb_per_s
    assert cluster.inter_node.bandwidth_gb_per_s < cluster.intra_node.bandwidth_gb_per_s


# --- jobs ---

# Measurements, by job: ("step", seconds), or TFLOP/s of a device over its peak, with ("hfu") or without ("mfu")
# what was computed again. Sources are in the jobs; of DeepSeek-V3, 180,000 GPU hours a trillion tokens (section 1).
MEASURED = {
    "gpt3-175b-1024": ("total", 32.0),
    "megatron-1t-3072": ("hfu", 163 / 312),
    "mt-nlg-530b-2240": ("total", 60.1),
    "bloom-176b-384": ("hfu", 156 / 312),
    "llama3-405b-8k": ("mfu", 430 / 989),
    "llama3-405b-16k": ("mfu", 400 / 989),
    "llama3-405b-16k-long": ("mfu", 380 / 989),
    "deepseek-v3": ("total", 180e3 * 3600 / 1e12 * 15360 * 4096 / 2048),
}


def predicted(job: JobSpec) -> StepTime:
    return step_time(run_of(job), shipped())


def published(name: str) -> JobSpec:
    """A job of the catalog with the software of its published run, which its file names."""
    (software,) = re.findall(r"`--as ([^`]+)`", (Path(catalog.__file__).parent / "jobs" / f"{name}.toml").read_text())
    return load(name, (f"cluster.software={software}",))


@pytest.mark.parametrize("name", MEASURED)
def test_published_plans_take_as_long_as_was_measured(name: str) -> None:
    kind, measured = MEASURED[name]
    # The longest pipeline, 16 ranks of 8 stages, waits for 254 messages, each with the latency of the fabric of today.
    assert getattr(predicted(published(name)), kind) == pytest.approx(measured, rel=0.12)


PRICED = [name for name in catalog.names("jobs") if not name.startswith("quickstart")]
TOLD = ("gpt-100b-32xa100", "gpt-100b-told")  # often told, and never run


@pytest.mark.parametrize("name", [name for name in PRICED if name not in TOLD])
def test_jobs_fit(name: str) -> None:
    job = published(name)
    room = device_of(job.cluster.device).memory_gib * 2**30
    assert peak_memory(run_of(job), shipped()).process < room


def test_the_often_told_plan_of_100_billion_does_not_fit() -> None:
    job = published("gpt-100b-32xa100")
    state = 16 * 25 * 12 * 9216**2  # bytes of 25 layers' weights, gradients and Adam's state, by hand
    memory = peak_memory(run_of(job), shipped())
    assert memory.parameters + memory.gradients + memory.optimizer == pytest.approx(state, rel=0.05)
    assert state > 4 * device_of(job.cluster.device).memory_gib * 2**30


@pytest.mark.parametrize("name", PRICED)
def test_this_runtime_takes_them(name: str) -> None:
    load_to_run(name, ())
