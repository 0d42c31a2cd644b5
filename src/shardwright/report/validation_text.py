"""What the command `validate` prints: scores of predicted against measured runs, as text and as a file of rows."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.report.output import write_output
from shardwright.report.text_columns import aligned


def validation_text(found: Mapping[str, Any]) -> str:
    """The scores for reading."""
    header = ["", "rows", "median", "mean", "bias", "within 10 %", "within 15 %", "within 20 %"]
    table = [header, _scores("all, tier A", found)]
    table += [_scores(f"  {name}", of) for name, of in found["by_family"].items()]
    table += [_scores(f"  on {name}", of) for name, of in found["by_device"].items()]
    if crossed := found["cross_validated"]:
        table.append(_scores("each family left out of the fit", crossed))
        table += [_scores(f"  {name}", of) for name, of in crossed["by_family"].items()]
    if found["tier_b"].get("by_family"):
        table.append(_scores("tier B", found["tier_b"]))
    table.append(_scores("baseline: 50 % of the peak", found["baseline"]))
    lines = [
        f"{found['predicted']} of {found['rows']} rows predicted, {found['fitted_constants']} constants fitted. "
        "Error of the step time:",
        aligned(table),
        _memory(found),
        _order(found["order"]),
    ]
    if missing := found["not_predicted"]:
        lines.append("Not predicted:\n" + "\n".join(f"  {row}: {reason}" for row, reason in missing.items()))
    return "\n\n".join(line for line in lines if line)


def _scores(name: str, of: Mapping[str, Any]) -> list[str]:
    def percent(key: str) -> str:
        return f"{100 * of[key]:.1f} %" if key in of else ""

    keys = ("median_ape", "mape", "bias", "within_10_percent", "within_15_percent", "within_20_percent")
    rows = str(of["rows"]) if "rows" in of and not name.startswith("all") else ""
    return [name, rows, *(percent(key) for key in keys)]


def _memory(found: Mapping[str, Any]) -> str:
    fit, lines = found["fit"], []
    parts = [
        f"{name} {100 * of['mape']:.1f} % ({of['mean_error_gb']:+.1f} GB)"
        for name, of in found["memory_by_family"].items()
    ]
    if parts:
        lines.append(
            f"Memory, where the allocator's peak was measured: {100 * found['memory_mape']:.1f} %. "
            f"By family, mean error: {'; '.join(parts)}."
        )
    if fit["ran"] or fit["ran_out"]:
        lines.append(
            f"Fits or not: {100 * fit['accuracy']:.1f} % right of {fit['ran']} that ran and {fit['ran_out']} that ran "
            f"out of memory; {fit['false_fits']} said to fit that did not, "
            f"{fit['false_misfits']} said not to fit that did."
        )
    return "\n".join(lines)


def _order(order: Mapping[str, Mapping[str, float]]) -> str:
    parts = [
        f"{name} {of['kendall_tau']:.2f} and {100 * of['regret']:.1f} % over {of['sweeps']} sweeps"
        for name, of in order.items()
    ]
    return "Order of plans within a sweep, Kendall's tau and regret of the best: " + "; ".join(parts) if parts else ""


def write_rows(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """One line a row, with every prediction and its parts."""
    names = list(dict.fromkeys(name for line in lines for name in line))
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, names)
    writer.writeheader()
    for line in lines:
        writer.writerow({name: _cell(value) for name, value in line.items()})
    write_output(path, file.getvalue(), "--out")


# What makes a spreadsheet run a text as a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def _cell(value: object) -> object:
    """A value as a cell: text that would run as a formula begins with an apostrophe, which spreadsheets do not show."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
