"""The result of `simulate`: the timeline of a step, as text, picture, page, trace and rows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.api.shown import Shown
from shardwright.config.base import PlanError
from shardwright.config.phrase import say
from shardwright.config.plain_values import GivenOptions
from shardwright.report.output import write_output
from shardwright.report.timeline.job_study import JobStudy
from shardwright.report.timeline.schedule_command import Output, job_page, job_picture, job_text, job_trace


@dataclass(frozen=True, repr=False)
class Simulated(Shown):
    """The timeline of a step of a job; in a notebook, a picture of it."""

    study: JobStudy

    @property
    def step_s(self) -> float | None:
        """Seconds of the whole step, with the update; None if unknown."""
        seconds: float | None = self.study.values.get("executed_s", self.study.values.get("step_s"))
        return seconds

    @property
    def bubble(self) -> float:
        """The bubble as a share of the step: the time for which the rank that computes longest waits for others."""
        bubble = self.study.simulated.bubble
        assert bubble is not None, "a study of a job has one"
        return bubble.share

    @property
    def text(self) -> str:
        return job_text(self.study, Output(no_colour=True))

    def to_dict(self) -> dict[str, Any]:
        return self.study.values

    def rows(self) -> list[dict[str, Any]]:
        """A row for every computation, message and collective of the timeline: rank, step, action, resource, times."""
        return [
            {
                "rank": rank,
                "step": span.step,
                "action": str(span.action.kind),
                "stage": span.action.stage,
                "microbatch": span.action.microbatch,
                "on": str(span.resource),
                "start": float(span.start),
                "end": float(span.end),
            }
            for rank, row in enumerate(self.study.drawn.timeline.ranks)
            for span in row.spans
        ]

    def svg(self) -> str:
        """The timeline as a picture."""
        return job_picture(self.study)

    def html(self) -> str:
        """The timeline as a page to zoom and pan, which needs no network."""
        return job_page(self.study)

    def trace(self) -> str:
        """The timeline as a trace for Perfetto."""
        return job_trace(self.study)

    def save(self, path: str | Path) -> None:
        """Write the page (.html), the picture (.svg) or the trace (.json). Raises PlanError for another ending."""
        options = GivenOptions()
        name = options.text("path", path, "timeline.html")
        make_text = {".html": self.html, ".htm": self.html, ".svg": self.svg, ".json": self.trace}.get(
            Path(name).suffix.lower()
        )
        if make_text is None:
            options.faults.append(
                say(
                    "{name} is no page, picture or trace by its ending; use .html for the page, .svg for the picture "
                    "or .json for the trace",
                    name=name,
                )
            )
        if options.faults or make_text is None:
            raise PlanError("save", options.faults[:1])
        write_output(Path(name), make_text(), "save")

    def _repr_html_(self) -> str:
        return self.svg()
