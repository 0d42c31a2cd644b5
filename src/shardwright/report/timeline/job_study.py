"""The timeline of a step of a job: simulated, and executed if the step was run on this machine."""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from shardwright.config import largest
from shardwright.config.base import PlanError, error_text
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say, sentences_of
from shardwright.config.units import seconds_text
from shardwright.cost.calibration import shipped
from shardwright.layers.memo import Memo
from shardwright.report.timeline.page import Section, section_of
from shardwright.report.timeline.schedule_figures import as_full_dict
from shardwright.report.timeline.study import StepBubble, Streams, Study, drawn_steps, number, study
from shardwright.schedule.job_program import job_order, job_program, relative_costs
from shardwright.schedule.pipeline_shape import PipelineShape
from shardwright.schedule.shape_program import size_faults
from shardwright.schedule.timing import Costs, Times
from shardwright.simulate.closed_form import StepTime
from shardwright.simulate.full_step import simulated_bubble, simulated_step
from shardwright.simulate.stage_seconds import TimedActions, timed_actions

UNIT = say("the forward of one microbatch through the mean rank, by FLOPs")


@dataclass(frozen=True)
class DrawnCosts:
    """Costs and bubble in `unit`, which `note` explains. `step` is the whole step in seconds, and `actions` are its
    actions in seconds; None if unknown."""

    costs: Costs
    unit: str
    note: str
    bubble: float
    step: StepTime | None = None
    actions: TimedActions | None = None

    @property
    def is_seconds(self) -> bool:
        """True if times are predicted seconds."""
        return self.unit == "s"

    @property
    def step_s(self) -> float | None:
        """Seconds of the whole step; None if unknown."""
        return None if self.step is None else float(self.step.total)


def drawn_costs(job: JobSpec, latency: float) -> DrawnCosts:
    """The costs of a job. `latency` of a message is in units of a forward; if it is not 0, so are all costs."""
    return costs_of_step(job, _step(job), latency)


def costs_of_step(job: JobSpec, step: StepTime | str, latency: float = 0.0, memo: Memo | None = None) -> DrawnCosts:
    """The costs of a job whose step takes a known time; or, for a reason, an unknown one. `memo` has earlier results
    for the same model and cluster."""
    if isinstance(step, str):
        return _relative(job, latency, say("Seconds are not said: {reason}.", reason=step))
    sentence = say(
        "A step takes {seconds}, as `estimate` says it: its actions, and after them the update, what replicas exchange "
        "at its ends, and jitter.",
        seconds=seconds_text(float(step.total)),
    )
    if latency:
        return replace(_relative(job, latency, sentence), step=step)
    actions, bubble = timed_actions(job, shipped(), memo), float(step.bubble)
    note = say(
        "Times are seconds, as they are predicted of stages, messages and collectives on {device} under {software}. "
        "{sentence}",
        device=job.cluster.device,
        software=job.cluster.software,
        sentence=sentence,
    )
    return DrawnCosts(actions.costs, "s", note, bubble, step=step, actions=actions)


def _relative(job: JobSpec, latency: float, sentence: str) -> DrawnCosts:
    """Costs in units of a forward."""
    wire = say("messages take no time")
    if latency:
        wire = say("a message takes {latency}", latency=number(latency))
    note = say(
        "Times are relative: 1 is {unit}; input and weight gradients take as long as the forward, and {wire}. "
        "{sentence}",
        unit=UNIT,
        wire=wire,
        sentence=sentence,
    )
    relative = relative_costs(job, latency)
    return DrawnCosts(relative, UNIT, note, simulated_bubble(job, relative))


def _step(job: JobSpec) -> StepTime | str:
    """The time of the whole step; or the reason why it is unknown."""
    if job.cluster.device == "unknown":
        return say("they need cluster.device, and a calibration of it")
    try:
        return simulated_step(job, shipped())
    except (KeyError, ValueError) as error:
        return error_text(error)


@dataclass(frozen=True)
class JobStudy:
    """A job's simulated timeline, with a note, and `facts` that `values` has beside what it says of the timeline.
    `executed` is the timeline of the executed step, if there is one, and `verdict` is the error of the simulation."""

    job: JobSpec
    simulated: Study
    note: str
    facts: dict[str, Any]
    executed: Study | None = None
    verdict: str = ""

    @cached_property
    def values(self) -> dict[str, Any]:
        """The study for `--json`."""
        simulated = as_full_dict(self.simulated)
        of_timeline = simulated if self.executed is None else {"idle": simulated["idle"]}
        return {"job": self.job.name} | of_timeline | self.facts

    @property
    def is_seconds(self) -> bool:
        """True if times are seconds; else they are told in forwards of a stage."""
        return bool(self.simulated.unit)

    @property
    def drawn(self) -> Study:
        """The timeline of pictures and traces: the step that was run, if one was."""
        return self.executed or self.simulated

    @property
    def title(self) -> str:
        """The title of the study."""
        if self.executed is not None:
            return say("{job}: simulated and executed", job=self.job.name)
        return say("{job}, {study}", job=self.job.name, study=self.simulated.heading)

    def sections(self) -> list[Section]:
        """The timelines of a page."""
        if self.executed is None:
            return [section_of(self.simulated)]
        executed_section = section_of(self.executed, say("The last of the steps that were run."))
        return [section_of(self.simulated, self.verdict), replace(executed_section, figures=())]


def study_job(job: JobSpec, latency: float, num_steps: int) -> JobStudy:
    """Simulate steps of a job. Raises PlanError with every fault."""
    faults = cost_faults("--communication", latency)
    faults += [] if num_steps >= 1 else [say("--steps is {steps}; use 1 or more", steps=num_steps)]
    shape = PipelineShape(job.plan.pp, job.num_microbatches, job.plan.virtual_stages)
    if faults := faults or size_faults(job.plan.schedule, shape, drawn_steps(job.plan.schedule, num_steps)):
        raise PlanError(say("job {name}", name=job.name), faults)
    plan, drawing = job.plan, drawn_costs(job, latency)
    note = drawing.note
    if plan.stage_ranks > 1:
        devices = f"tp {plan.tp}" if plan.cp == 1 else f"cp {plan.cp} x tp {plan.tp}"
        drawn = say(
            "One pipeline of dp {dp} is drawn, and a rank of it is {devices} devices.", dp=plan.dp, devices=devices
        )
        note = sentences_of([drawn, note])
    streams = Streams(partial(job_program, job), lambda steps: job_order(job, steps).without_messages())
    result = study(plan.schedule, job_program(job), drawing.costs, num_steps, streams)
    step_length = drawing.step_s if drawing.is_seconds and drawing.step_s else result.bubbles.makespan
    unit = "s" if drawing.is_seconds else ""
    result = replace(result, bubble=_step_bubble(drawing.bubble, step_length), unit=unit)
    facts = {"unit": drawing.unit, "step_s": drawing.step_s}
    return JobStudy(job, result, note, facts)


def study_executed(job: JobSpec, costs: Costs, times: Times, executed_s: float) -> JobStudy:
    """A step, simulated from measured costs and executed.

    `times` are those of a step that was run on this machine, and `executed_s` is the median of several steps.
    """
    simulated = study(job.plan.schedule, job_program(job), costs, 1)
    simulated_s = simulated.timeline.makespan
    simulated = replace(simulated, bubble=_step_bubble(simulated_bubble(job, costs), simulated_s), unit="s")
    error = simulated_s / executed_s - 1.0
    note = say("Times are seconds. Costs of the stages, a message and the update were measured on this machine.")
    return JobStudy(
        job,
        simulated,
        note,
        facts={"simulated_s": simulated_s, "executed_s": executed_s, "error": error},
        executed=replace(simulated, name=say("{name}, as it ran", name=simulated.name), times=times),
        verdict=say(
            "simulated {simulated:.4f} s, executed {executed:.4f} s (median), error {error:+.1%}",
            simulated=simulated_s,
            executed=executed_s,
            error=error,
        ),
    )


def _step_bubble(bubble: float, step: float) -> StepBubble:
    return StepBubble(bubble, bubble / step if step else 0.0)


def cost_faults(option: str, cost: float) -> list[str]:
    """The fault of an option whose value can't be the cost of an action; empty if it can."""
    if cost == 0 or largest.LEAST_COST <= cost <= largest.COST:
        return []
    return [
        say(
            "{option} is {cost:g}, and it must be 0, or from {least:g} to {most:g}; use 1, say",
            option=option,
            cost=cost,
            least=largest.LEAST_COST,
            most=largest.COST,
        )
    ]
