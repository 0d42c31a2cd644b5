"""The best layout of a job's plan: how many layers each stage holds, and in which order the parts of a cluster stand.

The layout is plan.layout, which the runtime runs; the order is that of cluster.parts, whose nodes come in rank order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product

from shardwright.config.base import PlanError, faults_in
from shardwright.config.cluster import PartSpec
from shardwright.config.job import JobSpec
from shardwright.config.plan import PlanSpec
from shardwright.cost.calibration import Constants
from shardwright.cost.from_job import run_of
from shardwright.planner.stages.partition_dp import NoFitError, best_stages
from shardwright.planner.stages.partition_exchange import best_chunks
from shardwright.planner.stages.piece_prices import seats
from shardwright.planner.stages.pieces import PipelineSlot, Stages, may_be_empty, stages_of
from shardwright.schedule.job_program import job_placement
from shardwright.sharding.stage_placement import StagePlacement, in_line
from shardwright.simulate.closed_form import step_time
from shardwright.simulate.full_step import is_simulated, simulated_step, step_on_parts_s
from shardwright.workload.memo import Memo

_BESIDE = 4  # layouts beside a plan that are tried, those of the fastest pipelines
_ROUNDING = 1e-9
_ALIKE = 1.02  # of the slowest rank: a layout that makes it slower by no more may be the faster one
LEAST_GAIN = 0.01  # share of a step that uneven stages must save where nobody asked for them


@dataclass(frozen=True)
class LaidOut:
    """A job with its best layout. `devices` by pipeline rank; `step_s` of a step, with all that is not the pipeline's.

    `even` is the layout without a thought, layers spread evenly, and `even_step_s` what a step takes then: None where
    that does not fit.
    """

    job: JobSpec
    stages: Stages
    devices: tuple[str, ...]
    step_s: float
    even: Stages | None
    even_step_s: float | None


def best_layout(job: JobSpec, constants: Constants) -> LaidOut:
    """The fastest layout that fits, over all orders of the cluster's parts.

    Layouts are chosen by what the slowest rank takes; where a step simulated in full is faster with layers spread
    evenly, as under an order that is made for equal stages, they stay so. PlanError if none fits, or
    the plan has more stages than the model layers; KeyError says what is not known.
    """
    if job.cluster.device == "unknown" and not job.cluster.parts:
        fault = "cluster.device is unknown, so no layer has a price; set it to a device of the catalog"
        raise PlanError(f"a layout of job {job.name}", [fault])
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
        raise PlanError(f"a layout of job {job.name}", list(faults))
    return best


def paying_layout(job: JobSpec, constants: Constants, least_gain: float, memo: Memo | None = None) -> JobSpec | None:
    """The job with its best layout, if one fits and makes the pipeline faster by the share `least_gain` or more.

    Of a job on devices of one kind. `memo` has what was computed before of the same model and cluster. KeyError says
    what is not known.
    """
    mine, placement = seats(run_of(job), job.plan, constants, memo), job_placement(job)
    even = _even(job, mine, placement)
    if most_gain(even, mine, placement) < least_gain:
        return None
    try:
        stages = _best(job, mine, placement)
    except NoFitError:  # with what is set aside for the largest rank
        return None
    return None if even.pipeline_s < (1 + least_gain) * stages.pipeline_s else _with_layout(job, stages)


def adjacent_layouts(
    job: JobSpec, constants: Constants, memo: Memo | None = None, *, may_be_equal: bool = False
) -> Iterator[JobSpec]:
    """The job with one layer moved from its slowest pipeline rank to another stage, where that makes the slowest rank
    faster, or with `may_be_equal` where another rank is then as slow: a step may take less, whose messages wait
    elsewhere. Those first that make it fastest. Of a job on devices of one kind. `memo` as in `paying_layout`. KeyError
    says what is not known."""
    mine, placement = seats(run_of(job), job.plan, constants, memo), job_placement(job)
    layers = job.plan.stage_layers(job.model.layers)
    now = stages_of(layers, mine, placement, job.num_microbatches)
    slowest = max(range(len(mine)), key=lambda rank: now.rank_s[rank])
    most_s = max(now.rank_s) * (_ALIKE if may_be_equal else 1 - _ROUNDING)
    moved = []
    for giver, taker in product(placement.stages_of(slowest), range(len(layers))):
        is_last_layer = layers[giver] <= int(not may_be_empty(giver, len(layers)))
        if giver == taker or taker in placement.stages_of(slowest) or is_last_layer:
            continue
        changed = [count - (stage == giver) + (stage == taker) for stage, count in enumerate(layers)]
        stages = stages_of(changed, mine, placement, job.num_microbatches)
        if max(stages.rank_s) < most_s:
            moved.append(stages)
    for stages in sorted(moved, key=lambda one: (one.pipeline_s, one.layout))[:_BESIDE]:
        yield _with_layout(job, stages)


def most_gain(even: Stages, mine: Sequence[PipelineSlot], placement: StagePlacement) -> float:
    """An upper bound on the gain of any layout over an even one, as a share of the slowest rank's microbatch.

    No layout makes the slowest rank faster than the mean one, nor than one that holds its part of the layers, rounded
    up.
    """
    copies, layers = placement.num_copies, mine[0].pieces[1:-1]
    fewest = -(-copies * len(layers) // len(mine)) / copies
    least_s = max(sum(even.rank_s) / len(mine), fewest * min(piece.seconds for piece in layers))
    return max(even.rank_s) / least_s - 1


def _even(job: JobSpec, mine: list[PipelineSlot], placement: StagePlacement) -> Stages:
    """The layout without a thought: layers spread evenly."""
    layers = job.plan.model_copy(update={"layout": []}).stage_layers(job.model.layers)
    return stages_of(layers, mine, placement, job.num_microbatches)


def _best(job: JobSpec, mine: list[PipelineSlot], placement: StagePlacement) -> Stages:
    """NoFitError if none fits."""
    m = job.num_microbatches
    return best_stages(mine, m) if placement == in_line(job.plan.pp) else best_chunks(mine, placement, m)


def _with_layout(job: JobSpec, stages: Stages) -> JobSpec:
    return job.model_copy(update={"plan": job.plan.model_copy(update={"layout": list(stages.layout)})})


def _orders(job: JobSpec) -> list[list[PartSpec]]:
    """Orders of the parts that differ; none but [] where devices are of one kind."""
    orders: list[list[PartSpec]] = []
    for order in map(list, permutations(job.cluster.parts)):
        if order not in orders:
            orders.append(order)
    return orders


def _laid_out(job: JobSpec, parts: list[PartSpec], constants: Constants) -> LaidOut:
    job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"parts": parts})})
    plan, placement = job.plan, job_placement(job)
    alone = _alone(job)
    by_part = [seats(run_of(part), plan, constants) for part in alone]
    where = part_of_rank(plan, parts)
    mine = [by_part[part][rank] for rank, part in enumerate(where)]
    stages, even = _best(job, mine, placement), _even(job, mine, placement)
    devices = tuple(alone[part].cluster.device for part in where)
    step_s = _step_s(_with_layout(job, stages), stages, constants)
    if not _fits(even, mine):
        return LaidOut(_with_layout(job, stages), stages, devices, step_s, even=None, even_step_s=None)
    even_step_s = _step_s(_with_layout(job, even), even, constants)
    if even_step_s < step_s:
        stages, step_s = even, even_step_s
    return LaidOut(_with_layout(job, stages), stages, devices, step_s, even=even, even_step_s=even_step_s)


def _alone(job: JobSpec) -> list[JobSpec]:
    """The job on each of the cluster's parts, were it a cluster of its own; on the cluster if it is all of one kind."""
    clusters = [job.cluster.alone(part) for part in job.cluster.parts] or [job.cluster]
    return [job.model_copy(update={"cluster": cluster}) for cluster in clusters]


def part_of_rank(plan: PlanSpec, parts: list[PartSpec]) -> list[int]:
    """The part of the cluster that each pipeline rank is on. Parts hold whole stages (config/checks/check_parts.py)."""
    ranks = [number for number, part in enumerate(parts) for _ in range(part.num_devices // plan.stage_ranks)]
    return ranks or [0] * plan.pp


def _fits(stages: Stages, mine: list[PipelineSlot]) -> bool:
    return all(taken <= seat.memory_bytes for taken, seat in zip(stages.rank_bytes, mine, strict=True))


def _step_s(job: JobSpec, stages: Stages, constants: Constants) -> float:
    """Seconds of a step, simulated in full; of a pipeline on parts of several kinds that never drains, by closed forms:
    the pipeline, and what comes besides on the part where that takes longest."""
    if not job.cluster.parts:
        return float(simulated_step(job, constants).total)
    jobs = _alone(job)
    if is_simulated(job):
        return step_on_parts_s(jobs, part_of_rank(job.plan, job.cluster.parts), constants)
    most = 0.0
    for alone in jobs:
        time = step_time(run_of(alone), constants)
        data = 0.0 if job.plan.zero == 3 else time.data  # in stage 3 it is in what a stage takes
        most = max(most, time.messages + data + time.optimizer + time.host + time.other)
    return stages.pipeline_s + most
