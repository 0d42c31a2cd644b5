"""Seconds of the actions of a simulated step: of each stage, of messages between stages, and of the collectives that
run beside the computation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwright.config.job import JobSpec
from shardwright.config.recompute_facts import RECOMPUTES
from shardwright.config.software import SoftwareSpec
from shardwright.cost.calibration import Constants, Rates, rates_of, software_under
from shardwright.cost.collective_time import message_latency_s, message_s
from shardwright.cost.data_parallel import DataParallel
from shardwright.cost.from_job import run_of
from shardwright.cost.group_links import Groups
from shardwright.cost.piece_time import PieceTime, beside
from shardwright.layers.memo import Memo
from shardwright.layers.query import Run
from shardwright.layers.stage_contents import LayerKind, PipelineRanks, PipelineStages, held_by_rank, layer_kinds
from shardwright.schedule.job_program import job_placement
from shardwright.schedule.timing import Costs
from shardwright.sharding.stage_placement import StagePlacement
from shardwright.simulate.closed_form import border_bytes, piece_times


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one microbatch in each stage, with those of them that are exposed communication, of messages between
    stages, and of each stage's collectives.

    `reduce` and `gather` are empty if they run after the step, and not in parallel with it; `updated_s` is the time
    that the gather of the updated parameters then adds.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    exposed_forward: tuple[float, ...]
    exposed_backward: tuple[float, ...]
    transfer_s: float
    latency_s: float
    reduce: tuple[float, ...]
    gather: tuple[float, ...]
    updated_s: float
    leak: float

    @classmethod
    def of(cls, job: JobSpec, constants: Constants, memo: Memo) -> "StageSeconds":
        """The seconds of one plan."""
        return cls.of_layouts([job], constants, memo)[0]

    @classmethod
    def of_layouts(cls, jobs: Sequence[JobSpec], constants: Constants, memo: Memo) -> "list[StageSeconds]":
        """The seconds of plans that differ only in their layouts, which are columns of arrays here."""
        job, run = jobs[0], run_of(jobs[0])
        stages, pieces = _contents(jobs), _pieces(run, constants, memo)
        seconds = pieces["embedding", "none"].times(stages.embedding) + pieces["head", "none"].times(stages.head)
        if run.shape.mtp:
            seconds += pieces["mtp", "none"].times(stages.head * run.shape.mtp)
        for kind, count in zip(stages.kinds, stages.layers, strict=True):
            seconds += pieces[kind].times(count)
        pace = seconds
        if RECOMPUTES[job.plan.recompute].by_stage:  # the recomputation is an action of its own
            seconds = replace(seconds, again=0.0 * seconds.again)
        forward = seconds.forward + seconds.exposed_forward
        run = replace(run, grid=run.grid.as_arrays())
        software, rates, groups = software_under(run), rates_of(run, constants), Groups(run)
        size = border_bytes(run, software)
        latency_s = float(np.max(message_latency_s(rates, groups.pp)))
        ends = DataParallel.of(run, software, rates, groups, stages, pace)
        reduce_s, last_s, gather_s = ends.exchanged_s()
        if job.plan.pp == 1 and job.plan.zero < 3:  # closed forms give its step, and hide part of this
            reduce_s = ends.exposed_reduce_s(reduce_s, last_s)
        are_beside, placement = software.reduce_overlap or job.plan.zero >= 2, job_placement(job)
        columns = {  # by field, for each plan
            name: [tuple(column) for column in np.broadcast_to(values, stages.head.shape).T.tolist()]
            for name, values in {
                "forward": forward,
                "input_grad": seconds.total - forward - seconds.weight_grad,
                "weight_grad": seconds.weight_grad,
                "exposed_forward": seconds.exposed_forward,
                "exposed_backward": seconds.exposed - seconds.exposed_forward,
                "reduce": reduce_s,
                "gather": gather_s,
                "update": ends.updates_s(),
            }.items()
        }
        transfer_s = float(np.ravel(message_s(rates, groups.pp, size))[0]) - latency_s
        return [
            cls(
                forward=columns["forward"][n],
                input_grad=columns["input_grad"][n],
                weight_grad=columns["weight_grad"][n],
                exposed_forward=columns["exposed_forward"][n],
                exposed_backward=columns["exposed_backward"][n],
                transfer_s=transfer_s,
                latency_s=latency_s,
                reduce=columns["reduce"][n] if are_beside else (),
                gather=columns["gather"][n] if job.plan.zero == 3 else (),
                updated_s=_updated_s(software, rates, placement, columns["gather"][n], update=columns["update"][n])
                * (job.plan.zero < 3),
                leak=rates.leak,
            )
            for n in range(len(jobs))
        ]

    @classmethod
    def on_parts(cls, parts: "Sequence[StageSeconds]", job: JobSpec, part_of_rank: Sequence[int]) -> "StageSeconds":
        """The seconds of a plan whose pipeline ranks lie on different parts of a cluster, from the `parts`' seconds."""
        placement = job_placement(job)
        holders = [[parts[part_of_rank[rank]] for rank in placement.replicas(n)] for n in range(placement.num_stages)]

        def by_stage(name: str) -> tuple[float, ...]:
            if not all(getattr(stages, name) for stages in parts):
                return ()
            return tuple(max(getattr(stages, name)[n] for stages in row) for n, row in enumerate(holders))

        return cls(
            forward=by_stage("forward"),
            input_grad=by_stage("input_grad"),
            weight_grad=by_stage("weight_grad"),
            exposed_forward=by_stage("exposed_forward"),
            exposed_backward=by_stage("exposed_backward"),
            transfer_s=max(stages.transfer_s for stages in parts),
            latency_s=max(stages.latency_s for stages in parts),
            reduce=by_stage("reduce"),
            gather=by_stage("gather"),
            updated_s=max(stages.updated_s for stages in parts),
            leak=max(stages.leak for stages in parts),
        )

    def least_s(self, placement: StagePlacement, num_microbatches: int, splits_weights: bool) -> tuple[float, float]:
        """(Computation of the rank that computes longest, a lower bound on a step with messages), in seconds, in any
        order of work.

        A rank computes one action at a time. It begins when a microbatch has passed all stages before the first of its
        own, and every message on its way. If backwards are whole, its last action is one, and the gradient has still
        to pass the stages before it. So a step takes at least the work of any rank, and the least of these two ways.
        """
        forward, backward = np.array(self.forward), np.add(self.input_grad, self.weight_grad)
        busy_s = np.zeros(placement.num_ranks)
        before_s, after_s = np.full_like(busy_s, np.inf), np.full_like(busy_s, 0.0 if splits_weights else np.inf)
        for holders in map(np.array, placement.holders):
            message_s = (self.transfer_s + self.latency_s) * (np.diff(holders) != 0)
            np.add.at(busy_s, holders, num_microbatches // placement.num_copies * (forward + backward))
            for least, passed_s in ((before_s, forward), (after_s, backward)):
                np.minimum.at(least, holders, np.append(0.0, np.cumsum(passed_s[:-1] + message_s)))
        return float(busy_s.max()), float((before_s + busy_s + after_s).max())

    def costs(self, has_messages: bool, has_collectives: bool) -> Costs:
        """The costs of actions, with or without messages and collectives."""
        num_borders = len(self.forward) - 1
        return Costs(
            self.forward,
            self.input_grad,
            self.weight_grad,
            transfer=(self.transfer_s,) * num_borders if has_messages else (),
            latency=self.latency_s if has_messages else 0.0,
            reduce=self.reduce if has_collectives else (),
            gather=self.gather if has_collectives else (),
        )


def _contents(jobs: Sequence[JobSpec]) -> PipelineRanks:
    """The contents of all stages of plans that differ only in their layouts, (stages, plans)."""
    grids, shape, num_stages = [run_of(job).grid for job in jobs], run_of(jobs[0]).shape, jobs[0].plan.num_stages
    kinds = layer_kinds(shape, grids[0].as_arrays())
    pipelines = [PipelineStages("1f1b", num_stages, 1, grid.layout, mtp=shape.mtp) for grid in grids]
    return PipelineRanks.of(kinds, [held_by_rank(kinds, pipeline) for pipeline in pipelines], np.arange(len(jobs)))


def _pieces(run: Run, constants: Constants, memo: Memo) -> dict[LayerKind, PieceTime]:
    """The seconds of pieces without a stage's gathers and reductions, which are simulated. The seconds that these
    expose do shorten the piece's waits for the host, as in closed forms."""
    pieces = piece_times(replace(run, grid=run.grid.having({"zero": 0})), constants, memo)
    if run.grid.zero < 3:
        return pieces
    gathered = piece_times(run, constants, memo)
    return {
        kind: replace(piece, forward=gathered[kind].forward, input_grad=gathered[kind].input_grad)
        for kind, piece in pieces.items()
    }


def _updated_s(
    software: SoftwareSpec, rates: Rates, placement: StagePlacement, gather: Sequence[float], *, update: Sequence[float]
) -> float:
    """The time that the gather of the updated parameters adds to a step, on the rank that takes longest; `gather` and
    `update` are seconds by stage."""
    ranks = [placement.stages_of(rank) for rank in range(placement.num_ranks)]
    gathers_s = [sum(gather[stage] for stage in stages) for stages in ranks]
    if software.update_overlap and not software.gather_overlap:
        updates_s = [sum(update[stage] for stage in stages) for stages in ranks]
        return float(np.max(beside(rates, np.array(gathers_s), np.array(updates_s))))
    return max(gathers_s) * (rates.leak if software.gather_overlap else 1.0)


@dataclass(frozen=True)
class TimedActions:
    """The costs of the simulated actions in seconds: of stages, messages, and collectives in parallel with them. Of a
    forward and of a backward by stage, `exposed_forward` and `exposed_backward` seconds are communication that nothing
    hides."""

    costs: Costs
    exposed_forward: tuple[float, ...]
    exposed_backward: tuple[float, ...]


def timed_actions(job: JobSpec, constants: Constants, memo: Memo | None = None) -> TimedActions:
    """The costs of a job's actions. KeyError names an unknown input, ValueError a contradiction. `memo` has earlier
    results for the same model, cluster and constants."""
    stages = StageSeconds.of(job, constants, memo or Memo())
    costs = stages.costs(has_messages=True, has_collectives=True)
    return TimedActions(costs, stages.exposed_forward, stages.exposed_backward)
