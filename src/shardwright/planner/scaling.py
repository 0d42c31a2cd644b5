"""A model over a range of cluster sizes: the best plan at each size, and the gain of more devices.

Strong scaling keeps the job's global batch, weak scaling its batch for each device. Efficiency is throughput for each
device over that of the smallest size at which the model fits. Memory efficiency is the memory of all devices at that
size over the memory of all devices at another: 1 if more devices share the same bytes, 1/2 if twice as many devices
hold twice the bytes.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from shardwright.config import largest
from shardwright.config.base import PlanError, shortened
from shardwright.config.job import JobSpec
from shardwright.config.phrase import fixed, say
from shardwright.config.progress_records import tell_part
from shardwright.config.units import DAY_S, counted_phrase
from shardwright.cost.calibration import Constants, shipped
from shardwright.cost.money import Money, step_money
from shardwright.memory.job_memories import fullest
from shardwright.planner.advice.recommendation import plans_of
from shardwright.planner.critical_batch import BatchLimits
from shardwright.planner.search.constraints import Constraints, whole_number
from shardwright.planner.search.forked_copies import shared
from shardwright.simulate.full_step import simulated_step

# From a job on a cluster: the job with the best plan, or None if none fits.
Choose = Callable[[JobSpec], JobSpec | None]
_KINDS = ("strong", "weak")


@dataclass(frozen=True)
class Point:
    """The best plan at one size: seconds of a step, bytes on the rank that needs most, money of a step."""

    num_devices: int
    job: JobSpec
    step_s: float
    mfu: float
    peak_bytes: float
    money: Money

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all devices."""
        return self.job.tokens_per_step / self.step_s

    @property
    def tokens_per_s_per_device(self) -> float:
        """Tokens a second of one device."""
        return self.tokens_per_s / self.num_devices

    @property
    def usd_per_billion_tokens(self) -> float | None:
        """US dollars of 1e9 tokens; None if no price is known."""
        return None if self.money.usd is None else float(self.money.usd) / self.job.tokens_per_step * 1e9


@dataclass(frozen=True)
class Scaling:
    """One kind of scaling. `points` are the sizes at which a plan fits, smallest first; `run_tokens` is, for each, the
    range of tokens of a run with its batch; `misfits` are the other sizes."""

    kind: str  # strong or weak
    points: tuple[Point, ...]
    run_tokens: tuple[tuple[float, float], ...]
    misfits: tuple[int, ...]

    def efficiency(self, point: Point) -> float:
        """Throughput of a device, over that at the smallest size."""
        return point.tokens_per_s_per_device / self.points[0].tokens_per_s_per_device

    def memory_efficiency(self, point: Point) -> float:
        """Bytes on all devices at the smallest size, over those at this size."""
        smallest = self.points[0]
        return smallest.num_devices * smallest.peak_bytes / (point.num_devices * point.peak_bytes)

    def rows(self) -> list[dict[str, Any]]:
        """The table for JSON, with a row for each size."""
        table = []
        for point, tokens in zip(self.points, self.run_tokens, strict=True):
            days = [total / point.tokens_per_s / DAY_S for total in tokens]
            usd = point.usd_per_billion_tokens
            table.append(
                {
                    "devices": point.num_devices,
                    "global_batch_size": point.job.batch.global_batch_size,
                    "plan": point.job.plan.model_dump(),
                    "step_s": point.step_s,
                    "tokens_per_s": point.tokens_per_s,
                    "tokens_per_s_per_device": point.tokens_per_s_per_device,
                    "mfu": point.mfu,
                    "efficiency": self.efficiency(point),
                    "peak_bytes": point.peak_bytes,
                    "memory_efficiency": self.memory_efficiency(point),
                    "step": asdict(point.money),
                    "usd_per_billion_tokens": usd,
                    "run_tokens": list(tokens),
                    "run_days": days,
                    "run_usd": None if usd is None else [usd * total / 1e9 for total in tokens],
                }
            )
        return table


def scaling(
    job: JobSpec, sizes: Sequence[int], limits: BatchLimits, choose: Choose, constants: Constants
) -> tuple[Scaling, Scaling]:
    """(strong, weak) scaling over some numbers of devices. Weak scaling keeps the batch for each device of the job on
    its own cluster.

    PlanError if a size is not of whole nodes or no size fits; KeyError names what is unknown.
    """
    sizes = sorted(set(sizes))
    faults = [fault for size in sizes for fault in size_faults(job, size)]
    if faults:
        raise PlanError(say("sizes of the cluster of job {name}", name=job.name), faults)
    best, illegal = _best_of_sizes(job, sizes, choose)
    scalings = []
    for kind in _KINDS:
        points, tokens, misfits = [], [], []
        for size in sizes:
            chosen = best[size, _batch(job, size, kind)]
            if chosen is None:
                misfits.append(size)
                continue
            points.append(_point(chosen, size, constants))
            tokens.append(limits.rebatched_tokens(chosen.tokens_per_step))
        scalings.append(Scaling(kind, tuple(points), tuple(tokens), tuple(misfits)))
    if not any(curve.points for curve in scalings):
        fault = say(
            "no plan fits on {devices}; use more of them, or devices with more memory", devices=devices_text(sizes)
        )
        raise PlanError(say("job {name} at other sizes", name=job.name), list(dict.fromkeys(illegal)) or [fault])
    strong, weak = scalings
    return strong, weak


def _best_of_sizes(
    job: JobSpec, sizes: Sequence[int], choose: Choose
) -> tuple[dict[tuple[int, int], JobSpec | None], list[str]]:
    """The best plan by (devices, global batch) for both kinds of scaling, and why no plan is legal at some of them.
    Forked copies of this process search at a part of the sizes."""
    words: dict[tuple[int, int], str] = {}
    for kind in _KINDS:  # both meet at the job's own size
        for size in sizes if kind == "strong" else reversed(sizes):  # so that each process has small and large sizes
            told = say("{devices:,} devices, {kind} scaling", devices=size, kind=fixed(kind))
            words.setdefault((size, _batch(job, size, kind)), told)
    places, best, illegal = list(words), dict[tuple[int, int], JobSpec | None](), list[str]()

    def chosen_at(place: tuple[int, int]) -> tuple[JobSpec | None, list[str]]:
        try:
            return choose(at_size(job, *place)), []
        except PlanError as error:  # no plan is legal
            return None, error.faults

    with closing(shared(places, chosen_at)) as answers:
        for number, (place, answer) in enumerate(answers):
            tell_part(words[place], number, len(places))
            best[place], faults = answer or chosen_at(place)
            illegal += faults
    return best, illegal


def _batch(job: JobSpec, size: int, kind: str) -> int:
    """The global batch of a job at a size of the cluster."""
    batch = job.batch.global_batch_size
    return batch if kind == "strong" else max(1, round(batch * size / job.cluster.num_devices))


def sizes_of(text: str) -> list[int]:
    """Sizes from "8,16,48" or "64-1024", which is doubled from one end to the other. PlanError lists the faults."""
    sizes, faults = [], []
    for part in text.split(","):
        ends = [whole_number(word.strip(), largest.RANKS) for word in part.split("-")]
        low, high = ends[0], ends[-1]
        if len(ends) > 2 or low is None or high is None or low > high:
            faults.append(
                say(
                    "--devices {part} is neither a number of devices nor a range, such as 8,16,32 or 64-1024; the "
                    "largest cluster has {most:,}",
                    part=repr(shortened(part)),
                    most=largest.RANKS,
                )
            )
            continue
        sizes += [low << n for n in range((high // low).bit_length())]
    if len(set(sizes)) > largest.CLUSTER_SIZES:
        faults.append(
            say(
                "--devices has {count:,} sizes, and plans are searched for each; give at most {most}",
                count=len(set(sizes)),
                most=largest.CLUSTER_SIZES,
            )
        )
    if faults:
        raise PlanError(say("sizes of the cluster"), faults)
    return sorted(set(sizes))


def devices_text(sizes: Sequence[int]) -> str:
    """ "1 device", "8, 16 devices"."""
    if list(sizes) == [1]:
        return counted_phrase(1, "device")
    return say("{sizes} devices", sizes=tuple(f"{size:,}" for size in sizes))


def best_plan(job: JobSpec, constraints: Constraints) -> JobSpec | None:
    """The job under the fastest plan that fits, which is the first plan of the `plan` command; None if no plan fits.
    PlanError if none is legal on its cluster."""
    advice = plans_of(job, constraints, shipped())
    return advice.plans[0].job if advice.plans else None


def size_faults(job: JobSpec, num_devices: int) -> list[str]:
    """Reasons why the job's kind of cluster can't have so many devices."""
    cluster, node_size = job.cluster, job.cluster.devices_per_node
    if cluster.parts:
        return [say("cluster.parts has devices of several kinds, and sizes are of one; name one part as the cluster")]
    if cluster.device == "unknown" or node_size == 0:
        return [
            say(
                "cluster.device or cluster.devices_per_node is not said, so nothing has a price; set both, or a "
                "cluster of the catalog"
            )
        ]
    torus = cluster.topology.torus
    if torus and num_devices % math.prod(torus):
        size, axes = math.prod(torus), " x ".join(map(str, torus))
        return [
            say(
                "{num_devices} devices are not whole copies of cluster.topology.torus {axes} = {size} ({num_devices} "
                "/ {size} = {quotient:.2f}); use a multiple of {size}, or a smaller torus",
                num_devices=num_devices,
                axes=axes,
                size=size,
                quotient=num_devices / size,
            )
        ]
    if num_devices > node_size and num_devices % node_size:
        return [
            say(
                "{num_devices} devices are not whole nodes of {node_size} ({num_devices} / {node_size} = "
                "{quotient:.2f}); use {fewer} or {more}",
                num_devices=num_devices,
                node_size=node_size,
                quotient=num_devices / node_size,
                fewer=num_devices // node_size * node_size,
                more=(num_devices // node_size + 1) * node_size,
            )
        ]
    return []


def at_size(job: JobSpec, num_devices: int, global_batch_size: int) -> JobSpec:
    """The job on a cluster of its kind with `num_devices`; its plan stays that of the old cluster."""
    node_size = min(job.cluster.devices_per_node, num_devices)
    cluster = job.cluster.model_copy(update={"devices_per_node": node_size, "nodes": num_devices // node_size})
    return job.model_copy(update={"cluster": cluster, "batch": job.batch.with_size(global_batch_size)})


def _point(job: JobSpec, num_devices: int, constants: Constants) -> Point:
    time, memory = simulated_step(job, constants), fullest(job, constants)
    money = step_money(job.cluster, time.total, num_devices)
    return Point(num_devices, job, time.total, time.mfu, peak_bytes=memory.process, money=money)
