"""Changes that would make a runner-up win: one number of the input at a time, by bisection.

Numbers are those that a user can change or doubts: bandwidth of the network and of a node's links, the devices' rate
and memory bandwidth, and the batch.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shardwright.config.cluster_facts import network_gb_per_s, node_gb_per_s
from shardwright.config.job import JobSpec
from shardwright.config.link_words import link_words
from shardwright.config.phrase import fixed, say
from shardwright.config.units import number_text
from shardwright.cost.calibration import Constants, device_of, peak_flops, product_constants
from shardwright.cost.from_job import run_of
from shardwright.layers.query import Run
from shardwright.simulate.closed_form import step_time

Change = Callable[[Run, float], tuple[Run, Constants]]  # a run and the constants, with a number times a factor

_MOST = 8.0  # largest factor that is tried, up or down
_STEPS = 7  # of bisection: 2 ln 8 / 2^7, a 30th of the factor


@dataclass(frozen=True)
class Flip:
    """A change of one number of the input that makes another plan as fast: its factor, and the change in words."""

    name: str
    factor: float
    text: str


def flips(best: JobSpec, other_job: JobSpec, constants: Constants) -> list[Flip]:
    """The changes that make `other_job` as fast as `best`, nearest first; empty if there are none."""
    runs = run_of(best), run_of(other_job)
    best_s, other_s = (float(step_time(run, constants).total) for run in runs)
    if other_s <= best_s:
        return []
    changes = []
    for name, change, value, unit, only_more in _changeable_numbers(best, runs[0], constants):
        factor = _crossing(runs, change, only_more)
        if factor is not None:
            value_text = f"{max(1, round(factor)) * value:,.0f}" if only_more else number_text(factor * value)
            times = f"{max(1, round(factor))}" if only_more else f"{factor:.2g}"
            text = say(
                "{name} x {times} ({old} to {new} {unit})",
                name=name,
                times=times,
                old=number_text(value),
                new=value_text,
                unit=unit,
            )
            changes.append(Flip(name, factor, text))
    return sorted(changes, key=lambda flip: abs(math.log(flip.factor)))


def _changeable_numbers(job: JobSpec, run: Run, constants: Constants) -> Iterator[tuple[str, Change, float, str, bool]]:
    """Yield (name, change, value, unit, only_more) of each number; `only_more` is True if it can only grow."""
    cluster, device, number = job.cluster, device_of(job.cluster.device), run.grid.precision

    def network(run: Run, factor: float) -> tuple[Run, Constants]:
        return replace(run, network_bytes_per_s=factor * network_gb_per_s(cluster) * 1e9), constants

    def node(run: Run, factor: float) -> tuple[Run, Constants]:
        return replace(run, node_bytes_per_s=factor * node_gb_per_s(cluster) * 1e9), constants

    def scaled(*names: str) -> Change:
        parts = (device.generation, "common")
        keys = [next(f"{part}.{name}" for part in parts if f"{part}.{name}" in constants) for name in names]
        return lambda run, factor: (run, {**constants, **{key: factor * constants[key] for key in keys}})

    def batch(run: Run, factor: float) -> tuple[Run, Constants]:
        """A whole number of times the batch, for which both plans stay legal."""
        times = max(1, round(factor))
        return replace(run, grid=replace(run.grid, global_batch=times * job.batch.global_batch_size)), constants

    rate, domain = say("GB/s a device"), fixed(link_words(cluster).domain)
    yield say("network bandwidth"), network, network_gb_per_s(cluster), rate, False
    yield say("bandwidth within a {domain}", domain=domain), node, node_gb_per_s(cluster), rate, False
    products = scaled(*product_constants(number))
    peak = say("TFLOP/s of peak in {number}", number=number)
    yield say("rate of products"), products, peak_flops(run) / 1e12, peak, False
    yield say("memory bandwidth"), scaled("memory"), device.memory_gb_per_s, "GB/s", False
    yield say("batch"), batch, float(job.batch.global_batch_size), say("sequences"), True


def _crossing(runs: tuple[Run, Run], change: Change, only_more: bool) -> float | None:
    """The factor nearest to 1 at which the second run is as fast as the first, to a 30th; None if there is none."""

    def lag_s(factor: float) -> float:
        best_s, other_s = (float(step_time(*change(run, factor)).total) for run in runs)
        return other_s - best_s

    ends = [end for end in (_MOST, 1.0 / _MOST) if (end > 1.0 or not only_more) and lag_s(end) < 0.0]
    factors = []
    for end in ends:
        low, high = 0.0, math.log(end)
        for _ in range(_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if lag_s(math.exp(middle)) > 0.0 else (low, middle)
        factors.append(math.exp(high))
    return min(factors, key=lambda factor: abs(math.log(factor)), default=None)
