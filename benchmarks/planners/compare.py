"""Other planners and ours on the same measured runs: errors of time and memory, and what each can express.

python benchmarks/planners/compare.py --calculon PATH --llm-analysis PATH --simumax PATH \
    --out benchmarks/planners/rows.csv

Prints the tables of README.md. Each planner gets what the table of runs says: shape, plan, device and its links.
"""

import argparse
import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from answer import RUNS, Answer, Planner, asked
from to_calculon import Calculon
from to_llm_analysis import LLMAnalysis
from to_simumax import SimuMax

from shardwright.cost.calibration import left_out, shipped
from shardwright.measure.measured_runs.runs import Measured, read_runs
from shardwright.measure.measured_runs.score import percentile, weighted_mean, weights_of
from shardwright.measure.measured_runs.sweeps import RankedPlan, ranking_quality
from shardwright.measure.validate import BASELINE_EFFICIENCY, Predicted, predict

OURS, LEFT_OUT, CONSTANT = "ours", "ours, family left out of the fit", "50 % of the peak"
CALCULON, LLM_ANALYSIS, SIMUMAX = "Calculon", "llm-analysis", "SimuMax"
OTHERS = (CALCULON, LLM_ANALYSIS, SIMUMAX)
SHOWN = ("sc21", "kor22")  # families printed row by row
# What SimuMax's authors print for their own runs (docs/b200/b200_release_v1.2_summary.md), and the family of these.
PUBLISHED, PUBLISHED_ROWS = "SimuMax (published)", Path(__file__).parent / "simumax_published.csv"
PUBLISHED_FAMILY = "simumax"


@dataclass(frozen=True)
class Line:
    """A measured run and what each planner says of it, by the planner's name."""

    row: Measured
    answers: Mapping[str, Answer]

    def error(self, planner: str) -> float:
        """Predicted over measured seconds, less one."""
        return self.answers[planner].step_s / self.row.step_s - 1

    def memory_error(self, planner: str) -> float:
        """The same of memory."""
        return self.answers[planner].memory_gb / self.row.memory_gb - 1

    def is_answered(self, planners: Iterable[str]) -> bool:
        """Whether all of them give a time."""
        return all(self.answers[planner].step_s for planner in planners)


def our_answers(rows: list[Measured], others: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, Answer]]:
    """By row: what we say with the shipped constants and with those fitted without its family, and the baseline."""
    found: dict[str, dict[str, Answer]] = {row.id: {} for row in rows}
    for said in predict(rows, shipped()):
        executed_s = float(said.time.total * said.time.hfu) if said.time else 0.0
        found[said.row.id][OURS] = as_answer(said)
        found[said.row.id][CONSTANT] = Answer(executed_s / BASELINE_EFFICIENCY, 0.0, said.reason)
    for family in {row.family for row in rows}:
        constants = shipped() | dict(others.get(family, {}))
        for said in predict([row for row in rows if row.family == family], constants):
            found[said.row.id][LEFT_OUT] = as_answer(said)
    return found


def as_answer(said: Predicted) -> Answer:
    """Our prediction in the form of theirs."""
    step_s = float(said.time.total) if said.time else 0.0
    return Answer(step_s, said.memory_gb, said.reason, said.fits is not False)


def read_lines(runs: Path, planners: Mapping[str, Planner]) -> list[Line]:
    """Every row of the headline: tier A, measured, not repeated by newer software."""
    rows = [row for row in read_runs(runs) if row.tier == "A" and row.is_latest and row.step_s]
    ours, published = our_answers(rows, left_out()), read_published(PUBLISHED_ROWS)
    return [
        Line(
            row,
            {name: asked(planner, row) for name, planner in planners.items()}
            | {PUBLISHED: published.get(row.id, Answer(0.0, 0.0, "not published"))}
            | ours[row.id],
        )
        for row in rows
    ]


def read_published(path: Path) -> dict[str, Answer]:
    """Answers by row from a table of milliseconds and GiB."""
    with path.open(encoding="utf-8", newline="") as file:
        return {
            row["id"]: Answer(float(row["step_ms"]) / 1e3, float(row["memory_gib"]) * 2**30 / 1e9)
            for row in csv.DictReader(file)
        }


def print_table(header: list[str], rows: Iterable[list[str]]) -> None:
    """Markdown."""
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def error_cells(lines: list[Line], planner: str, of: Callable[[Line, str], float]) -> str:
    """Mean absolute error, median and bias in percent, every family weighing as much as any other."""
    weights = weights_of([line.row for line in lines])
    errors = [of(line, planner) for line in lines]
    absolute = [abs(error) for error in errors]
    mean, median = weighted_mean(absolute, weights), percentile(absolute, weights, 0.5)
    return f"{100 * mean:.1f} / {100 * median:.1f} ({100 * weighted_mean(errors, weights):+.1f})"


def print_times(lines: list[Line], names: list[str], others: list[str]) -> None:
    """Errors of time by family, on all that each planner expresses and on what the others all express."""
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
            cells.append(error_cells(answered, name, Line.error) + count if answered else "-")
        rows.append([label, str(len(some)), *cells])
    print_table(["step time", "rows", *names], rows)


def print_memory(lines: list[Line], names: list[str]) -> None:
    """Errors of memory by family, on the rows whose memory was measured."""
    rows = []
    for family in families(lines):
        some = [line for line in lines if line.row.family == family and line.row.memory_gb]
        cells = []
        for name in names:
            answered = [line for line in some if line.answers[name].memory_gb]
            count = "" if len(answered) == len(some) else f", {len(answered)} rows"
            cells.append(error_cells(answered, name, Line.memory_error) + count if answered else "-")
        if some:
            rows.append([family, str(len(some)), *cells])
    print_table(["memory", "rows", *names], rows)
    cells = []
    for name in names:
        ran = [line for line in lines if line.answers[name].memory_gb]
        cells.append(f"{sum(not line.answers[name].fits for line in ran)} of {len(ran)}")
    print_table(["runs that ran, said not to fit", *names], [["all", *cells]])


def print_rows(lines: list[Line], names: list[str], shown: tuple[str, ...]) -> None:
    """Some families, row by row."""
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


def print_order(lines: list[Line], names: list[str]) -> None:
    """Whether each would pick the right plan: Kendall's tau and regret in the sweeps that it expresses."""
    found = {
        name: ranking_quality(
            RankedPlan(line.row, line.answers[name].step_s) for line in lines if line.is_answered([name])
        )
        for name in names
    }
    rows = []
    for family in sorted({name for scores in found.values() for name in scores}):
        cells = []
        for of in found.values():
            score = of.get(family)
            said = score and f"{100 * score['regret']:.1f} %, {score['kendall_tau']:.2f}, {score['sweeps']:.0f} sweeps"
            cells.append(said or "-")
        if any(family in of for of in found.values()):
            rows.append([family, *cells])
    print_table(["regret, Kendall's tau", *names], rows)


def print_reasons(lines: list[Line], others: list[str]) -> None:
    """What the others can't express, and how many rows have it. A row may have several."""
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


def write_rows(lines: list[Line], names: list[str], path: Path) -> None:
    """All rows as CSV: seconds of each planner, GB of those that say it, and why one says nothing."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(
            ["id", "measured_s", *(f"{name}, s" for name in names), "measured_gb"]
            + [f"{name}, GB" for name in names if name not in (CONSTANT, LEFT_OUT)]
            + [f"{name}, reason" for name in names if name in OTHERS]
        )
        for line in lines:
            said = line.answers
            table.writerow(
                [line.row.id, f"{line.row.step_s:.5g}", *(number(said[name].step_s) for name in names)]
                + [number(line.row.memory_gb)]
                + [number(said[name].memory_gb) for name in names if name not in (CONSTANT, LEFT_OUT)]
                + [said[name].reason for name in names if name in OTHERS]
            )


def number(value: float) -> str:
    """For a cell; empty if there is none."""
    return f"{value:.5g}" if value else ""


def main() -> None:
    """All tables."""
    parser = argparse.ArgumentParser(description="Other planners and ours on the same measured runs.")
    parser.add_argument("--calculon", type=Path, help="the folder with Calculon's package and its systems/")
    parser.add_argument("--llm-analysis", type=Path, help="the folder with the llm_analysis package")
    parser.add_argument("--simumax", type=Path, help="the folder with the simumax package and its configs/")
    parser.add_argument("--runs", type=Path, default=RUNS, help="the table  [default: benchmarks/truth/runs.csv]")
    parser.add_argument("--out", type=Path, help="write every row there, as CSV")
    said = parser.parse_args()
    planners: dict[str, Planner] = {}
    if said.calculon:
        planners[CALCULON] = Calculon(said.calculon)
    if said.llm_analysis:
        planners[LLM_ANALYSIS] = LLMAnalysis(said.llm_analysis)
    if said.simumax:
        planners[SIMUMAX] = SimuMax(said.simumax)
    others = list(planners)
    names = [OURS, LEFT_OUT, *others, CONSTANT]
    lines = read_lines(said.runs, planners)
    print_times(lines, names, others)
    print_rows(lines, names, SHOWN)
    print_rows(lines, [*names, PUBLISHED], (PUBLISHED_FAMILY,))
    print_memory(lines, [OURS, *others, PUBLISHED])
    print_order(lines, names)
    print_reasons(lines, others)
    if said.out:
        write_rows(lines, names, said.out)


if __name__ == "__main__":
    main()
