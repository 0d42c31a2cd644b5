"""The result of `estimate`: memory by rank, and for a known device time, money and whether it fits."""

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardwright.api.shown import Shown
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.report.estimate_text import estimate_dict, estimate_text

if TYPE_CHECKING:  # the account of memory takes no numpy, and prices do
    from shardwright.report.beside_text import Beside


@dataclass(frozen=True, repr=False)
class Estimated(Shown):
    """A job's prediction. `beside` has it with all other software of the catalog, where that was asked for."""

    job: JobSpec
    beside: "tuple[Beside, ...]" = ()

    @cached_property
    def _values(self) -> dict[str, Any]:
        return estimate_dict(self.job)

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return int(self._values["parameters"])

    @property
    def fits(self) -> bool | None:
        """True if every rank fits its device; None where the device is not known."""
        found: bool | None = self._values["fits"]
        return found

    @property
    def total_bytes(self) -> int:
        """Memory of the fullest rank, all kinds on the device."""
        return max(int(rank["total_bytes"]) for rank in self._values["memory"])

    @property
    def step_s(self) -> float | None:
        """Seconds of a step; None where they are not known."""
        found: float | None = self._values.get("step_s")
        return found

    @property
    def mfu(self) -> float | None:
        """Model FLOPs of a step by those of the device's peak; None where they are not known."""
        found: float | None = self._values.get("mfu")
        return found

    @property
    def tokens_per_s_per_device(self) -> float | None:
        """Throughput; None where it is not known."""
        found: float | None = self._values.get("tokens_per_s_per_device")
        return found

    @property
    def text(self) -> str:
        if not self.beside:
            return estimate_text(self.job)
        from shardwright.report.beside_text import beside_text

        return f"{estimate_text(self.job)}\n\n{beside_text(list(self.beside))}"

    def to_dict(self) -> dict[str, Any]:
        more = {"beside": [asdict(row) for row in self.beside]} if self.beside else {}
        return self._values | more

    def rows(self) -> list[dict[str, Any]]:
        """The bytes of each pipeline rank, by kind."""
        return [{"pp_rank": rank, **held} for rank, held in enumerate(self._values["memory"])]


def estimated(subject: str, job: JobSpec, with_others: bool = False) -> Estimated:
    """The prediction of a checked job; `with_others` beside all other software. Raises PlanError."""
    if not with_others:
        return Estimated(job)
    if job.cluster.device == "unknown":
        fault = "cluster.device is unknown, so no software has a price; set it to a device of the catalog"
        raise PlanError(subject, [fault])
    from shardwright.report.beside_text import beside

    try:
        return Estimated(job, tuple(beside(job)))
    except KeyError as error:
        raise PlanError(subject, [str(error.args[0])]) from None
