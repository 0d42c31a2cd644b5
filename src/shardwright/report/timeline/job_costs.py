"""What the actions of a job cost in its drawing: seconds where its device has a calibration, else forwards."""

from dataclasses import dataclass

from shardwright.config.job import JobSpec
from shardwright.config.units import seconds_text
from shardwright.report.timeline.study import number
from shardwright.schedule.job_program import relative_costs
from shardwright.schedule.timing import Costs

UNIT = "the forward of one microbatch through the mean rank, by FLOPs"


@dataclass(frozen=True)
class DrawnCosts:
    """Costs in `unit`, which `note` explains; and seconds of the whole step, None where nobody knows them."""

    costs: Costs
    unit: str
    note: str
    step_s: float | None

    @property
    def is_seconds(self) -> bool:
        """Whether times are predicted seconds."""
        return self.unit == "s"


def drawn_costs(job: JobSpec, latency: float) -> DrawnCosts:
    """The costs of a job; `latency` of a message is in units of a forward, so with one the drawing is too."""
    timed = _timed(job)
    if isinstance(timed, str):
        said, step_s = f"Seconds are not said: {timed}.", None
    else:
        costs, step_s = timed
        said = (
            f"A step takes {seconds_text(step_s)}, as `estimate` says it: with the update, what replicas exchange at "
            "its ends, and jitter, which are not drawn."
        )
        if not latency:
            what = f"Times are seconds, as they are predicted of stages, messages and collectives on {_device(job)}."
            return DrawnCosts(costs, "s", f"{what} {said}", step_s)
    wire = f"a message takes {number(latency)}" if latency else "messages take no time"
    note = (
        f"Times are relative: 1 is {UNIT}; input and weight gradients take as long as the forward, and {wire}. {said}"
    )
    return DrawnCosts(relative_costs(job, latency), UNIT, note, step_s)


def _device(job: JobSpec) -> str:
    return f"{job.cluster.device} under {job.cluster.software}"


def _timed(job: JobSpec) -> "tuple[Costs, float] | str":
    """What actions take, and the whole step, in seconds; or why that is not known."""
    if job.cluster.device == "unknown":
        return "they need cluster.device, and a calibration of it"
    from shardwright.cost.calibration import shipped
    from shardwright.simulate.full_step import action_costs, played_step

    try:
        return action_costs(job, shipped()), float(played_step(job, shipped()).total)
    except (KeyError, ValueError) as error:
        return str(error.args[0])
