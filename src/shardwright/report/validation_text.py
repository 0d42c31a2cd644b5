"""Output of the command `validate`: scores of predicted against measured runs, as text and as a file of rows."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.report.output import write_output
from shardwright.report.text_columns import aligned


def validation_text(result: Mapping[str, Any]) -> str:
    """The scores as text."""
    header = ["", "rows", "median", "mean", "bias", "within 10 %", "within 15 %", "within 20 %", "in range"]
    table = [header, _scores("all, tier A", result)]
    table += [_scores(f"  {name}", group) for name, group in result["by_family"].items()]
    table += [_scores(f"  on {name}", group) for name, group in result["by_device"].items()]
    if cross_validated := result["cross_validated"]:
        table.append(_scores("each family left out of the fit", cross_validated))
        table += [_scores(f"  {name}", group) for name, group in cross_validated["by_family"].items()]
    if generations := result["generations_left_out"]:
        table.append(_scores("each generation of devices left out", generations))
        table += [_scores(f"  {name}", group) for name, group in generations["by_generation"].items()]
    if blind := result["software_blind"]:
        table.append(_scores("families and their own software left out", result["software_left_out"]))
        table.append(_scores("families left out, columns of software empty", blind))
    if result["tier_b"].get("by_family"):
        table.append(_scores("tier B", result["tier_b"]))
    if result["apart"]["rows"]:
        table.append(_scores("apart: rows with faults", result["apart"]))
    table.append(_scores("baseline: 50 % of the peak", result["baseline"]))
    lines = [
        _columns(result),
        _numbers(result["numbers"]),
        f"{result['predicted']} of {result['rows']} rows predicted. Error of the step time:",
        aligned(table),
        _memory(result),
        _order(result),
        _unstated(result["unstated_columns"]),
    ]
    if missing := result["not_predicted"]:
        lines.append("Not predicted:\n" + "\n".join(f"  {row}: {reason}" for row, reason in missing.items()))
    lines.append(_faults(result["apart"]["faults"]))
    return "\n\n".join(line for line in lines if line)


def _numbers(counts: Mapping[str, int]) -> str:
    """How many numbers the predictions have at their disposal."""
    return (
        f"Numbers behind predictions: {counts['fitted']} constants are fitted, {counts['fitted_to_one_family']} of "
        f"them to one family; {counts['by_hand']} are set by hand, {counts['by_hand_in_software']} of these in "
        f"descriptions of software, {counts['software_of_one_family']} in such that one family of the table has alone."
    )


def _columns(result: Mapping[str, Any]) -> str:
    """The assumptions about software where a table does not name it."""
    lines = []
    if missing := result["missing_columns"]:
        lines.append(
            f"The table has no column {', '.join(missing)}: no text of a row is read, and the usual is assumed. "
            "python benchmarks/truth/fill_columns.py IN OUT fills columns from the texts of a table."
        )
    if unnamed := result["unnamed_software"]:
        lines.append(
            f"{unnamed} of {result['rows']} rows do not name software that the catalog describes "
            "(config/catalog/software): that of their time is assumed, and their range is wider."
        )
    return "\n".join(lines)


def _scores(name: str, scores: Mapping[str, Any]) -> list[str]:
    def percent(key: str) -> str:
        return f"{100 * scores[key]:.1f} %" if key in scores else ""

    keys = ("median_ape", "mape", "bias", "within_10_percent", "within_15_percent", "within_20_percent", "in_range")
    rows = str(scores["rows"]) if "rows" in scores and not name.startswith("all") else ""
    return [name, rows, *(percent(key) for key in keys)]


def _memory(result: Mapping[str, Any]) -> str:
    fit, lines = result["fit"], []
    parts = [
        f"{name} {100 * group['median_ape']:.1f} % and {100 * group['mape']:.1f} % (bias {100 * group['bias']:+.1f} %, "
        f"{group['mean_error_gb']:+.1f} GB)"
        for name, group in result["memory_by_family"].items()
    ]
    if parts:
        lines.append(
            f"Memory, where the allocator's peak was measured: {100 * result['memory_mape']:.1f} %. "
            f"By family, median and mean error: {'; '.join(parts)}."
        )
    if fit["ran"] or fit["ran_out"]:
        lines.append(
            f"Fits or not: {100 * fit['accuracy']:.1f} % right of {fit['ran']} that ran and {fit['ran_out']} that ran "
            f"out of memory; {fit['false_fits']} said to fit that did not{_share(fit['false_fits'], fit['ran_out'])}, "
            f"{fit['false_misfits']} said not to fit that did{_share(fit['false_misfits'], fit['ran'])}."
        )
        families = [
            f"{name} {group['false_fits']} of {group['ran_out']} and {group['false_misfits']} of {group['ran']}"
            for name, group in fit["by_family"].items()
        ]
        if families:
            lines.append(
                f"By family, said to fit of those that ran out, and not to fit of those that ran: "
                f"{'; '.join(families)}."
            )
        chances = [
            f"{name} {group['plans']}, of which {group['ran']} ran"
            for name, group in fit["by_chance"].items()
            if group["plans"]
        ]
        lines.append(f"Plans by the chance that they fit, low under 10 % and high from 90 %: {'; '.join(chances)}.")
    return "\n".join(lines)


def _share(count: int, total: int) -> str:
    return f" ({100 * count / total:.1f} %)" if total else ""


def _order(result: Mapping[str, Any]) -> str:
    """Order within sweeps: of tier A where a family has such sweeps, and with tier B where that changes a family's."""
    order, with_tier_b = result["order"], result["order_with_tier_b"]
    changed = {name: group for name, group in with_tier_b.items() if group != order[name]}
    lines = []
    for title, groups in (("Order of plans within a sweep", order), ("The same with tier B", changed)):
        parts = [
            f"{name} {group['kendall_tau']:.2f}, {100 * group['regret']:.1f} % (median "
            f"{100 * group['median_regret']:.1f} %, at worst {100 * group['worst_regret']:.1f} %), over "
            f"{group['sweeps']} sweeps"
            for name, group in groups.items()
        ]
        if parts:
            lines.append(f"{title}, Kendall's tau and regret of the best: " + "; ".join(parts))
    return "\n".join(lines)


def _unstated(columns: Sequence[Mapping[str, Any]]) -> str:
    """The empty columns that would narrow the range of predictions if they were filled."""
    parts = [f"{c['name']} ({c['rows']} rows, {100 * c['spread']:.0f} %)" for c in columns]
    return (
        f"Columns that are empty, and how far apart their usual values put a step: {', '.join(parts)}. Each that is "
        "filled narrows the range."
        if parts
        else ""
    )


def cluster_fit_text(fit: Mapping[str, Any], file: Path) -> str:
    """The outcome of --fit."""
    errors = [f"{100 * fit[name]:.1f} %" for name in ("catalog_median_ape", "median_ape", "held_back_median_ape")]
    constants = ", ".join(f"{name} {value:.4g}" for name, value in fit["constants"].items())
    lines = [
        f"Fitted to {fit['rows']} runs on {fit['device']}: the median error of a step is {errors[1]} in place of "
        f"{errors[0]}; of runs held back, fitted without them, {errors[2]}.",
        f"Constants: {constants}.",
    ]
    if fit["helps"]:
        lines.append(f"{file} is a device like the catalog's with them: --set cluster.device={file}")
    else:
        lines.append(f"Runs held back are not predicted better than by the catalog, so {file} was not written.")
    return "\n".join(lines)


_MOST_FAULTS = 20  # that are listed; --json has all


def _faults(faults: Sequence[Mapping[str, Any]]) -> str:
    """Rows that count in no score but their own, with what is wrong in each."""
    if not faults:
        return ""
    tables = {fault["table"] for fault in faults}
    lines = [
        f"  {fault['table'] + ', ' if len(tables) > 1 else ''}{fault['where']}: {fault['fault']}"
        for fault in faults[:_MOST_FAULTS]
    ]
    if len(faults) > _MOST_FAULTS:
        lines.append(f"  ... and {len(faults) - _MOST_FAULTS} more; --json lists all")
    return "Scored apart, because of what they lack or contradict:\n" + "\n".join(lines)


def write_rows(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write a CSV file with one line for each prediction and its parts."""
    names = list(dict.fromkeys(name for line in lines for name in line))
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, names)
    writer.writeheader()
    for line in lines:
        writer.writerow({name: _cell(value) for name, value in line.items()})
    write_output(path, file.getvalue(), "--out")


# Beginnings of texts that a spreadsheet runs as formulas.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def _cell(value: object) -> object:
    """A value as a cell: text that would run as a formula begins with an apostrophe, which spreadsheets do not show."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
