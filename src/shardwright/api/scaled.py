"""The result of `scale`: the best plan of a job at each size of its cluster."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardwright.api.shown import Shown
from shardwright.config.base import PlanError, error_text
from shardwright.config.job import JobSpec
from shardwright.config.phrase import ENGLISH
from shardwright.cost.calibration import shipped
from shardwright.planner.critical_batch import BatchLimits, batch_limits
from shardwright.planner.scaling import Scaling, best_plan, scaling
from shardwright.planner.search.constraints import Constraints
from shardwright.report.scaling_report import scaling_dict, scaling_picture, scaling_text


@dataclass(frozen=True, repr=False)
class Scaled(Shown):
    """Strong and weak scaling of a job, and the limits of its batch; in a notebook, a picture of them."""

    job: JobSpec
    scalings: tuple[Scaling, Scaling]
    limits: BatchLimits

    @property
    def text(self) -> str:
        return self.in_language(ENGLISH)

    def in_language(self, language: str) -> str:
        return scaling_text(self.job, self.scalings, self.limits, language)

    def to_dict(self) -> dict[str, Any]:
        return scaling_dict(self.job, self.scalings, self.limits)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each kind of scaling and each size at which a plan fits."""
        return [{"kind": curve.kind, **row} for curve in self.scalings for row in curve.rows()]

    def svg(self, language: str = ENGLISH) -> str:
        """Speed-up, efficiency, memory and price by size, as a picture with words of a language."""
        return scaling_picture(self.job, self.scalings, language)

    def _repr_html_(self) -> str:
        return self.svg()


def scaled(subject: str, job: JobSpec, sizes: Sequence[int], constraints: Constraints, *, tokens: int) -> Scaled:
    """Search for the best plan of a job at each size, for a run of `tokens`; 0 is the run's own. Raises PlanError."""
    limits = batch_limits(job, tokens)
    try:
        scalings = scaling(job, sizes, limits, partial(best_plan, constraints=constraints), constants=shipped())
    except KeyError as error:
        raise PlanError(subject, [error_text(error)]) from None
    return Scaled(job, scalings, limits)
