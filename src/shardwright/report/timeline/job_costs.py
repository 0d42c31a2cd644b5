"""The costs of a job's actions in its drawing: seconds if its device has a calibration, else multiples of a forward."""

from dataclasses import dataclass

from shardwright.config.job import JobSpec
from shardwright.config.units import seconds_text
from shardwright.cost.calibration import shipped
from shardwright.report.timeline.study import number
from shardwright.schedule.job_program import relative_costs
from shardwright.schedule.timing import Costs
from shardwright.simulate.closed_form import StepTime
from shardwright.simulate.full_step import action_costs, simulated_bubble, simulated_step

UNIT = "the forward of one microbatch through the mean rank, by FLOPs"


@dataclass(frozen=True)
class DrawnCosts:
    """Costs and bubble in `unit`, which `note` explains. `step_s` is the whole step in seconds; None if unknown."""

    costs: Costs
    unit: str
    note: str
    step_s: float | None
    bubble: float

    @property
    def is_seconds(self) -> bool:
        """True if times are predicted seconds."""
        return self.unit == "s"


def drawn_costs(job: JobSpec, latency: float) -> DrawnCosts:
    """The costs of a job. `latency` of a message is in units of a forward; if it is not 0, so are all costs."""
    timing = _timed(job)
    if isinstance(timing, str):
        sentence, step_s = f"Seconds are not said: {timing}.", None
    else:
        costs, step = timing
        step_s = float(step.total)
        sentence = (
            f"A step takes {seconds_text(step_s)}, as `estimate` says it: with the update, what replicas exchange at "
            "its ends, and jitter, which are not drawn."
        )
        if not latency:
            unit_note = (
                f"Times are seconds, as they are predicted of stages, messages and collectives on {_device(job)}."
            )
            return DrawnCosts(costs, "s", f"{unit_note} {sentence}", step_s, bubble=float(step.bubble))
    wire = f"a message takes {number(latency)}" if latency else "messages take no time"
    note = (
        f"Times are relative: 1 is {UNIT}; input and weight gradients take as long as the forward, and {wire}. "
        f"{sentence}"
    )
    relative = relative_costs(job, latency)
    return DrawnCosts(relative, UNIT, note, step_s, bubble=simulated_bubble(job, relative))


def _device(job: JobSpec) -> str:
    return f"{job.cluster.device} under {job.cluster.software}"


def _timed(job: JobSpec) -> tuple[Costs, StepTime] | str:
    """The seconds of actions and of the whole step; or the reason why they are unknown."""
    if job.cluster.device == "unknown":
        return "they need cluster.device, and a calibration of it"
    try:
        return action_costs(job, shipped()), simulated_step(job, shipped())
    except (KeyError, ValueError) as error:
        return str(error.args[0])
