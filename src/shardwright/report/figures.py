"""The figures of a study in words, as the terminal and the page show them, and as JSON."""

from typing import Any

from shardwright.report.study import Study, number
from shardwright.simulate.bubbles import Bubbles
from shardwright.simulate.timeline import Cause


def figures(study: Study) -> list[tuple[str, str, str]]:
    """(name, value, what it means) of all that is true of the schedule as a whole."""
    bubbles, formula = study.bubbles, study.formula
    return [
        (
            "bubble",
            f"{number(bubbles.bubble)} ({100 * fraction(bubbles):.1f} %)",
            "idle time of a rank in one step alone, and its share of the step",
        ),
        *([("formula", str(formula), "the bubble in closed form")] if formula else []),
        ("span bubble", number(bubbles.span_bubble), "idle between a rank's own first and last computation"),
        ("period bubble", number(bubbles.period_bubble), "idle in a step among others, with no barrier between"),
        (
            "peak",
            by_rank(bubbles.peak_activations),
            "microbatches whose activations a rank keeps at once, of all its layers",
        ),
        ("parameters", by_rank(bubbles.parameter_copies) + " x", "weights that a rank holds, in p-ths of the model"),
        ("messages", str(bubbles.messages), "sent in one step"),
    ]


def idle_table(study: Study) -> list[list[str]]:
    """A header, then for each rank its busy time, its idle time by cause, and the peak of what it keeps."""
    rows = [["", "busy", *(str(cause) for cause in Cause), "most alive", "most buffered"]]
    for rank, row in enumerate(study.timeline.ranks):
        idle = row.idle_by_cause()
        rows.append(
            [
                f"rank {rank}",
                number(row.busy),
                *(number(idle[cause]) for cause in Cause),
                str(max((count for _, count in row.alive), default=0)),
                str(max((count for _, count in row.buffered), default=0)),
            ]
        )
    return rows


def by_rank(values: tuple[float, ...]) -> str:
    """ "4 3 2 1", or one number where all ranks are alike."""
    texts = [number(value) for value in values]
    return texts[0] if len(set(texts)) == 1 else " ".join(texts)


def fraction(bubbles: Bubbles) -> float:
    """Share of one step that is idle; 0 of a step that takes no time."""
    return bubbles.bubble_fraction if bubbles.makespan else 0.0


def as_dict(study: Study) -> dict[str, Any]:
    """The row of a comparison. Copies of parameters are those of the rank that holds most."""
    bubbles = study.bubbles
    return {
        "name": study.name,
        "bubble": _clean(bubbles.bubble),
        "span_bubble": _clean(bubbles.span_bubble),
        "period_bubble": _clean(bubbles.period_bubble),
        "bubble_fraction": _clean(fraction(bubbles)),
        "peak_activations": [_clean(peak) for peak in bubbles.peak_activations],
        "parameter_copies": _clean(max(bubbles.parameter_copies)),
        "messages": bubbles.messages,
    }


def as_full_dict(study: Study) -> dict[str, Any]:
    """The same, with the makespan of what was drawn and each rank's idle time by cause."""
    idle = [{str(cause): _clean(time) for cause, time in row.idle_by_cause().items()} for row in study.timeline.ranks]
    return as_dict(study) | {"makespan": _clean(study.timeline.makespan), "idle": idle}


def _clean(value: float) -> float:
    """Without the rounding errors of subtraction."""
    return round(value, 12) + 0.0
