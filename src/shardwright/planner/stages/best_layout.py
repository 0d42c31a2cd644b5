"""The best layout of a job's plan: the number of layers of each stage, and the order of the parts of a cluster.

The layout is plan.layout, which the runtime takes; the order is that of cluster.parts, whose nodes are in rank order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np

from shardwright.config.base import PlanError, faults_in
from shardwright.config.cluster import PartSpec
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.plan import PlanSpec
from shardwright.cost.calibration import Constants
from shardwright.cost.from_job import run_of
from shardwright.layers.memo import Memo
from shardwright.planner.stages.partition_dp import NoFitError, best_stages
from shardwright.planner.stages.partition_exchange import best_chunks
from shardwright.planner.stages.piece_prices import pipeline_slots, timed_pieces
from shardwright.planner.stages.pieces import (
    PipelineSlot,
    Stages,
    may_be_empty,
    pipeline_s,
    rank_seconds,
    stages_of,
)
from shardwright.schedule.job_program import job_placement
from shardwright.sharding.stage_placement import StagePlacement, in_line
from shardwright.simulate.closed_form import step_time
from shardwright.simulate.full_step import is_simulated, simulated_step, step_on_parts_s

_MOST_LAYOUTS = 4  # adjacent layouts that are tried: those with the fastest pipelines
_ROUNDING = 1e-9
_ALIKE = 1.02  # times the slowest rank: a layout with a slowest rank up to so slow may still be faster
LEAST_GAIN = 0.01  # share of a step that uneven stages must save if the user did not ask for them


@dataclass(frozen=True)
class LaidOut:
    """A job with its best layout. `devices` are by pipeline rank; `step_s` are seconds of the whole step.

    `even` is the layout with layers spread evenly, and `even_step_s` its step: both None if it does not fit.
    """

    job: JobSpec
    stages: Stages
    devices: tuple[str, ...]
    step_s: float
    even: Stages | None
    even_step_s: float | None


def best_layout(job: JobSpec, constants: Constants) -> LaidOut:
    """The fastest layout that fits, over all orders of the cluster's parts.

    Layouts are chosen by the time of the slowest rank. If a full simulation shows that the even layout is faster, as
    with an order of work for equal stages, that one is returned. PlanError if no layout fits, or the plan has more
    stages than the model has layers; KeyError names what is unknown.
    """
    if job.cluster.device == "unknown" and not job.cluster.parts:
        fault = say("cluster.device is unknown, so no layer has a price; set it to a device of the catalog")
        raise PlanError(say("a layout of job {name}", name=job.name), [fault])
    best: LaidOut | None = None
    faults: dict[str, None] = {}
    for parts in _orders(job):
        try:
            laid = _laid_out(job, parts, constants)
        except ValueError as error:
            faults |= dict.fromkeys(faults_in(error))
            continue
        if best is None or laid.step_s < best.step_s:
            best = laid
    if best is None:
        raise PlanError(say("a layout of job {name}", name=job.name), list(faults))
    return best


def paying_layout(
    job: JobSpec, constants: Constants, least_gain: float, *, room: float, memo: Memo | None = None
) -> JobSpec | None:
    """The job with its best layout, if one fits in `room` bytes of a device and makes the pipeline faster by the share
    `least_gain` or more.

    The job must be on devices of one kind. `memo` keeps earlier results of the same model and cluster. KeyError names
    what is unknown.
    """
    run, memo, placement = run_of(job), memo or Memo(), job_placement(job)
    timed_slots = [PipelineSlot(timed_pieces(run, constants, memo))] * job.plan.pp  # bytes take long to find
    even = _even(job, timed_slots, placement)
    if most_gain(even, timed_slots, placement) < least_gain:
        return None
    try:
        stages = _best(job, pipeline_slots(run, job.plan, constants, memo, room=room), placement)
    except NoFitError:  # because of the memory reserved for the largest rank
        return None
    return None if even.pipeline_s < (1 + least_gain) * stages.pipeline_s else _with_layout(job, stages.layout)


def adjacent_layouts(
    job: JobSpec, constants: Constants, memo: Memo | None = None, *, may_be_equal: bool = False
) -> Iterator[JobSpec]:
    """Yield the job with one layer moved from its slowest pipeline rank to another stage, if the slowest rank then
    takes less time; with `may_be_equal` also if it takes about as long, since messages may wait less. The fastest come
    first.

    The job must be on devices of one kind. `memo` as in `paying_layout`. KeyError names what is unknown.
    """
    placement, layers = job_placement(job), job.plan.stage_layers(job.model.layers)
    slot = PipelineSlot(timed_pieces(run_of(job), constants, memo or Memo()))
    current = rank_seconds(np.array([layers]), slot, placement)[0]
    most_s = float(current.max()) * (_ALIKE if may_be_equal else 1 - _ROUNDING)
    givers = placement.stages_of(int(current.argmax()))
    moves = [
        (giver, taker)
        for giver, taker in product(givers, range(len(layers)))
        if taker not in givers and layers[giver] > int(not may_be_empty(giver, len(layers)))
    ]
    layouts = np.array(layers) - np.eye(len(layers), dtype=int)[[giver for giver, _ in moves]]
    layouts += np.eye(len(layers), dtype=int)[[taker for _, taker in moves]]
    rank_s = rank_seconds(layouts, slot, placement)
    chosen = np.flatnonzero(rank_s.max(axis=1, initial=0.0) < most_s)  # most takers become too slow
    chunks = len(placement.stages_of(0))
    candidates = sorted(
        (pipeline_s(seconds, job.num_microbatches, chunks), layout)
        for seconds, layout in zip(rank_s[chosen].tolist(), layouts[chosen].tolist(), strict=True)
    )
    for _, layout in candidates[:_MOST_LAYOUTS]:
        yield _with_layout(job, layout)


def most_gain(even: Stages, slots: Sequence[PipelineSlot], placement: StagePlacement) -> float:
    """An upper bound on the gain of any layout over an even one, as a share of the slowest rank's microbatch.

    The slowest rank takes at least the time of the mean rank, and at least that of its part of the layers, rounded up.
    """
    copies, layers = placement.num_copies, slots[0].pieces[1:-1]
    fewest = -(-copies * len(layers) // len(slots)) / copies
    least_s = max(sum(even.rank_s) / len(slots), fewest * min(piece.seconds for piece in layers))
    return max(even.rank_s) / least_s - 1


def _even(job: JobSpec, slots: list[PipelineSlot], placement: StagePlacement) -> Stages:
    """The layout with layers spread evenly."""
    layers = job.plan.model_copy(update={"layout": []}).stage_layers(job.model.layers)
    return stages_of(layers, slots, placement, job.num_microbatches)


def _best(job: JobSpec, slots: list[PipelineSlot], placement: StagePlacement) -> Stages:
    """The best layout. NoFitError if none fits."""
    num_microbatches = job.num_microbatches
    return (
        best_stages(slots, num_microbatches)
        if placement == in_line(job.plan.pp)
        else best_chunks(slots, placement, num_microbatches)
    )


def _with_layout(job: JobSpec, layout: Sequence[int]) -> JobSpec:
    return job.model_copy(update={"plan": job.plan.model_copy(update={"layout": list(layout)})})


def _orders(job: JobSpec) -> list[list[PartSpec]]:
    """The distinct orders of the parts; only [] if devices are of one kind."""
    orders: list[list[PartSpec]] = []
    for order in map(list, permutations(job.cluster.parts)):
        if order not in orders:
            orders.append(order)
    return orders


def _laid_out(job: JobSpec, parts: list[PartSpec], constants: Constants) -> LaidOut:
    job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"parts": parts})})
    plan, placement = job.plan, job_placement(job)
    part_jobs = _alone(job)
    slots_of_part = [pipeline_slots(run_of(part), plan, constants) for part in part_jobs]
    parts_of_ranks = part_of_rank(plan, parts)
    slots = [slots_of_part[part][rank] for rank, part in enumerate(parts_of_ranks)]
    stages, even = _best(job, slots, placement), _even(job, slots, placement)
    devices = tuple(part_jobs[part].cluster.device for part in parts_of_ranks)
    step_s = _step_s(_with_layout(job, stages.layout), stages, constants)
    if not _fits(even, slots):
        return LaidOut(_with_layout(job, stages.layout), stages, devices, step_s, even=None, even_step_s=None)
    even_step_s = _step_s(_with_layout(job, even.layout), even, constants)
    if even_step_s < step_s:
        stages, step_s = even, even_step_s
    return LaidOut(_with_layout(job, stages.layout), stages, devices, step_s, even=even, even_step_s=even_step_s)


def _alone(job: JobSpec) -> list[JobSpec]:
    """The job on each of the cluster's parts as a cluster of its own, or on the cluster if it has no parts."""
    clusters = [job.cluster.alone(part) for part in job.cluster.parts] or [job.cluster]
    return [job.model_copy(update={"cluster": cluster}) for cluster in clusters]


def part_of_rank(plan: PlanSpec, parts: list[PartSpec]) -> list[int]:
    """The part of the cluster of each pipeline rank. Parts hold whole stages (config/checks/check_cluster.py)."""
    ranks = [number for number, part in enumerate(parts) for _ in range(part.num_devices // plan.stage_ranks)]
    return ranks or [0] * plan.pp


def _fits(stages: Stages, slots: list[PipelineSlot]) -> bool:
    return all(num_bytes <= slot.memory_bytes for num_bytes, slot in zip(stages.rank_bytes, slots, strict=True))


def _step_s(job: JobSpec, stages: Stages, constants: Constants) -> float:
    """Seconds of a step, simulated in full. For a pipeline on parts of several kinds that never drains, the sum of
    closed forms: the pipeline, and the rest of the step on the part where it takes longest."""
    if not job.cluster.parts:
        return float(simulated_step(job, constants).total)
    jobs = _alone(job)
    if is_simulated(job):
        return step_on_parts_s(jobs, part_of_rank(job.plan, job.cluster.parts), constants)
    most_s = 0.0
    for part_job in jobs:
        time = step_time(run_of(part_job), constants)
        data_s = 0.0 if job.plan.zero == 3 else time.data  # in ZeRO-3 it is in the time of stages
        most_s = max(most_s, time.messages + data_s + time.optimizer + time.host + time.other)
    return stages.pipeline_s + most_s
