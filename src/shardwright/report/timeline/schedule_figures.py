"""The figures of a study in words, as the terminal and the page show them, as tables, and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shardwright.config.phrase import say
from shardwright.config.units import bytes_text, seconds_text
from shardwright.report.timeline.study import Study, number
from shardwright.schedule.buffer_lifetimes import Buffer
from shardwright.simulate.waits import Cause

CAUSES = {
    Cause.WARM_UP: say("warm-up"),
    Cause.COMMUNICATION: say("communication"),
    Cause.DEPENDENCY: say("dependency"),
    Cause.DRAIN: say("drain"),
}
_BUFFERS = {
    Buffer.ACTIVATIONS: say("activations"),
    Buffer.INPUT: say("stage inputs"),
    Buffer.MESSAGE: say("messages"),
    Buffer.PARAMETERS: say("gathered parameters"),
}


def figures(study: Study) -> list[tuple[str, str, str]]:
    """(name, value, meaning) of each figure of the whole schedule."""
    bubbles, bytes_moved = study.bubbles, study.bubbles.moved
    peak = by_rank(bubbles.peak_activations)
    return [
        *_idle_times(study),
        (say("peak"), peak, say("microbatches whose activations a rank keeps at once, of all its layers")),
        (
            say("parameters"),
            by_rank(bubbles.parameter_copies) + " x",
            say("weights that a rank holds, in p-ths of the model"),
        ),
        (
            say("messages"),
            _count_text(bubbles.messages, None if bytes_moved is None else bytes_moved.messages),
            say("sent in one step"),
        ),
        *_collectives(study),
    ]


def _idle_times(study: Study) -> list[tuple[str, str, str]]:
    """Figures of idle time: bubbles of a schedule; or a job's bubble and its idle time, which has more causes."""
    bubbles, formula, job_bubble = study.bubbles, study.formula, study.bubble
    idle_meaning = say("idle time of a rank in one step alone, and its share of the step")
    names = say("bubble"), say("span bubble"), say("period bubble")
    rows: list[tuple[str, str, str]] = []
    if job_bubble is not None:
        meaning = say(
            "the rank that computes longest waits for others, where messages and collectives take no time; its share "
            "of the whole step"
        )
        rows.append((say("bubble"), _with_share(study, job_bubble.value, job_bubble.share), meaning))
        names = say("idle"), say("span idle"), say("period idle")
        idle_meaning = say("mean over ranks: bubble, messages, collectives, shorter stages; its share of what is drawn")
    rows.append((names[0], _with_share(study, bubbles.bubble, bubbles.bubble_fraction), idle_meaning))
    rows += [(say("formula"), formula.words, say("the bubble in closed form"))] if formula else []
    span, period = _time(study, bubbles.span_bubble), _time(study, bubbles.period_bubble)
    rows.append((names[1], span, say("idle between a rank's own first and last computation")))
    rows.append((names[2], period, say("idle in a step among others, with no barrier between")))
    return rows


def _with_share(study: Study, time: float, share: float) -> str:
    return f"{_time(study, time)} ({100 * share:.1f} %)"


def _time(study: Study, time: float) -> str:
    return seconds_text(time) if study.unit else number(time)


def _collectives(study: Study) -> list[tuple[str, str, str]]:
    """Figures of a step's gathers and reductions, if parameters are gathered or if bytes are known."""
    bubbles, bytes_moved = study.bubbles, study.bubbles.moved
    rows: list[tuple[str, str, str]] = []
    if bubbles.gathers:
        gathers = _count_text(bubbles.gathers, None if bytes_moved is None else bytes_moved.gathers)
        rows.append((say("gathers"), gathers, say("of the parameters of a stage, in one step")))
    if bubbles.gathers or (bytes_moved is not None and bytes_moved.reductions):
        reductions = _count_text(bubbles.reductions, None if bytes_moved is None else bytes_moved.reductions)
        rows.append((say("reductions"), reductions, say("of the gradients of a stage, in one step")))
    return rows


def _count_text(count: int, num_bytes: int | None) -> str:
    return f"{count}" if num_bytes is None else f"{count} ({bytes_text(num_bytes)})"


def idle_table(study: Study) -> list[list[str]]:
    """A header, then for each rank its busy time, and its idle time by cause."""
    rows = [["", say("busy"), *(CAUSES[cause] for cause in Cause)]]
    for rank, row in enumerate(study.timeline.ranks):
        idle = row.idle_by_cause()
        rows.append([f"rank {rank}", _time(study, row.busy), *(_time(study, idle[cause]) for cause in Cause)])
    return rows


def memory_table(study: Study) -> list[list[str]]:
    """A header, then for each rank the most buffers of each kind at once, and their bytes if known."""
    ranks = study.timeline.ranks
    kinds = [buffer for buffer in Buffer if any(row.kept[buffer].most for row in ranks)]
    rows: list[list[str]] = [[say("most at once"), *(_BUFFERS[buffer] for buffer in kinds)]]
    for rank, row in enumerate(ranks):
        cells = []
        for buffer in kinds:
            use = row.kept[buffer]
            is_known = use.most and use.most_bytes is not None
            cells.append(f"{use.most} ({bytes_text(use.most_bytes or 0)})" if is_known else str(use.most))
        rows.append([f"rank {rank}", *cells])
    return rows


def comparison(studies: Sequence[Study]) -> list[list[str]]:
    """A header, then a row for each schedule. Peaks and parameters are ranges over ranks."""
    names = say("schedule"), say("step"), say("bubble"), "", say("span bubble"), say("period bubble")
    rows: list[list[str]] = [[*names, say("peak"), say("parameters"), say("messages")]]
    for study in studies:
        bubbles = study.bubbles
        share, copies = f"{100 * bubbles.bubble_fraction:.1f} %", _range(bubbles.parameter_copies)
        times = [number(bubbles.makespan), number(bubbles.bubble), share, number(bubbles.span_bubble)]
        row = [
            study.name,
            *times,
            number(bubbles.period_bubble),
            _range(bubbles.peak_activations),
            say("{copies} x", copies=copies),
        ]
        rows.append([*row, number(bubbles.messages)])
    return rows


def _range(values: tuple[float, ...]) -> str:
    low, high = number(min(values)), number(max(values))
    return low if low == high else say("{low} to {high}", low=low, high=high)


def by_rank(values: tuple[float, ...]) -> str:
    """The values of all ranks, "4 3 2 1", or one number if all are equal."""
    texts = [number(value) for value in values]
    return texts[0] if len(set(texts)) == 1 else " ".join(texts)


def as_dict(study: Study) -> dict[str, Any]:
    """A row of a comparison for JSON. Copies of parameters are those of the rank that holds most."""
    bubbles = study.bubbles
    return {
        "name": study.name,
        **_idle_dict(study),
        "peak_activations": [_clean(peak) for peak in bubbles.peak_activations],
        "parameter_copies": _clean(max(bubbles.parameter_copies)),
        "messages": bubbles.messages,
    }


def _idle_dict(study: Study) -> dict[str, float]:
    """The numbers of `_idle_times`."""
    bubbles, bubble = study.bubbles, study.bubble
    idle, share, span, period = map(
        _clean, (bubbles.bubble, bubbles.bubble_fraction, bubbles.span_bubble, bubbles.period_bubble)
    )
    if bubble is None:
        return {"bubble": idle, "span_bubble": span, "period_bubble": period, "bubble_fraction": share}
    job_bubble = {"bubble": _clean(bubble.value), "bubble_fraction": _clean(bubble.share)}
    return job_bubble | {"mean_idle": idle, "idle_fraction": share, "span_idle": span, "period_idle": period}


def as_full_dict(study: Study) -> dict[str, Any]:
    """All figures of a study for JSON, with the makespan of the drawing, and each rank's idle time by cause and memory.

    `bytes` of a step are null if sizes are unknown.
    """
    idle = [{str(cause): _clean(time) for cause, time in row.idle_by_cause().items()} for row in study.timeline.ranks]
    bytes_moved = study.bubbles.moved
    return as_dict(study) | {
        "makespan": _clean(study.timeline.makespan),
        "idle": idle,
        "memory": memory_dict(study),
        "gathers": study.bubbles.gathers,
        "reductions": study.bubbles.reductions,
        "bytes": None if bytes_moved is None else asdict(bytes_moved),
    }


def memory_dict(study: Study) -> list[dict[str, Any]]:
    """For each rank the most buffers of every kind at once; bytes are null if unknown."""
    return [
        {str(buffer): {"most": use.most, "bytes": use.most_bytes} for buffer, use in row.kept.items()}
        for row in study.timeline.ranks
    ]


def _clean(value: float) -> float:
    """A value without the rounding errors of subtraction."""
    return round(value, 12) + 0.0
