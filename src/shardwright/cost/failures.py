"""Failures: the share of its time in which a job trains, and how often it should write a checkpoint.

Failures come at random at a constant rate, so they also strike while a checkpoint is written or the job restarts.
Daly 2006 (A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer
Systems 22). With mean time between failures M, checkpoint time d, restart time R and t seconds of training between
checkpoints, a segment of t takes M exp(R / M) (exp((t + d) / M) - 1) seconds on average (equation 20).

Two things are added. If the job trains while a checkpoint is written, d is the time for which the checkpoint stops it,
and after a failure in the w seconds until the checkpoint is durable the job goes back to the previous one: a segment is
safe R + t + d + w seconds after a failure, or t + d seconds after the previous segment, if no other failure comes. And
for v of the R seconds nothing of the job runs that could fail, so that a failure changes nothing. So v passes with each
failure, and the equation holds for the time between: a segment takes (M + v) exp((R - v + w) / M) (exp((t + d) / M) -
1) on average. All times are in seconds, numbers or arrays with one entry a plan.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from shardwright.config.cluster import ClusterSpec
from shardwright.config.cluster_facts import device_hours_between_failures
from shardwright.config.job import JobSpec
from shardwright.config.phrase import both, say
from shardwright.config.units import FLOAT32_BYTES
from shardwright.layers.arrays import Numbers

_EXAMPLE_HOURS, _EXAMPLE_GB_PER_S = 50_000.0, 20.0  # as somebody might set them


@dataclass(frozen=True)
class Reliability:
    """Seconds between failures of the whole job while it runs, for which a checkpoint stops the job, of a restart, of
    writing a checkpoint while the job goes on, and of the part of a restart in which nothing runs that could fail."""

    between_failures_s: Numbers
    checkpoint_s: Numbers
    restart_s: Numbers
    writing_s: Numbers = 0.0
    idle_s: Numbers = 0.0


@dataclass(frozen=True)
class Goodput:
    """Shares of the time, which add up to 1, with a checkpoint after every `interval_s` of training."""

    training: Numbers
    checkpoints: Numbers
    restarts: Numbers
    lost_work: Numbers
    interval_s: Numbers


def checkpoint_bytes(
    num_parameters: float, compute_bytes: int, moment_bytes: float, master_bytes: int = FLOAT32_BYTES
) -> float:
    """Bytes of a checkpoint: optimizer state, with moments of `moment_bytes` a parameter, and the compute weights if
    they are not those that are updated, of `master_bytes`.

    Narayanan et al. 2021 (arXiv 2104.04473, section 5.10) write 13.8 TB for a trillion parameters.
    """
    return num_parameters * (master_bytes + moment_bytes + (compute_bytes if compute_bytes < master_bytes else 0))


def reliability_of(cluster: ClusterSpec, num_devices: Numbers, written_bytes: Numbers) -> Reliability | None:
    """The reliability of a job whose checkpoint has `written_bytes`; None if `reliability_gaps` is not empty."""
    if reliability_gaps(cluster):
        return None
    return Reliability(
        between_failures_s=3600.0 * device_hours_between_failures(cluster) / num_devices,
        checkpoint_s=written_bytes / (1e9 * cluster.checkpoint_gb_per_s),
        restart_s=cluster.restart_s,
    )


def reliability_gaps(cluster: ClusterSpec) -> list[str]:
    """A sentence on the unknown numbers, the fields to set; an empty list if all are known."""
    numbers = {
        "cluster.hours_between_failures": (device_hours_between_failures(cluster), _EXAMPLE_HOURS),
        "cluster.checkpoint_gb_per_s": (cluster.checkpoint_gb_per_s, _EXAMPLE_GB_PER_S),
    }
    unknown = [name for name, (number, _) in numbers.items() if not number]
    sets = " ".join(f"--set {name}={numbers[name][1]:g}" for name in unknown)
    if len(unknown) > 1:
        return [
            say(
                "time lost to failures is not said: {names} are 0, which is unknown; set both, such as {sets}",
                names=both(unknown),
                sets=sets,
            )
        ]
    return [
        say(
            "time lost to failures is not said: {name} is 0, which is unknown; set it, such as {sets}",
            name=name,
            sets=sets,
        )
        for name in unknown
    ]


def best_interval_s(job: Reliability) -> Numbers:
    """Seconds of training between checkpoints that lose the least time. Daly 2006, equation 37.

    Its first term is Young's (1974, A first order approximation to the optimum checkpoint interval): sqrt(2 d M).
    """
    m, d = job.between_failures_s, job.checkpoint_s
    half = d / (2 * m)
    series = np.sqrt(2 * d * m) * (1 + np.sqrt(half) / 3 + half / 9) - d
    best: Numbers = np.where(d < 2 * m, series, m)[()]
    return best


def goodput(job: Reliability, interval_s: Numbers) -> Goodput:
    """The shares of the time, with a checkpoint after every `interval_s` of training.

    Failures strike W / M times in W seconds in which the job runs. Each is followed by v idle seconds, and by R - v of
    restarting or by the next failure, which is M (1 - exp((v - R) / M)) on average.
    """
    m, d, v = job.between_failures_s, job.checkpoint_s, job.idle_s
    r = job.restart_s - v
    segment = (m + v) * np.exp((r + job.writing_s) / m) * np.expm1((interval_s + d) / m)
    training, checkpoints, restarts = interval_s / segment, d / segment, (v - m * np.expm1(-r / m)) / (m + v)
    return Goodput(training, checkpoints, restarts, 1 - training - checkpoints - restarts, interval_s=interval_s)


def best_interval(job: JobSpec) -> Callable[[float], float] | None:
    """A function from the seconds for which a checkpoint stops the job to the best seconds of training between
    checkpoints. None if the failure rate of the job's devices is unknown."""
    hours = device_hours_between_failures(job.cluster)
    return partial(_interval_of, 3600.0 * hours / job.plan.world) if hours else None


def _interval_of(between_failures_s: float, checkpoint_s: float) -> float:
    return float(best_interval_s(Reliability(between_failures_s, checkpoint_s, 0.0)))
