"""A run on the terminal while it goes: losses, rates, parts of a step, memory, the last checkpoint, its health."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.config.percent import percent_text
from shardwright.config.phrase import ENGLISH, in_language, say
from shardwright.config.text_columns import fitting, num_columns, terminal_width
from shardwright.config.units import counted_phrase, memory_text, seconds_text
from shardwright.report.run.run_record import RunRecord

_BARS = " ▁▂▃▄▅▆▇█"
_LEAST_WIDTH, _LABEL = 10, 22
_LATE = 4.0  # times a median step, after which a run without a new step is said to be silent
_LEAST_LATE_S = 30.0
_PARTS = (
    (say("computing"), "compute_share", "blue"),
    (say("communication"), "exposed_communication_share", "yellow"),
    (say("idle"), "pipeline_idle_share", "bright_black"),
)


def run_screen(
    name: str,
    record: RunRecord,
    num_steps: int | None,
    silent_s: float = 0.0,
    end: str = "",
    language: str = ENGLISH,
) -> list[RenderableType]:
    """The parts of the screen, in a language. `num_steps` are the steps of the job, None if unknown; `silent_s` are
    seconds since the run wrote its metrics; `end` says how a run ended before its last step, empty for another."""
    if record.last_step is None:
        unrecorded = say("{name}: no step is recorded yet", name=name)
        if end:
            unrecorded = say("{name}: no step is recorded, {end}", name=name, end=end)
        return [Text(fitting(in_language(unrecorded, language)))]
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True, overflow="ellipsis")
    width = max(_LEAST_WIDTH, min(60, terminal_width() - 2 * _LABEL))
    for label, value, picture in _rows(record, width):
        shown = Text(in_language(picture, language)) if isinstance(picture, str) else picture
        table.add_row(in_language(label, language), in_language(value, language), shown)
    heading = _heading(name, in_language(_progress(record, num_steps, end), language), language)
    notes = [Text(in_language(line, language), style="yellow") for line in _notes(record, silent_s)]
    return [Text(heading), table, *notes]


def seconds_silent(metrics: Path) -> float:
    """Seconds since a metrics file was written last."""
    return max(0.0, time.time() - metrics.stat().st_mtime)


def _heading(name: str, progress: str, language: str) -> str:
    """The run and its progress, on a line each where one is too short for both: a folder may have a long name."""
    line = in_language(say("{name}: {progress}", name=name, progress=progress), language)
    return line if num_columns(line) <= terminal_width() else f"{fitting(name)}\n{fitting(progress)}"


def _progress(record: RunRecord, num_steps: int | None, end: str) -> str:
    step, step_s = record.last_step or 0, record.median("step_s") or 0.0
    if num_steps is None:
        return say("step {step:,}", step=step)
    left: str = say("done")
    if step < num_steps:
        left = end or say("{seconds} left", seconds=seconds_text((num_steps - step) * step_s))
    return say("step {step:,} of {num_steps:,}, {left}", step=step, num_steps=num_steps, left=left)


def _rows(record: RunRecord, width: int) -> list[tuple[str, str, RenderableType]]:
    """Name, value and picture of each number that the run has. A picture may be a phrase."""
    rows: list[tuple[str, str, RenderableType]] = []
    figures = (
        (say("loss"), "loss", "{:.4f}".format),
        (say("held-out loss"), "held_out", "{:.4f}".format),
        (say("gradient norm"), "grad_norm", "{:.3g}".format),
        (say("learning rate"), "learning_rate", "{:.2e}".format),
        (say("tokens/s"), "tokens_per_s", "{:,.0f}".format),
        ("MFU", "mfu", percent_text),
        (say("a step"), "step_s", seconds_text),
    )
    for name, curve, text in figures:
        if (value := record.last(curve)) is not None:
            rows.append((name, text(value), sparkline([point for _, point in record.curves[curve]], width)))
    if record.last("compute_share") is not None:
        shares = [(label, record.last(share) or 0.0, colour) for label, share, colour in _PARTS]
        texts = tuple(say("{part} {share:.0%}", part=label, share=share) for label, share, _ in shares)
        rows.append((say("parts of a step"), "", _bar(shares, width)))
        rows.append(("", "", say("{listed}", listed=texts)))
    if record.peak_memory_bytes is not None:
        rows.append((say("peak memory"), memory_text(record.peak_memory_bytes), say("of the fullest rank")))
    for name, curve in ((say("links in nodes"), "inside_link_use"), (say("network"), "between_link_use")):
        if (use := record.last(curve)) is not None:
            rows.append((name, percent_text(use), say("of the bandwidth")))
    rows.append((say("last checkpoint"), *_checkpoint(record)))
    return rows


def _checkpoint(record: RunRecord) -> tuple[str, str]:
    if not record.checkpoints:
        return say("none"), ""
    newest = record.checkpoints[-1]
    waited = say("the run waited {seconds}", seconds=seconds_text(newest.get("blocking_s", 0.0)))
    return say("step {step:,}", step=newest.get("step", 0)), waited


def _notes(record: RunRecord, silent_s: float) -> list[str]:
    """Lines on what is not as it should be."""
    lines: list[str] = []
    if record.skipped:
        step, cause = record.skipped[-1]
        lines.append(
            say(
                "{steps} changed no weight, the last one {step}: {cause}",
                steps=counted_phrase(len(record.skipped), "step"),
                step=step,
                cause=cause,
            )
        )
    if record.num_spikes:
        lines.append(say("the loss left its band {times}", times=counted_phrase(record.num_spikes, "time")))
    if silent_s > max(_LEAST_LATE_S, _LATE * (record.median("step_s") or 0.0)):
        lines.append(say("nothing was recorded for {seconds}", seconds=seconds_text(silent_s)))
    return lines


def sparkline(values: Sequence[float], width: int) -> Text:
    """The newest values as a line of bars, from the least to the most of them, each the mean of as many values."""
    size = -(-len(values) // width)
    means = [sum(part) / len(part) for part in (values[at : at + size] for at in range(0, len(values), size))]
    least, most = min(means), max(means)
    scale = (len(_BARS) - 2) / (most - least) if most > least else 0.0
    return Text("".join(_BARS[1 + round((mean - least) * scale)] for mean in means), style="blue")


def _bar(shares: Sequence[tuple[str, float, str]], width: int) -> Text:
    bar = Text()
    for _, share, colour in shares:
        bar.append("█" * round(share * width), style=colour)
    return bar
