"""A run on the terminal while it goes: losses, rates, parts of a step, memory, the last checkpoint, its health."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.config.units import counted, memory_text, seconds_text
from shardwright.report.run.run_record import RunRecord
from shardwright.report.text_columns import fitting, terminal_width

_BARS = " ▁▂▃▄▅▆▇█"
_LEAST_WIDTH, _LABEL = 10, 22
_LATE = 4.0  # times a median step, after which a run without a new step is said to be silent
_LEAST_LATE_S = 30.0
_PARTS = (
    ("computing", "compute_share", "blue"),
    ("communication", "exposed_communication_share", "yellow"),
    ("idle", "pipeline_idle_share", "bright_black"),
)


def run_screen(
    name: str, record: RunRecord, num_steps: int | None, silent_s: float = 0.0, end: str = ""
) -> list[RenderableType]:
    """The parts of the screen. `num_steps` are the steps of the job, None if unknown; `silent_s` are seconds since the
    run wrote its metrics; `end` says how a run ended before its last step, empty for another."""
    if record.last_step is None:
        return [Text(fitting(f"{name}: no step is recorded{f', {end}' if end else ' yet'}"))]
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True, overflow="ellipsis")
    width = max(_LEAST_WIDTH, min(60, terminal_width() - 2 * _LABEL))
    for row in _rows(record, width):
        table.add_row(*row)
    return [Text(fitting(_heading(name, record, num_steps, end))), table, *_notes(record, silent_s)]


def seconds_silent(metrics: Path) -> float:
    """Seconds since a metrics file was written last."""
    return max(0.0, time.time() - metrics.stat().st_mtime)


def _heading(name: str, record: RunRecord, num_steps: int | None, end: str) -> str:
    step, step_s = record.last_step or 0, record.median("step_s") or 0.0
    if num_steps is None:
        return f"{name}: step {step:,}"
    left = "done" if step >= num_steps else end or f"{seconds_text((num_steps - step) * step_s)} left"
    return f"{name}: step {step:,} of {num_steps:,}, {left}"


def _rows(record: RunRecord, width: int) -> list[tuple[str, str, RenderableType]]:
    """Name, value and picture of each number that the run has."""
    rows: list[tuple[str, str, RenderableType]] = []
    figures = (
        ("loss", "loss", "{:.4f}".format),
        ("held-out loss", "held_out", "{:.4f}".format),
        ("gradient norm", "grad_norm", "{:.3g}".format),
        ("learning rate", "learning_rate", "{:.2e}".format),
        ("tokens/s", "tokens_per_s", "{:,.0f}".format),
        ("MFU", "mfu", "{:.1%}".format),
        ("a step", "step_s", seconds_text),
    )
    for name, curve, text in figures:
        if (value := record.last(curve)) is not None:
            rows.append((name, text(value), sparkline([point for _, point in record.curves[curve]], width)))
    if record.last("compute_share") is not None:
        shares = [(label, record.last(share) or 0.0, colour) for label, share, colour in _PARTS]
        rows.append(("parts of a step", "", _bar(shares, width)))
        rows.append(("", "", Text(", ".join(f"{label} {share:.0%}" for label, share, _ in shares))))
    if record.peak_memory_bytes is not None:
        rows.append(("peak memory", memory_text(record.peak_memory_bytes), Text("of the fullest rank")))
    for name, curve in (("links in nodes", "inside_link_use"), ("network", "between_link_use")):
        if (use := record.last(curve)) is not None:
            rows.append((name, f"{use:.1%}", Text("of the bandwidth")))
    rows.append(("last checkpoint", *_checkpoint(record)))
    return rows


def _checkpoint(record: RunRecord) -> tuple[str, RenderableType]:
    if not record.checkpoints:
        return "none", Text("")
    newest = record.checkpoints[-1]
    return f"step {newest.get('step', 0):,}", Text(f"the run waited {seconds_text(newest.get('blocking_s', 0.0))}")


def _notes(record: RunRecord, silent_s: float) -> list[RenderableType]:
    """Lines on what is not as it should be."""
    lines = []
    if record.skipped:
        step, cause = record.skipped[-1]
        lines.append(f"{counted(len(record.skipped), 'step')} changed no weight, the last one {step}: {cause}")
    if record.num_spikes:
        lines.append(f"the loss left its band {counted(record.num_spikes, 'time')}")
    if silent_s > max(_LEAST_LATE_S, _LATE * (record.median("step_s") or 0.0)):
        lines.append(f"nothing was recorded for {seconds_text(silent_s)}")
    return [Text(line, style="yellow") for line in lines]


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
