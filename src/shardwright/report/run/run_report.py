"""The report of a run, `report.html` in its folder: its plan and what was predicted of it, what happened, and how far
both are apart."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.config.base import PlanError, error_text
from shardwright.config.phrase import ENGLISH, each, fixed, in_language, say
from shardwright.config.run_file_names import REPORT
from shardwright.report.expert_use import experts_picture, read_use, use_text
from shardwright.report.page_document import main_of, page_document
from shardwright.report.plan_parts import PARTS, Part, PredictedPlan, timeline_part
from shardwright.report.run.profiled_time import ProfiledStep, cause_rows, read_profiles
from shardwright.report.run.run_card import RunCard
from shardwright.report.run.run_record import RunRecord, read_record
from shardwright.report.step_cost import part_words
from shardwright.report.timeline.step_drawing import step_drawing
from shardwright.schedule.timing import Times
from shardwright.train.run_files import write_anew

SECTIONS = (
    ("loss", say("Loss")),
    ("throughput", say("Throughput")),
    ("measured", say("Predicted beside measured")),
    ("profiled", say("Where a profiled step's time went")),
    ("step", say("Where a step's time goes, predicted")),
    ("by-rank", say("Memory by rank, predicted")),
    ("timeline", say("Timeline")),
    ("nodes", say("Ranks on nodes")),
    ("traffic", say("Traffic")),
    ("money", say("Money, energy, failures")),
    ("experts", say("Experts")),
    ("health", say("Health")),
    ("card", say("Card")),
)
_FOOTER = say("All of this page stands in this one file. Its numbers are in report.json and metrics.jsonl beside it.")


# Names of a run's records: kinds of memory, and how it ended.
_NAMES = (
    *("parameters", "gradients", "optimizer"),
    *("running", "done", "preempted", "failed"),
)


def write_report(folder: Path, card: RunCard, language: str = ENGLISH) -> RunCard:
    """Write the card and the report of a run into its folder, from what it has recorded, in a language. Returns the
    card with that. Raises PlanError, OSError."""
    record = read_record(folder)
    card = card.with_record(record)
    card.write(folder)
    write_anew(folder / REPORT, report_html(card, record, folder, language))
    return card


def report_html(card: RunCard, record: RunRecord, folder: Path, language: str = ENGLISH) -> str:
    """The report of a run as one HTML file, in a language."""
    data = report_data(card, record, folder, language)
    name, words = card.job["name"], data["parts"].get("job", {}).get("words", "")
    title, subtitle = say("{name}, a run", name=name), say("{ranks} ranks: {plan}", ranks=card.ranks, plan=words)
    body = main_of(title, subtitle, SECTIONS, _FOOTER, language)
    return page_document(f"{in_language(title, language)} – Shardwright", body, data, "run_report.js", language)


def report_data(card: RunCard, record: RunRecord, folder: Path, language: str = ENGLISH) -> dict[str, Any]:
    """The data of a report, whose legends are in a language and whose other texts are phrases. Parts that
    can't be predicted are left out, and a note says why."""
    parts, notes = _parts(card, language)
    performed: Part | None = None
    if record.performed_s and "timeline" in parts:
        parts["timeline"], performed = _timelines(card, record, language)
    profiles, unread = read_profiles(folder)
    return {
        "card": card.to_dict(),
        "parts": parts,
        "notes": [*notes, *unread],
        "profiled": _profiled(profiles, parts.get("step")),
        "performed": performed,
        "words": part_words(),
        "names": {name: fixed(name) for name in _NAMES},
        "series": record.thinned(),
        "compared": record.compared,
        "experts": _experts(folder, language) if record.has_experts else None,
        "figures": {
            "steps": record.last_step,
            "loss": record.last("loss"),
            "held_out": record.last("held_out"),
            "step_s": record.median("step_s"),
            "tokens_per_s": record.rate("tokens_per_s"),
            "mfu": record.rate("mfu"),
            "peak_memory_bytes": record.peak_memory_bytes,
            "link_use": {place: record.median(f"{place}_link_use") for place in ("inside", "between")},
        },
        "health": {
            "skipped": record.skipped,
            "spikes": record.num_spikes,
            "checkpoints": record.checkpoints,
            "done_again": record.done_again,
            "first_step": record.first_step,
        },
    }


def _profiled(profiles: Sequence[ProfiledStep], step: Part | None) -> dict[str, Any] | None:
    """The causes of a profiled step's time, beside the predicted ones; None without a trace."""
    if not profiles:
        return None
    predicted = step.get("time") if step else None
    seconds = sum(profile.seconds for profile in profiles) / len(profiles)
    return {
        "step": profiles[0].step,
        "ranks": len(profiles),
        "seconds": seconds,
        "rows": cause_rows(profiles, predicted),
    }


def _parts(card: RunCard, language: str) -> tuple[dict[str, Part], list[str]]:
    """The parts of the prediction, and a note for each that there is none of."""
    try:
        plan = PredictedPlan(card.checked_job(), language=language)
    except PlanError as error:
        return {}, [say("Nothing is predicted: {faults}.", faults=each(error.faults))]
    parts, notes = dict[str, Part](), list[str]()
    for name, part in PARTS.items():
        try:
            parts[name] = part(plan)
        except (PlanError, KeyError, ValueError) as error:
            notes.append(say("The prediction has no {part}: {reason}.", part=fixed(name), reason=error_text(error)))
    return parts, notes


def _timelines(card: RunCard, record: RunRecord, language: str) -> tuple[Part, Part | None]:
    """The planned timeline and the performed one, both in seconds; None for that if it is of another program.

    Where the plan's times are relative they are stretched, so that both steps are equally long.
    """
    plan = PredictedPlan(card.checked_job())
    planned = step_drawing(plan.job, plan.step)
    times = _performed_times(planned.times, record.performed_s)
    if times is None:
        return timeline_part(planned, language), None
    if not planned.drawn.is_seconds:
        stretch = times.makespan / planned.times.makespan
        note = say(
            "The planned step has no seconds of its own: it is drawn as long as the performed one. An action's length "
            "is what its FLOPs say."
        )
        stretched = planned.performed(_stretched(planned.times, stretch))
        planned = replace(stretched, drawn=replace(stretched.drawn, note=note, bubble=stretch * planned.drawn.bubble))
    caption = say("Performed: the last step that was measured, first replica, as the ranks timed it")
    performed = timeline_part(planned.performed(times), language)
    return timeline_part(planned, language), performed | {"caption": caption}


def _performed_times(planned: Times, rows: Sequence[Sequence[Sequence[float]]]) -> Times | None:
    """The times of the performed actions; None if there are not as many as in the plan."""
    if [len(row) for row in rows] != [len(row) for row in planned.rows]:
        return None
    start, end = ([[float(span[side]) for span in row] for row in rows] for side in (0, 1))
    return Times(planned.rows, start, end)


def _stretched(times: Times, factor: float) -> Times:
    start, end = ([[factor * moment for moment in row] for row in rows] for rows in (times.start, times.end))
    return Times(times.rows, start, end)


def _experts(folder: Path, language: str) -> dict[str, str] | None:
    """The picture of the experts' use, as base64, and the text about it, in a language."""
    try:
        use = read_use(folder)
    except PlanError:
        return None
    picture = experts_picture(use, folder.name, language)
    return {"picture": b64encode(picture.encode()).decode(), "text": use_text(use, language)}
