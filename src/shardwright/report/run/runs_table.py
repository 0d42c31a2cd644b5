"""Measured runs side by side: their rates, and how well a run on more ranks uses them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwright.config.base import PlanError
from shardwright.config.percent import percent_text, whole_percent_text
from shardwright.config.phrase import say
from shardwright.config.units import seconds_text
from shardwright.report.document import paragraph
from shardwright.report.plans_text import plan_words
from shardwright.report.rendered import ScreenPart, WideRows
from shardwright.report.run.run_card import RunCard
from shardwright.report.run.run_record import RunRecord, read_record

_UNKNOWN = "-"
_HEADING = (
    say("run"),
    say("ranks"),
    say("tokens/s"),
    say("a rank"),
    say("efficiency"),
    say("a step"),
    say("predicted"),
    "MFU",
    say("loss"),
    say("batch"),
    say("plan"),
)


@dataclass(frozen=True)
class RunRow:
    """One measured run: medians over its newest steps. `predicted_step_s` is what the run compared itself with.
    `efficiency` is the throughput of a rank over that of the run on the fewest ranks; None if it has another model."""

    run: str
    model: str
    ranks: int
    global_batch_size: int
    status: str
    steps: int | None
    step_s: float | None
    predicted_step_s: float | None
    tokens_per_s: float | None
    tokens_per_s_per_rank: float | None
    mfu: float | None
    efficiency: float | None
    loss: float | None
    held_out_loss: float | None
    plan: str


def runs_rows(folders: Sequence[Path]) -> list[RunRow]:
    """The rows of runs, fewest ranks first. Raises PlanError with every folder that has no run."""
    runs: list[tuple[Path, RunCard, RunRecord]] = []
    faults: list[str] = []
    for folder in folders:
        try:
            runs.append((folder, RunCard.read(folder), read_record(folder)))
        except PlanError as error:
            faults += error.faults
    if faults:
        raise PlanError("runs", faults)
    rows: list[RunRow] = []
    for folder, card, record in sorted(runs, key=lambda run: run[1].ranks):
        tokens_per_s = record.rate("tokens_per_s")
        per_rank = None if tokens_per_s is None else tokens_per_s / card.ranks
        base = rows[0].tokens_per_s_per_rank if rows else per_rank
        is_same = not rows or rows[0].model == _model(card)
        rows.append(
            RunRow(
                run=str(folder),
                model=_model(card),
                ranks=card.ranks,
                global_batch_size=card.job["batch"]["global_batch_size"],
                status=card.status,
                steps=record.last_step,
                step_s=record.median("step_s"),
                predicted_step_s=(record.compared or {}).get("whole_step_s", [None])[0],
                tokens_per_s=tokens_per_s,
                tokens_per_s_per_rank=per_rank,
                mfu=record.rate("mfu"),
                efficiency=per_rank / base if per_rank is not None and base and is_same else None,
                loss=record.last("loss"),
                held_out_loss=record.last("held_out"),
                plan=plan_words(card.checked_job().plan),
            )
        )
    return rows


def _model(card: RunCard) -> str:
    """The model of a run, by which runs can be compared: its name and its shape."""
    model = card.job["model"]
    return f"{model['name']}, {model['layers']} x {model['hidden']}, sequences of {model['sequence']}"


def rows_dicts(rows: Sequence[RunRow]) -> list[dict[str, Any]]:
    """The rows as JSON. Seconds, tokens a second, shares; null is unknown."""
    return [asdict(row) for row in rows]


def runs_screen(rows: Sequence[RunRow]) -> list[ScreenPart]:
    """The table, without columns of which no run knows anything, and a line on what its efficiency is relative to."""
    names = [Path(row.run).name for row in rows]
    has_names = len(set(names)) == len(names)
    cells = [
        (
            name if has_names else row.run,
            f"{row.ranks:,}",
            _text(row.tokens_per_s, "{:,.0f}".format),
            _text(row.tokens_per_s_per_rank, "{:,.0f}".format),
            _text(row.efficiency, whole_percent_text),
            _text(row.step_s, seconds_text),
            _text(row.predicted_step_s, seconds_text),
            _text(row.mfu, percent_text),
            _text(row.loss, "{:.4f}".format),
            f"{row.global_batch_size:,}",
            row.plan,
        )
        for name, row in zip(names, rows, strict=True)
    ]
    note = say("Efficiency: tokens a second of a rank, beside {run}, which has the fewest ranks.", run=cells[0][0])
    others = say("Runs of another model have none.") if len({row.model for row in rows}) > 1 else ""
    known = [column for column, values in enumerate(zip(*cells, strict=True)) if set(values) != {_UNKNOWN}]
    rows_shown = [tuple(row[column] for column in known) for row in (_HEADING, *cells)]
    return [WideRows(rows_shown[0], rows_shown[1:], left=(0,)), paragraph(note, others)]


def _text(value: float | None, form: Any) -> str:
    return _UNKNOWN if value is None else str(form(value))
