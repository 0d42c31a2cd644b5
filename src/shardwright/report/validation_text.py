"""Output of the command `validate`: scores of predicted against measured runs, as text and as a file of rows."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.config.phrase import ENGLISH, each, fixed, say
from shardwright.config.units import seconds_text
from shardwright.report.document import AlignedRows, Lines, Paragraph, Part, document_text, paragraph
from shardwright.report.output import write_output
from shardwright.report.step_cost import PARTS, part_words


def validation_text(
    result: Mapping[str, Any], language: str = ENGLISH, predictions: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The scores as text. A few `predictions` are shown row by row: who brings runs of their own asks for each."""
    parts: list[Part] = [
        *_columns(result),
        paragraph(_numbers(result["numbers"])),
        *_step_times(result),
        *_rows(predictions),
        *_memory(result),
        *_order(result),
        *_unstated(result["unstated_columns"]),
    ]
    if missing := result["not_predicted"]:
        rows = [say("  {row}: {reason}", row=row, reason=reason) for row, reason in missing.items()]
        parts.append(Lines((say("Not predicted:"), *rows)))
    parts += _faults(result["apart"]["faults"])
    return document_text(parts, language)


def _step_times(result: Mapping[str, Any]) -> list[Part]:
    """The number of rows that are predicted, and the errors of their step times, where one was measured."""
    counts = {name: result[name] for name in ("predicted", "rows")}
    if not (result["by_family"] or result["tier_b"]["by_family"] or "mape" in result["apart"]):
        return [
            paragraph(say("{predicted} of {rows} rows predicted, and none of them has a measured step time.", **counts))
        ]
    return [
        say("{predicted} of {rows} rows predicted. Error of the step time:", **counts),
        AlignedRows(_table(result)),
    ]


def _table(result: Mapping[str, Any]) -> list[list[str]]:
    """The scores of all rows and of groups of them."""
    bounds = [say("within {share} %", share=share) for share in (10, 15, 20)]
    table: list[list[str]] = [["", say("rows"), say("median"), say("mean"), say("bias"), *bounds, say("in range")]]
    num_rows = sum(group["rows"] for group in result["by_family"].values())
    table.append(_scores(say("all, tier A"), {**result, "rows": num_rows}))
    table += [_scores(_indented(name), group) for name, group in result["by_family"].items()]
    table += [_scores(say("  on {device}", device=name), group) for name, group in result["by_device"].items()]
    if cross_validated := result["cross_validated"]:
        table.append(_scores(say("each family left out of the fit"), cross_validated))
        table += [_scores(_indented(name), group) for name, group in cross_validated["by_family"].items()]
    if generations := result["generations_left_out"]:
        table.append(_scores(say("each generation of devices left out"), generations))
        table += [_scores(_indented(name), group) for name, group in generations["by_generation"].items()]
    if blind := result["software_blind"]:
        table.append(_scores(say("families and their own software left out"), result["software_left_out"]))
        table.append(_scores(say("families left out, columns of software empty"), blind))
    if result["tier_b"].get("by_family"):
        table.append(_scores(say("tier B"), result["tier_b"]))
    if result["apart"]["rows"]:
        table.append(_scores(say("apart: rows with faults"), result["apart"]))
    table.append(_scores(say("baseline: 50 % of the peak"), result["baseline"]))
    return table


def _rows(predictions: Sequence[Mapping[str, Any]]) -> list[Part]:
    """The predicted rows of a short table, each beside its measurement."""
    timed = [line for line in predictions if line.get("predicted_s") and line["measured_s"]]
    if not 0 < len(timed) <= _MOST_ROWS:
        return []
    heading = [
        say("run"),
        say("measured"),
        say("predicted"),
        say("four of five lie between"),
        say("measured by predicted"),
    ]
    rows = [
        [
            str(line["id"]),
            _beside(line, "measured_s"),
            _beside(line, "predicted_s"),
            say("{low} and {high}", low=_beside(line, "low_s"), high=_beside(line, "high_s")),
            f"{line['measured_s'] / line['predicted_s']:.2f}",
        ]
        for line in timed
    ]
    slow = [line for line in timed if line["measured_s"] > line["high_s"]]
    return [AlignedRows([heading, *rows]), *(paragraph(*_slow_sentences(line)) for line in slow)]


def _slow_sentences(line: Mapping[str, Any]) -> list[str]:
    """Sentences on a run that took longer than its range: what its step was predicted to consist of, and where to look
    for what no prediction knows."""
    words = part_words()
    parts = sorted(((line.get(f"{part}_s") or 0.0, words[part]) for part in PARTS), reverse=True)
    shares = tuple(
        say("{part} {share:.0%}", part=part, share=seconds / line["predicted_s"])
        for seconds, part in parts[:_PARTS_SHOWN]
        if seconds > _LEAST_SHARE * line["predicted_s"]
    )
    return [
        say(
            "{run} took longer than its range. Its step was predicted to be {parts}.",
            run=fixed(str(line["id"])),
            parts=shares,
        ),
        say(
            "No prediction knows a slow device or link, data and checkpoints that are waited for, and other work "
            "beside: `shardwright learn troubleshooting`; `shardwright schedule NAME --slow RANK TIMES` draws one slow "
            "rank."
        ),
    ]


def _beside(line: Mapping[str, Any], key: str) -> str:
    """A time of a row, in the unit of the one that was measured."""
    return seconds_text(line[key], line["measured_s"])


def _indented(name: str) -> str:
    return f"  {name}"


def _numbers(counts: Mapping[str, int]) -> str:
    """The sentence on the numbers behind predictions."""
    return say(
        "Numbers behind predictions: {fitted} constants are fitted, {fitted_to_one_family} of them to one family; "
        "{by_hand} are set by hand, {by_hand_in_software} of these in descriptions of software, "
        "{software_of_one_family} in such that one family of the table has alone; {counted} more are counted from the "
        "operators of the software itself. Predictions of this table can use {fitted_in_table} of those that are "
        "fitted and {by_hand_in_table} of those set by hand.",
        **{name: counts[name] for name in _COUNTS},
    )


_COUNTS = (
    "fitted",
    "fitted_to_one_family",
    "by_hand",
    "by_hand_in_software",
    "software_of_one_family",
    "counted",
    "fitted_in_table",
    "by_hand_in_table",
)


def _columns(result: Mapping[str, Any]) -> list[Part]:
    """The assumptions about software where a table does not name it."""
    lines: list[str] = []
    if missing := result["missing_columns"]:
        lines.append(
            say(
                "The table has no column {columns}: no text of a row is read, and the usual is assumed. "
                "python benchmarks/truth/fill_columns.py IN OUT fills columns from the texts of a table.",
                columns=tuple(missing),
            )
        )
    if unread := result["unread_columns"]:
        lines.append(
            say(
                "Nothing reads the columns {columns}; those that are read are in benchmarks/truth/README.md.",
                columns=tuple(unread),
            )
        )
    if unnamed := result["unnamed_software"]:
        lines.append(
            say(
                "{unnamed} of {rows} rows do not name software that the catalog describes (config/catalog/software): "
                "that of their time is assumed, and their range is wider.",
                unnamed=unnamed,
                rows=result["rows"],
            )
        )
    return _wrapped(lines)


def _wrapped(lines: Sequence[str]) -> list[Part]:
    """Lines that may be longer than the page is wide."""
    return [Paragraph((line,), hang="  ") for line in lines]


def _scores(name: str, scores: Mapping[str, Any]) -> list[str]:
    def percent(key: str) -> str:
        return f"{100 * scores[key]:.1f} %" if key in scores else ""

    keys = ("median_ape", "mape", "bias", "within_10_percent", "within_15_percent", "within_20_percent", "in_range")
    return [name, str(scores.get("rows", "")), *(percent(key) for key in keys)]


def _memory(result: Mapping[str, Any]) -> list[Part]:
    """The errors of memory, and how often a verdict on the fit was right."""
    fit = result["fit"]
    lines = [*_memory_errors(result), *(_fit_verdicts(fit) if fit["ran"] or fit["ran_out"] else [])]
    return _wrapped(lines)


def _memory_errors(result: Mapping[str, Any]) -> list[str]:
    families = [
        say(
            "{family} {median:.1f} % and {mean:.1f} % (bias {bias:+.1f} %, {error:+.1f} GB)",
            family=name,
            median=100 * group["median_ape"],
            mean=100 * group["mape"],
            bias=100 * group["bias"],
            error=group["mean_error_gb"],
        )
        for name, group in result["memory_by_family"].items()
    ]
    if not families:
        return []
    return [
        say(
            "Memory, where the allocator's peak was measured: {error:.1f} % in the mean. By family, median and mean "
            "error: {families}.",
            error=100 * result["memory_mape"],
            families=each(families),
        )
    ]


def _fit_verdicts(fit: Mapping[str, Any]) -> list[str]:
    verdicts = say(
        "Fits or not: {right:.1f} % right of {ran} that ran and {ran_out} that ran out of memory; {false_fits} said to "
        "fit that did not{share_of_fits}, {false_misfits} said not to fit that did{share_of_misfits}.",
        right=100 * fit["accuracy"],
        ran=fit["ran"],
        ran_out=fit["ran_out"],
        false_fits=fit["false_fits"],
        share_of_fits=_share(fit["false_fits"], fit["ran_out"]),
        false_misfits=fit["false_misfits"],
        share_of_misfits=_share(fit["false_misfits"], fit["ran"]),
    )
    families = [
        say(
            "{family} {false_fits} of {ran_out} and {false_misfits} of {ran}",
            family=name,
            **{key: group[key] for key in ("false_fits", "ran_out", "false_misfits", "ran")},
        )
        for name, group in fit["by_family"].items()
    ]
    by_family = say(
        "By family, said to fit of those that ran out, and not to fit of those that ran: {families}.",
        families=each(families),
    )
    chances = [
        say("{chance} {plans}, of which {ran} ran", chance=fixed(name), plans=group["plans"], ran=group["ran"])
        for name, group in fit["by_chance"].items()
        if group["plans"]
    ]
    by_chance = say(
        "Plans by the chance that they fit, low under 10 % and high from 90 %: {chances}.", chances=each(chances)
    )
    apart = fit["contradicted"]
    num_false = fit["false_fits"] - sum(name in apart for name in fit["which"]["false_fits"])
    contradicted = say(
        "{number} of those that ran out need no more than a plan that ran, so no account has both right; of the "
        "{others} others {false_fits} are said to fit{share}.",
        number=len(apart),
        others=fit["ran_out"] - len(apart),
        false_fits=num_false,
        share=_share(num_false, fit["ran_out"] - len(apart)),
    )
    return [verdicts, *([contradicted] if apart else []), *([by_family] if families else []), by_chance]


def _share(count: int, total: int) -> str:
    return say(" ({share:.1f} %)", share=100 * count / total) if total else ""


def _order(result: Mapping[str, Any]) -> list[Part]:
    """Order within sweeps: of tier A where a family has such sweeps, and with tier B where that changes a family's."""
    order, with_tier_b = result["order"], result["order_with_tier_b"]
    changed = {name: group for name, group in with_tier_b.items() if group != order[name]}
    titles = (say("Order of plans within a sweep"), order), (say("The same with tier B"), changed)
    lines = [
        say(
            "{title}, Kendall's tau and regret of the best: {families}",
            title=title,
            families=each([_order_words(name, group) for name, group in groups.items()]),
        )
        for title, groups in titles
        if groups
    ]
    return _wrapped(lines)


def _order_words(family: str, group: Mapping[str, Any]) -> str:
    return say(
        "{family} {tau:.2f}, {regret:.1f} % (median {median:.1f} %, at worst {worst:.1f} %), over {sweeps} sweeps",
        family=family,
        tau=group["kendall_tau"],
        regret=100 * group["regret"],
        median=100 * group["median_regret"],
        worst=100 * group["worst_regret"],
        sweeps=group["sweeps"],
    )


def _unstated(columns: Sequence[Mapping[str, Any]]) -> list[Part]:
    """The empty columns that would narrow the range of predictions if they were filled."""
    parts = tuple(
        say("{column} ({rows} rows, {spread:.0f} %)", column=c["name"], rows=c["rows"], spread=100 * c["spread"])
        for c in columns
    )
    if not parts:
        return []
    return [
        say(
            "Columns that are empty, and how far apart their usual values put a step: {columns}. Each that is filled "
            "narrows the range.",
            columns=parts,
        )
    ]


def cluster_fit_text(fit: Mapping[str, Any], file: Path, language: str = ENGLISH) -> str:
    """The outcome of --fit."""
    constants = tuple(f"{name} {value:.4g}" for name, value in fit["constants"].items())
    lines = [
        say(
            "Fitted to {rows} runs on {device}: the median error of a step is {error:.1f} % in place of {catalog:.1f} "
            "%; of runs held back, fitted without them, {held_back:.1f} %.",
            rows=fit["rows"],
            device=fit["device"],
            error=100 * fit["median_ape"],
            catalog=100 * fit["catalog_median_ape"],
            held_back=100 * fit["held_back_median_ape"],
        ),
        say("Constants: {constants}.", constants=constants),
    ]
    if fit["helps"]:
        lines.append(
            say("{file} is a device like the catalog's with them: --set cluster.device={file}", file=str(file))
        )
    else:
        lines.append(
            say(
                "Runs held back are not predicted better than by the catalog, so {file} was not written.",
                file=str(file),
            )
        )
    return document_text([Lines(lines)], language)


_PARTS_SHOWN, _LEAST_SHARE = 4, 0.005  # of a step: a smaller part would be shown as 0 %
_MOST_ROWS = 12  # of a table whose rows are shown one by one; --out has all
_MOST_FAULTS = 20  # that are listed; --json has all


def _faults(faults: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Rows that count in no score but their own, with what is wrong in each."""
    if not faults:
        return []
    tables = {fault["table"] for fault in faults}
    lines: list[str] = [
        say(
            "  {place}: {fault}",
            place=f"{fault['table'] + ', ' if len(tables) > 1 else ''}{fault['where']}",
            fault=fault["fault"],
        )
        for fault in faults[:_MOST_FAULTS]
    ]
    if len(faults) > _MOST_FAULTS:
        lines.append(say("  ... and {count} more; --json lists all", count=len(faults) - _MOST_FAULTS))
    return [Lines((say("Scored apart, because of what they lack or contradict:"), *lines))]


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
