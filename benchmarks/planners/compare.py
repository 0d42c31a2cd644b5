"""Other planners and ours on the same measured runs: errors of time, memory and fit, the order of plans, and the rows
that each can express.

python benchmarks/planners/compare.py --calculon PATH --llm-analysis PATH --simumax PATH \
    --out benchmarks/planners/rows.csv

Prints the tables of README.md. Each planner gets the row's shape, plan, device and links.
"""

import argparse
import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from answer import Planner
from lines import (
    BLIND,
    CALCULON,
    CONSTANT,
    DATA_SETS,
    FITTED,
    LEFT_OUT,
    LLM_ANALYSIS,
    MEGATRON,
    OURS,
    PUBLISHED,
    PUBLISHED_FAMILY,
    SIMUMAX,
    Line,
    error_cells,
    formulas,
    print_table,
    read_lines,
)
from measures import print_measures
from to_calculon import Calculon
from to_llm_analysis import LLMAnalysis
from to_simumax import SimuMax

SHOWN = ("sc21", "kor22")  # families printed row by row
WITHOUT_MEMORY, WITHOUT_TIME = (CONSTANT, LEFT_OUT, BLIND), (MEGATRON,)


def print_times(lines: list[Line], names: list[str], others: list[str]) -> None:
    """Print errors of time by family, on the rows that each planner expresses, and on those that all express."""
    groups = [(family, [line for line in lines if line.row.family == family]) for family in families(lines)]
    groups.append(("all rows", lines))
    for name in others:
        groups.append((f"rows {name} expresses", [line for line in lines if line.is_answered([name])]))
    groups.append(("rows all express", [line for line in lines if line.is_answered(names)]))
    rows = []
    for label, some in groups:
        cells = []
        for name in names:
            answered = [line for line in some if line.is_answered([name])]
            count = "" if len(answered) == len(some) else f", {len(answered)} rows"
            cells.append(error_cells(answered, [line.error(name) for line in answered]) + count if answered else "-")
        rows.append([label, str(len(some)), *cells])
    print_table(["step time", "rows", *names], rows)


def print_memory(lines: list[Line], names: list[str]) -> None:
    """Print errors of memory by family, on the rows whose memory was measured."""
    rows = []
    for family in families(lines):
        some = [line for line in lines if line.row.family == family and line.row.memory_gb]
        cells = []
        for name in names:
            answered = [line for line in some if line.answers[name].memory_gb]
            count = "" if len(answered) == len(some) else f", {len(answered)} rows"
            cells.append(
                error_cells(answered, [line.memory_error(name) for line in answered]) + count if answered else "-"
            )
        if some:
            rows.append([family, str(len(some)), *cells])
    print_table(["memory", "rows", *names], rows)


def print_rows(lines: list[Line], names: list[str], shown: tuple[str, ...]) -> None:
    """Print some families row by row."""
    rows = []
    for line in lines:
        if line.row.family in shown:
            cells = [
                f"{line.answers[name].step_s:.2f} ({100 * line.error(name):+.1f} %)"
                if line.is_answered([name])
                else "-"
                for name in names
            ]
            rows.append([line.row.id, f"{line.row.step_s:.2f}", *cells])
    print_table(["row", "measured, s", *names], rows)


def print_reasons(lines: list[Line], others: list[str]) -> None:
    """Print the limits of other planners, with the number of rows that exceed each. A row may exceed several."""
    for name in others:
        counts: dict[str, int] = {}
        for line in lines:
            for reason in filter(None, line.answers[name].reason.split("; ")):
                kind = "sequences are not whole microbatches" if "whole microbatches" in reason else reason
                counts[kind] = counts.get(kind, 0) + 1
        rows = [[reason, str(count)] for reason, count in sorted(counts.items(), key=lambda entry: -entry[1])]
        print_table([f"{name} has", "rows"], rows)


def families(lines: list[Line]) -> list[str]:
    """Families in the order of the table."""
    return list(dict.fromkeys(line.row.family for line in lines))


def write_rows(lines: Iterable[Line], planners: Sequence[str], path: Path) -> None:
    """Write the rows as CSV: seconds and GB of each planner, and the reason why one has none."""
    names = [OURS, LEFT_OUT, BLIND, *planners, CONSTANT]
    with_time = [name for name in names if name not in WITHOUT_TIME]
    with_memory = [name for name in names if name not in WITHOUT_MEMORY]
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(
            ["table", "id", "measured_s", *(f"{name}, s" for name in with_time)]
            + ["measured_gb", *(f"{name}, GB" for name in with_memory)]
            + [f"{name}, reason" for name in planners]
        )
        for line in lines:
            seconds, gigabytes = [0.0] * (1 + len(with_time)), [0.0] * (1 + len(with_memory))
            if line.counts_for_time:
                seconds = [line.row.step_s, *(line.answers[name].step_s for name in with_time)]
            if line.counts_for_memory:
                gigabytes = [line.row.memory_gb, *(line.answers[name].memory_gb for name in with_memory)]
            reasons = [line.answers[name].reason for name in planners]
            table.writerow([line.table, line.row.id, *map(number, seconds), *map(number, gigabytes), *reasons])


def number(value: float) -> str:
    """The text of a cell, empty for 0."""
    return f"{value:.5g}" if value else ""


def print_tables_of_runs(lines: list[Line], planners: list[str]) -> None:
    """Print the tables of single families and rows, over the headline rows of runs.csv."""
    names = [OURS, LEFT_OUT, *planners, CONSTANT]
    print_times(lines, names, planners)
    print_rows(lines, names, SHOWN)
    print_rows(lines, [*names, PUBLISHED], (PUBLISHED_FAMILY,))
    print_memory(lines, [OURS, *planners, PUBLISHED])


def open_planners(arguments: argparse.Namespace) -> dict[str, Planner]:
    """The planners of other projects whose folders are given, by name."""
    planners: dict[str, Planner] = {}
    if arguments.calculon:
        planners[CALCULON] = Calculon(arguments.calculon)
    if arguments.llm_analysis:
        planners[LLM_ANALYSIS] = LLMAnalysis(arguments.llm_analysis)
    if arguments.simumax:
        planners[SIMUMAX] = SimuMax(arguments.simumax)
    return planners


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description="Other planners and ours on the same measured runs.")
    parser.add_argument("--calculon", type=Path, help="the folder with Calculon's package and its systems/")
    parser.add_argument("--llm-analysis", type=Path, help="the folder with the llm_analysis package")
    parser.add_argument("--simumax", type=Path, help="the folder with the simumax package and its configs/")
    parser.add_argument("--out", type=Path, help="write every row there, as CSV")
    arguments = parser.parse_args()
    others = open_planners(arguments)
    planners: Mapping[str, Planner] = {**others, **formulas()}
    tables = list(dict.fromkeys(table for data in DATA_SETS for table in data.tables))
    lines = read_lines(tables, planners)
    print_measures(lines, [*planners, CONSTANT])
    headline = [line for line in lines[FITTED] if line.counts_for_time]
    print_tables_of_runs(headline, list(others))
    print_reasons([line for data in DATA_SETS for line in lines[data.time] if line.counts_for_time], list(others))
    if arguments.out:
        scored = [line for table in tables for line in lines[table] if line.counts_for_time or line.counts_for_memory]
        write_rows(scored, list(planners), arguments.out)


if __name__ == "__main__":
    main()
