"""The figures of a study in words, as the terminal and the page show them, as tables, and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shardwright.config.units import bytes_text
from shardwright.report.timeline.study import Study, number
from shardwright.schedule.buffer_lifetimes import Buffer
from shardwright.simulate.timeline import Cause


def figures(study: Study) -> list[tuple[str, str, str]]:
    """(name, value, what it means) of all that is true of the schedule as a whole."""
    bubbles, formula, moved = study.bubbles, study.formula, study.bubbles.moved
    bubble = f"{number(bubbles.bubble)} ({100 * bubbles.bubble_fraction:.1f} %)"
    peak = by_rank(bubbles.peak_activations)
    return [
        ("bubble", bubble, "idle time of a rank in one step alone, and its share of the step"),
        *([("formula", str(formula), "the bubble in closed form")] if formula else []),
        ("span bubble", number(bubbles.span_bubble), "idle between a rank's own first and last computation"),
        ("period bubble", number(bubbles.period_bubble), "idle in a step among others, with no barrier between"),
        ("peak", peak, "microbatches whose activations a rank keeps at once, of all its layers"),
        ("parameters", by_rank(bubbles.parameter_copies) + " x", "weights that a rank holds, in p-ths of the model"),
        ("messages", _moved(bubbles.messages, None if moved is None else moved.messages), "sent in one step"),
        *_collectives(study),
    ]


def _collectives(study: Study) -> list[tuple[str, str, str]]:
    """Gathers and reductions of a step: where parameters are gathered, or where they have bytes."""
    bubbles, moved = study.bubbles, study.bubbles.moved
    rows = []
    if bubbles.gathers:
        gathers = _moved(bubbles.gathers, None if moved is None else moved.gathers)
        rows.append(("gathers", gathers, "of the parameters of a stage, in one step"))
    if bubbles.gathers or (moved is not None and moved.reductions):
        reductions = _moved(bubbles.reductions, None if moved is None else moved.reductions)
        rows.append(("reductions", reductions, "of the gradients of a stage, in one step"))
    return rows


def _moved(how_often: int, num_bytes: int | None) -> str:
    return f"{how_often}" if num_bytes is None else f"{how_often} ({bytes_text(num_bytes)})"


def idle_table(study: Study) -> list[list[str]]:
    """A header, then for each rank its busy time, and its idle time by cause."""
    rows = [["", "busy", *(str(cause) for cause in Cause)]]
    for rank, row in enumerate(study.timeline.ranks):
        idle = row.idle_by_cause()
        rows.append([f"rank {rank}", number(row.busy), *(number(idle[cause]) for cause in Cause)])
    return rows


def memory_table(study: Study) -> list[list[str]]:
    """A header, then for each rank the most buffers of each kind at once, and their bytes where those are known."""
    ranks = study.timeline.ranks
    kinds = [buffer for buffer in Buffer if any(row.kept[buffer].most for row in ranks)]
    rows = [["most at once", *(str(buffer) for buffer in kinds)]]
    for rank, row in enumerate(ranks):
        cells = []
        for buffer in kinds:
            kept = row.kept[buffer]
            known = kept.most and kept.most_bytes is not None
            cells.append(f"{kept.most} ({bytes_text(kept.most_bytes or 0)})" if known else str(kept.most))
        rows.append([f"rank {rank}", *cells])
    return rows


def comparison(studies: Sequence[Study]) -> list[list[str]]:
    """A header, then a row a schedule. Peaks and parameters: the largest over ranks, or all that differ."""
    rows = [["schedule", "step", "bubble", "", "span bubble", "period bubble", "peak", "parameters", "messages"]]
    for study in studies:
        bubbles = study.bubbles
        share, copies = f"{100 * bubbles.bubble_fraction:.1f} %", _range(bubbles.parameter_copies) + " x"
        times = [number(bubbles.makespan), number(bubbles.bubble), share, number(bubbles.span_bubble)]
        row = [study.name, *times, number(bubbles.period_bubble), _range(bubbles.peak_activations), copies]
        rows.append([*row, str(bubbles.messages)])
    return rows


def _range(values: tuple[float, ...]) -> str:
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} to {high}"


def by_rank(values: tuple[float, ...]) -> str:
    """ "4 3 2 1", or one number where all ranks are alike."""
    texts = [number(value) for value in values]
    return texts[0] if len(set(texts)) == 1 else " ".join(texts)


def as_dict(study: Study) -> dict[str, Any]:
    """The row of a comparison. Copies of parameters are those of the rank that holds most."""
    bubbles = study.bubbles
    return {
        "name": study.name,
        "bubble": _clean(bubbles.bubble),
        "span_bubble": _clean(bubbles.span_bubble),
        "period_bubble": _clean(bubbles.period_bubble),
        "bubble_fraction": _clean(bubbles.bubble_fraction),
        "peak_activations": [_clean(peak) for peak in bubbles.peak_activations],
        "parameter_copies": _clean(max(bubbles.parameter_copies)),
        "messages": bubbles.messages,
    }


def as_full_dict(study: Study) -> dict[str, Any]:
    """All figures of a study, with the makespan of what was drawn, each rank's idle time by cause and what it keeps in
    memory.

    `bytes` of a step are null where the sizes are not known.
    """
    idle = [{str(cause): _clean(time) for cause, time in row.idle_by_cause().items()} for row in study.timeline.ranks]
    moved = study.bubbles.moved
    return as_dict(study) | {
        "makespan": _clean(study.timeline.makespan),
        "idle": idle,
        "memory": memory_dict(study),
        "gathers": study.bubbles.gathers,
        "reductions": study.bubbles.reductions,
        "bytes": None if moved is None else asdict(moved),
    }


def memory_dict(study: Study) -> list[dict[str, Any]]:
    """Most buffers of every kind at once, of every rank; bytes are null where they are not known."""
    return [
        {str(buffer): {"most": kept.most, "bytes": kept.most_bytes} for buffer, kept in row.kept.items()}
        for row in study.timeline.ranks
    ]


def _clean(value: float) -> float:
    """Without the rounding errors of subtraction."""
    return round(value, 12) + 0.0
