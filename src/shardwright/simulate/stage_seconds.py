"""Seconds of the actions of a simulated step: of each stage, of messages between stages, and of the collectives that
run beside the computation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwright.config.job import JobSpec
from shardwright.config.recompute_facts import RECOMPUTES
from shardwright.config.software import SoftwareSpec
from shardwright.cost.calibration import Constants, rates_of, software_under
from shardwright.cost.collective_time import message_latency_s, message_s
from shardwright.cost.data_parallel import DataParallel
from shardwright.cost.from_job import run_of
from shardwright.cost.group_links import Groups
from shardwright.cost.piece_time import beside
from shardwright.layers.memo import Memo
from shardwright.layers.stage_contents import PipelineRanks, PipelineStages, held_by_rank, layer_kinds
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
        run, num_stages = run_of(job), job.plan.num_stages
        grid = run.grid.as_arrays()
        kinds = layer_kinds(run.shape, grid)
        contents = held_by_rank(kinds, PipelineStages("1f1b", num_stages, 1, grid.layout, mtp=run.shape.mtp))
        stages = PipelineRanks.of(kinds, [contents], np.zeros(1, np.int64))
        # A stage's gathers and reductions are simulated, and so not part of its seconds. What they expose does shorten
        # its waits for the host, as in closed forms.
        pieces = piece_times(replace(run, grid=run.grid.having({"zero": 0})), constants, memo)
        if job.plan.zero == 3:
            gathered = piece_times(run, constants, memo)
            pieces = {
                kind: replace(piece, forward=gathered[kind].forward, input_grad=gathered[kind].input_grad)
                for kind, piece in pieces.items()
            }
        seconds = pieces["embedding", "none"].times(stages.embedding) + pieces["head", "none"].times(stages.head)
        if run.shape.mtp:
            seconds += pieces["mtp", "none"].times(stages.head * run.shape.mtp)
        for kind, count in zip(stages.kinds, stages.layers, strict=True):
            seconds += pieces[kind].times(count)
        pace = seconds
        if RECOMPUTES[job.plan.recompute].by_stage:  # the recomputation is an action of its own
            seconds = replace(seconds, again=0.0 * seconds.again)
        forward = seconds.forward + seconds.exposed_forward
        run = replace(run, grid=grid)
        software, rates, groups = software_under(run), rates_of(run, constants), Groups(run)
        size = border_bytes(run, software)
        pipeline = groups.pp
        latency_s = float(np.max(message_latency_s(rates, pipeline)))
        ends = DataParallel.of(run, software, rates, groups, stages, pace)
        reduce_s, last_s, gather_s = ends.exchanged_s()
        if job.plan.pp == 1 and job.plan.zero < 3:  # closed forms give its step, and hide part of this
            reduce_s = ends.exposed_reduce_s(reduce_s, last_s)
        placement = job_placement(job)
        are_beside = software.reduce_overlap or job.plan.zero >= 2
        return cls(
            forward=_by_stage(forward),
            input_grad=_by_stage(seconds.total - forward - seconds.weight_grad),
            weight_grad=_by_stage(seconds.weight_grad),
            exposed_forward=_by_stage(seconds.exposed_forward + 0.0 * forward),
            exposed_backward=_by_stage(seconds.exposed - seconds.exposed_forward + 0.0 * forward),
            transfer_s=float(np.ravel(message_s(rates, pipeline, size))[0]) - latency_s,
            latency_s=latency_s,
            reduce=_by_stage(reduce_s) if are_beside else (),
            gather=_by_stage(gather_s) if job.plan.zero == 3 else (),
            updated_s=_updated_s(software, ends, gather_s, placement) * (job.plan.zero < 3),
            leak=rates.leak,
        )

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


def _updated_s(software: SoftwareSpec, ends: DataParallel, gather_s: np.ndarray, placement: StagePlacement) -> float:
    """The time that the gather of the updated parameters adds to a step, on the rank that takes longest."""
    gather, update = _by_stage(gather_s), _by_stage(ends.updates_s())
    ranks = [placement.stages_of(rank) for rank in range(placement.num_ranks)]
    gathers_s = [sum(gather[stage] for stage in stages) for stages in ranks]
    if software.update_overlap and not software.gather_overlap:
        updates_s = [sum(update[stage] for stage in stages) for stages in ranks]
        return float(np.max(beside(ends.rates, np.array(gathers_s), np.array(updates_s))))
    return max(gathers_s) * (ends.rates.leak if software.gather_overlap else 1.0)


def _by_stage(seconds: np.ndarray) -> tuple[float, ...]:
    return tuple(seconds[:, 0].tolist())


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
