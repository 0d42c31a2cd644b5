"""A step of a job as a page draws it: its actions over time, what follows them, and the communication within them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.layers.memo import Memo
from shardwright.report.timeline.job_study import DrawnCosts, costs_of_step
from shardwright.report.timeline.page import Section
from shardwright.report.timeline.study import drawn_steps, shape_text
from shardwright.schedule.job_program import job_order
from shardwright.schedule.pipeline_shape import PipelineShape
from shardwright.schedule.schedule import Program
from shardwright.schedule.shape_program import size_faults
from shardwright.schedule.timing import Times, play
from shardwright.sharding.mesh import MeshShape
from shardwright.simulate.closed_form import StepTime
from shardwright.simulate.stage_seconds import TimedActions
from shardwright.simulate.timeline import make_timeline


@dataclass(frozen=True)
class StepDrawing:
    """The times of a step of a job's program, and the costs that they follow from; or the times that a run has
    `measured`, in seconds."""

    job: JobSpec
    program: Program
    drawn: DrawnCosts
    measured: Times | None = None

    @cached_property
    def times(self) -> Times:
        """The times of all actions. They are computed when they are first asked for: a program that is too long to be
        drawn needs none."""
        return play(self.program, self.drawn.costs) if self.measured is None else self.measured

    @property
    def shape(self) -> str:
        """Numbers of ranks, microbatches and stages, as text."""
        return shape_text(self.program, self.times.num_steps(self.program))

    @property
    def bubble_share(self) -> float:
        """The predicted bubble as a share of the step, or of its actions where only their times are known."""
        length = (self.drawn.is_seconds and self.drawn.step_s) or self.times.makespan
        return self.drawn.bubble / length if length else 0.0

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the axes on which ranks do the same at the same time."""
        return {axis: size for axis, size in MeshShape.of(self.job.plan).sizes.items() if axis != "pp"}

    @cached_property
    def section(self) -> Section:
        """The timeline with what follows it, as a page draws it."""
        drawn, timeline = self.drawn, make_timeline(self.program, self.times)
        tail = _tail(drawn.step, drawn.actions, timeline.makespan) if drawn.step and drawn.actions else {}
        exposed = _exposed_shares(drawn.actions) if drawn.actions else {}
        unit = "s" if drawn.is_seconds else ""
        return Section(self.job.name, self.shape, timeline, unit=unit, tail=list(tail.items()), exposed=exposed)

    def performed(self, times: Times) -> "StepDrawing":
        """The drawing with the times, in seconds, that a run has measured of its actions."""
        return replace(self, measured=times, drawn=replace(self.drawn, unit="s", step=None, actions=None))


def step_drawing(job: JobSpec, step: StepTime | str, memo: Memo | None = None) -> StepDrawing:
    """A step of a job, whose time is `step`, or why it has none. `memo` has earlier results for the same model and
    cluster. Raises PlanError with every fault."""
    shape = PipelineShape(job.plan.pp, job.num_microbatches, job.plan.virtual_stages)
    if faults := size_faults(job.plan.schedule, shape, drawn_steps(job.plan.schedule, 1)):
        raise PlanError(say("job {name}", name=job.name), faults)
    drawn, program = costs_of_step(job, step, memo=memo), job_order(job).program()
    return StepDrawing(job, program, drawn)


def _tail(step: StepTime, actions: TimedActions, makespan: float) -> Mapping[str, float]:
    """Seconds of what follows the actions of a step, by part."""
    rest = float(step.total) - makespan
    if rest <= 0:
        return {}
    is_beside = bool(actions.costs.reduce or actions.costs.gather)
    parts = {
        "data": 0.0 if is_beside else float(step.data),
        "optimizer": float(step.optimizer),
        "host": float(step.host),
    }
    shrink = min(1.0, rest / (sum(parts.values()) or rest))
    tail = {part: shrink * seconds for part, seconds in parts.items() if seconds}
    other = rest - sum(tail.values())
    return tail | ({"other": other} if other > 1e-9 * float(step.total) else {})


def _exposed_shares(actions: TimedActions) -> dict[str, list[float]]:
    """Shares of computations that are communication which nothing hides, by letter and stage."""
    costs = actions.costs
    backward = [i + w for i, w in zip(costs.input_grad, costs.weight_grad, strict=True)]
    shares = {
        "F": (actions.exposed_forward, costs.forward),
        "C": (actions.exposed_forward, costs.forward),
        "B": (actions.exposed_backward, backward),
        "I": (actions.exposed_backward, costs.input_grad),
    }
    return {
        letter: [round(min(1.0, part / whole), 4) if whole else 0.0 for part, whole in zip(*pair, strict=True)]
        for letter, pair in shares.items()
        if any(pair[0])
    }
