"""The result of `estimate`: memory by rank, and for a known device time, money and the verdict on its fit."""

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardwright.api.shown import Shown
from shardwright.config import largest
from shardwright.config.base import PlanError, error_text
from shardwright.config.job import JobSpec
from shardwright.config.phrase import ENGLISH, say
from shardwright.report.document import Part, document_text
from shardwright.report.estimate_text import estimate_dict, estimate_parts
from shardwright.report.nearest_text import NearestPlans

if TYPE_CHECKING:  # prices need numpy, which the memory account does not
    from shardwright.interchange.job_files import JobFiles
    from shardwright.report.estimate_text import SoftwareRow


@dataclass(frozen=True, repr=False)
class Estimated(Shown):
    """A job's prediction. `beside` has predictions with all other software of the catalog, if they were asked for, and
    `origin` are the files of another system that it was read from, if it was."""

    job: JobSpec
    beside: "tuple[SoftwareRow, ...]" = ()
    origin: "JobFiles | None" = None

    @cached_property
    def _nearest(self) -> NearestPlans:
        return NearestPlans(self.job, self.origin)

    @cached_property
    def _values(self) -> dict[str, Any]:
        return estimate_dict(self.job, self._nearest)

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return int(self._values["parameters"])

    @property
    def fits(self) -> bool | None:
        """True if every rank fits its device; None if the device is unknown."""
        fits: bool | None = self._values["fits"]
        return fits

    @property
    def total_bytes(self) -> int:
        """Memory of the fullest rank, all kinds on the device."""
        return max(int(rank["total_bytes"]) for rank in self._values["memory"])

    @property
    def step_s(self) -> float | None:
        """Seconds of a step; None if unknown."""
        seconds: float | None = self._values.get("step_s")
        return seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs of a step over those of the device's peak; None if unknown."""
        share: float | None = self._values.get("mfu")
        return share

    @property
    def tokens_per_s_per_device(self) -> float | None:
        """Throughput; None if unknown."""
        throughput: float | None = self._values.get("tokens_per_s_per_device")
        return throughput

    @property
    def text(self) -> str:
        return self.in_language(ENGLISH)

    @cached_property
    def _parts(self) -> list[Part]:
        """The text, which is of no language yet."""
        parts = estimate_parts(self.job, self._nearest)
        if self.beside:
            from shardwright.report.estimate_text import software_table

            parts.append(software_table(list(self.beside)))
        return parts

    def in_language(self, language: str) -> str:
        return document_text(self._parts, language)

    def to_dict(self) -> dict[str, Any]:
        beside = {"beside": [asdict(row) for row in self.beside]} if self.beside else {}
        return self._values | beside

    def rows(self) -> list[dict[str, Any]]:
        """The bytes of each pipeline rank, by kind."""
        return [{"pp_rank": rank, **num_bytes} for rank, num_bytes in enumerate(self._values["memory"])]


def estimated(
    subject: str, job: JobSpec, with_others: bool = False, tokens: float = 0.0, origin: "JobFiles | None" = None
) -> Estimated:
    """The prediction of a checked job, of a run of some `tokens`, if any are stated, in place of its steps;
    `with_others` adds predictions with all other software, and `origin` are files of another system. Raises
    PlanError."""
    if tokens:
        steps = max(1, round(min(tokens / job.tokens_per_step, largest.STEPS)))
        job = job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"steps": steps})})
    if not with_others:
        return Estimated(job, origin=origin)
    if job.cluster.device == "unknown":
        fault = say("cluster.device is unknown, so no software has a price; set it to a device of the catalog")
        raise PlanError(subject, [fault])
    from shardwright.report.estimate_text import software_rows

    try:
        return Estimated(job, tuple(software_rows(job)), origin)
    except KeyError as error:
        raise PlanError(subject, [error_text(error)]) from None
