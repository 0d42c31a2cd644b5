"""The comparison of schedules as a table of text."""

from collections.abc import Sequence

from shardwright.report.timeline.schedule_figures import fraction
from shardwright.report.timeline.study import Study, number


def comparison(studies: Sequence[Study]) -> list[list[str]]:
    """A header, then a row a schedule. Peaks and parameters: the largest over ranks, or all that differ."""
    header = ["schedule", "step", "bubble", "", "span bubble", "period bubble", "peak", "parameters", "messages"]
    rows = [header]
    for study in studies:
        bubbles = study.bubbles
        rows.append(
            [
                study.name,
                number(bubbles.makespan),
                number(bubbles.bubble),
                f"{100 * fraction(bubbles):.1f} %",
                number(bubbles.span_bubble),
                number(bubbles.period_bubble),
                _range(bubbles.peak_activations),
                _range(bubbles.parameter_copies) + " x",
                str(bubbles.messages),
            ]
        )
    return rows


def _range(values: tuple[float, ...]) -> str:
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} to {high}"
