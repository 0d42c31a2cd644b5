"""Money, energy and time lost to failures: by hand, against a simulation, and against what was published."""

import calendar
import math
import re
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.config import catalog
from shardwright.config.catalog_entry import read_entry
from shardwright.config.cluster import ClusterSpec, DeviceSpec
from shardwright.config.load import load_job
from shardwright.config.phrase import in_language
from shardwright.cost.calibration import shipped
from shardwright.cost.failures import (
    Reliability,
    best_interval_s,
    checkpoint_bytes,
    goodput,
    reliability_gaps,
    reliability_of,
)
from shardwright.cost.from_job import run_of
from shardwright.cost.money import money_gaps, price_source, step_money
from shardwright.sharding.stage_parameters import num_parameters
from shardwright.simulate.closed_form import step_time
from support.languages import num_chinese


def cluster(**fields: object) -> ClusterSpec:
    return ClusterSpec.model_validate({"name": "test", "device": "h100-sxm"} | fields)


# --- money and energy ---


def test_a_step_by_hand() -> None:
    money = step_money(cluster(usd_per_device_hour=2.0, power_share=0.5, pue=1.2), step_s=9.0, num_devices=1000)
    assert money.device_hours == pytest.approx(2.5)
    assert money.usd == pytest.approx(5.0)
    assert money.kwh == pytest.approx(0.7 * 0.5 * 1.2 * 2.5)
    assert asdict(money.times(4.0)) == pytest.approx({"usd": 20.0, "kwh": 4 * 1.05, "device_hours": 10.0})


def test_the_catalogs_price_is_taken_where_the_cluster_has_none() -> None:
    (price,) = [catalog.read("devices", "h100-sxm")["usd_per_hour"]]
    assert step_money(cluster(), 3600.0, 1).usd == pytest.approx(price)
    assert step_money(cluster(usd_per_device_hour=1.0), 3600.0, 1).usd == pytest.approx(1.0)
    assert money_gaps(cluster()) == []


def test_many_plans_at_once() -> None:
    seconds = np.array([1.0, 2.0])
    both = step_money(cluster(), seconds, np.array([8, 16]))
    assert np.allclose(both.usd, [step_money(cluster(), 1.0, 8).usd, step_money(cluster(), 2.0, 16).usd])


@pytest.mark.parametrize("device", ["unknown", "laptop-cpu"])
def test_what_is_not_known_is_said(device: str) -> None:
    money = step_money(cluster(device=device), 1.0, 8)
    assert (money.usd, money.kwh) == (None, None)
    assert money.times(2.0).usd is None
    price, power = money_gaps(cluster(device=device))
    assert "set cluster.usd_per_device_hour" in price and "power_w" in power
    assert len(money_gaps(cluster(device=device, usd_per_device_hour=1.0))) == 1
    (failures,) = reliability_gaps(cluster(device=device))
    assert "cluster.hours_between_failures and cluster.checkpoint_gb_per_s are 0" in failures
    assert reliability_of(cluster(device=device), 8, 1e9) is None


@pytest.mark.parametrize("name", catalog.names("devices"))
def test_network_price_power_and_failures_have_a_source(name: str) -> None:
    device = DeviceSpec.model_validate(catalog.read("devices", name))
    fields = (
        "reserved_gib",
        "communicator_channels",
        "server_devices",
        "exponentials_t_per_s",
        "network_gb_per_s",
        "usd_per_hour",
        "power_w",
        "hours_between_failures",
    )
    constants = device.constants.model_fields_set if device.constants else set()
    assert {field for field in fields if getattr(device, field)} | constants == set(device.sources)
    source = device.sources.get("usd_per_hour", "")
    assert not source or re.search(rf"\b({'|'.join(calendar.month_name[1:])}) 20\d\d\b", source)  # a price has a month
    for usd, devices in re.findall(r"\$([\d.]+) an instance of (\d+)", source):
        assert device.usd_per_hour == pytest.approx(float(usd) / int(devices), abs=0.0051)  # rounded to a cent


# --- failures ---

jobs = st.builds(
    Reliability,
    between_failures_s=st.floats(1e3, 1e6),
    checkpoint_s=st.floats(1.0, 300.0),
    restart_s=st.floats(0.0, 1000.0),
    writing_s=st.floats(0.0, 300.0),
)
jobs = st.builds(lambda job, share: replace(job, idle_s=share * job.restart_s), jobs, st.floats(0.0, 1.0))


def simulated_share(job: Reliability, interval_s: float, segments: int) -> float:
    """Share of the time that trains, by drawing failures: what is computed is safe some time after its checkpoint."""
    rng = np.random.default_rng(1)
    clock, done = 0.0, 0
    failure = rng.exponential(job.between_failures_s)
    ahead = 0.0  # seconds of training and checkpointing behind the last checkpoint that is durable
    while done < segments:
        end = clock + float(interval_s + job.checkpoint_s + job.writing_s) - ahead
        if failure >= end:
            clock, done, ahead = end, done + 1, float(job.writing_s)
            continue
        clock, ahead = failure, 0.0
        while True:  # a restart may fail too, but for its first seconds
            clock += float(job.idle_s)
            failure = clock + rng.exponential(job.between_failures_s)
            if failure >= clock + job.restart_s - job.idle_s:
                clock += float(job.restart_s - job.idle_s)
                break
            clock = failure
    return segments * interval_s / clock


@pytest.mark.parametrize(("writing_s", "idle_s"), [(0.0, 0.0), (250.0, 0.0), (0.0, 400.0), (250.0, 400.0)])
@pytest.mark.parametrize("interval_s", [300.0, 1000.0, 5000.0])
def test_goodput_is_what_a_simulation_finds(interval_s: float, writing_s: float, idle_s: float) -> None:
    job = Reliability(4000.0, checkpoint_s=100.0, restart_s=500.0, writing_s=writing_s, idle_s=idle_s)
    assert goodput(job, interval_s).training == pytest.approx(simulated_share(job, interval_s, 20_000), rel=0.02)


@given(job=jobs, interval_s=st.floats(1.0, 1e4))
def test_shares_add_up_and_none_is_negative(job: Reliability, interval_s: float) -> None:
    result = goodput(job, interval_s)
    shares = [result.training, result.checkpoints, result.restarts, result.lost_work]
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) >= -1e-9


@given(job=jobs)
def test_no_other_interval_trains_noticeably_more(job: Reliability) -> None:
    best = best_interval_s(job)
    others = best * np.linspace(0.25, 4.0, 61)
    assert goodput(job, best).training >= 0.9999 * np.max(goodput(job, others).training)


def test_rare_failures_give_youngs_interval() -> None:
    job = Reliability(between_failures_s=1e9, checkpoint_s=10.0, restart_s=0.0)
    assert best_interval_s(job) == pytest.approx(math.sqrt(2 * 10.0 * 1e9), rel=1e-3)
    assert best_interval_s(Reliability(10.0, 20.0, 0.0)) == 10.0  # Daly: M where a checkpoint takes 2 M and more


def test_many_jobs_at_once() -> None:
    sizes = np.array([1024.0, 16384.0])
    spec = cluster(checkpoint_gb_per_s=100.0)
    both = reliability_of(spec, sizes, 1e12)
    assert both is not None
    result = goodput(both, best_interval_s(both)).training
    for size, share in zip(sizes, result, strict=True):
        one = reliability_of(spec, float(size), 1e12)
        assert one is not None and goodput(one, best_interval_s(one)).training == pytest.approx(share)


def test_each_source_of_a_price_is_in_chinese_too() -> None:
    devices = [read_entry("devices", name, DeviceSpec) for name in catalog.names("devices")]
    sources = [source for device in devices if (source := price_source(device))]
    assert len(sources) > 10
    assert not [source for source in sources if not num_chinese(in_language(source, "zh"))]


def test_a_checkpoint_of_a_trillion_parameters() -> None:
    assert checkpoint_bytes(1008e9, 2, 8) == pytest.approx(13.8e12, rel=0.03)
    assert checkpoint_bytes(1e9, 4, 8) == 12e9
    assert checkpoint_bytes(1e9, 2, 4) == 10e9


def test_llama3_trained_more_than_90_percent_of_the_time() -> None:
    """Grattafiori et al. 2024 (arXiv 2407.21783, section 3.3.4): 419 unexpected interruptions in 54 days."""
    job = load_job("llama3-405b-16k")
    result = reliability_of(job.cluster, job.plan.world, checkpoint_bytes(num_parameters(job.model), 2, 8))
    assert result is not None
    assert 54 * 86400 / result.between_failures_s == pytest.approx(419, rel=0.01)
    training = goodput(result, best_interval_s(result)).training
    assert 0.90 < training < 0.97
    # The model card of Llama 3.1 405B: 30.84 million GPU hours for 15.6 trillion tokens.
    step = step_money(job.cluster, step_time(run_of(job), shipped()).total / training, job.plan.world)
    assert step.times(15.6e12 / job.tokens_per_step).device_hours == pytest.approx(30.84e6, rel=0.12)
