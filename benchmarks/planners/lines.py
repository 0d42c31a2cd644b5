"""Measured runs, each with the answers of all planners: other planners', ours and two baselines'."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from answer import Answer, Planner, asked
from formulas import MegatronFormula, Textbook

from shardwright.cost.calibration import left_out, shipped
from shardwright.measure.measured_runs.row_facts import SOFTWARE_COLUMNS
from shardwright.measure.measured_runs.run_table import read_lines as read_table_lines
from shardwright.measure.measured_runs.runs import Measured, measured
from shardwright.measure.measured_runs.score import percentile, weighted_mean, weights_of
from shardwright.measure.validate import BASELINE_EFFICIENCY, Predicted, predict

TRUTH = Path(__file__).parent.parent / "truth"
FITTED = "runs"  # the table to which constants are fitted

OURS, LEFT_OUT, BLIND = "ours", "ours, family left out of the fit", "ours, left out, without facts of software"
CONSTANT = "50 % of the peak"
CALCULON, LLM_ANALYSIS, SIMUMAX = "Calculon", "llm-analysis", "SimuMax"
MEGATRON, TEXTBOOK = "Megatron-LM's formula", "textbook formula"
# SimuMax's authors print these for their own runs (docs/b200/b200_release_v1.2_summary.md), which are a family.
PUBLISHED, PUBLISHED_ROWS = "SimuMax (published)", Path(__file__).parent / "simumax_published.csv"
PUBLISHED_FAMILY = "simumax"
_NO_ANSWER = Answer(0.0, 0.0, "not published")


def formulas() -> dict[str, Planner]:
    """The planners that need no files of other projects."""
    return {MEGATRON: MegatronFormula(), TEXTBOOK: Textbook()}


@dataclass(frozen=True)
class DataSet:
    """Tables of runs of one origin: the table for time and order, that for memory, and those for fit."""

    name: str
    time: str
    memory: str
    fit: tuple[str, ...]

    @property
    def tables(self) -> tuple[str, ...]:
        """Every table once."""
        return tuple(dict.fromkeys((self.time, self.memory, *self.fit)))


DATA_SETS = (
    DataSet("runs", "runs", "runs", ("runs", "oom")),
    DataSet("others", "others", "others", ("others",)),
    DataSet("runs-2026", "runs-2026", "runs-2026", ("runs-2026",)),
    DataSet("unseen", "unseen", "unseen", ("unseen",)),
    *(DataSet(name, name, name, (name,)) for name in (f"unseen-{number}" for number in range(2, 9))),
    DataSet("playbook", "playbook", "playbook-memory", ("playbook-memory",)),
)


@dataclass(frozen=True)
class Line:
    """A measured run and the answer of each planner, by the planner's name."""

    row: Measured
    answers: Mapping[str, Answer]
    table: str = FITTED

    def error(self, planner: str) -> float:
        """Predicted over measured seconds, less one."""
        return self.answers[planner].step_s / self.row.step_s - 1

    def memory_error(self, planner: str) -> float:
        """Predicted over measured memory, less one."""
        return self.answers[planner].memory_gb / self.row.memory_gb - 1

    def is_answered(self, planners: Iterable[str]) -> bool:
        """True if all planners have a time."""
        return all(self.answers[planner].step_s for planner in planners)

    @property
    def counts_for_time(self) -> bool:
        """True for the rows of the headline: tier A, measured, not repeated by newer software."""
        return self.row.tier == "A" and self.row.is_latest and bool(self.row.step_s) and not self.row.ran_out

    @property
    def counts_for_memory(self) -> bool:
        """True if its memory was measured."""
        return self.row.tier in "AB" and self.row.is_latest and bool(self.row.memory_gb) and not self.row.ran_out


def read_lines(tables: Sequence[str], planners: Mapping[str, Planner]) -> dict[str, list[Line]]:
    """The rows of tables that lack nothing and don't contradict themselves, by table."""
    published = read_published(PUBLISHED_ROWS)
    return {table: _read_table(table, planners, published) for table in tables}


def _read_table(table: str, planners: Mapping[str, Planner], published: Mapping[str, Answer]) -> list[Line]:
    table_lines = read_table_lines(TRUTH / f"{table}.csv")
    unnamed = dict.fromkeys(SOFTWARE_COLUMNS, "")
    pairs = [(measured(line), measured(replace(line, row=line.row | unnamed))) for line in table_lines]
    pairs = [(row, blind) for row, blind in pairs if not row.faults]
    rows = [row for row, _ in pairs]
    answers = our_answers(rows)
    for name, answer in _without_family([blind for _, blind in pairs]).items():
        answers[name][BLIND] = answer
    return [
        Line(
            row,
            {name: asked(planner, row) for name, planner in planners.items()}
            | {PUBLISHED: published.get(row.id, _NO_ANSWER)}
            | answers[row.id],
            table,
        )
        for row in rows
    ]


def our_answers(rows: Sequence[Measured]) -> dict[str, dict[str, Answer]]:
    """Our answers by row: with the shipped constants, with constants fitted without its family, and the baseline."""
    answers: dict[str, dict[str, Answer]] = {}
    for prediction in predict(rows, shipped()):
        executed_s = float(prediction.time.total * prediction.time.hfu) if prediction.time else 0.0
        baseline = Answer(executed_s / BASELINE_EFFICIENCY, 0.0, prediction.reason)
        answers[prediction.row.id] = {OURS: as_answer(prediction), CONSTANT: baseline}
    for name, answer in _without_family(rows).items():
        answers[name][LEFT_OUT] = answer
    return answers


def _without_family(rows: Sequence[Measured]) -> dict[str, Answer]:
    """Our answer by row, with constants to which its family is not fitted."""
    fitted_without, answers = left_out(), {}
    for family in {row.family for row in rows}:
        constants = shipped() | dict(fitted_without.get(family, {}))
        predictions = predict([row for row in rows if row.family == family], constants)
        answers |= {prediction.row.id: as_answer(prediction) for prediction in predictions}
    return answers


def as_answer(prediction: Predicted) -> Answer:
    """Our prediction in the form of other planners' answers."""
    step_s = float(prediction.time.total) if prediction.time else 0.0
    return Answer(step_s, prediction.memory_gb, prediction.reason, prediction.fits is not False)


def read_published(path: Path) -> dict[str, Answer]:
    """Answers by row from a table of milliseconds and GiB."""
    with path.open(encoding="utf-8", newline="") as file:
        return {
            row["id"]: Answer(float(row["step_ms"]) / 1e3, float(row["memory_gib"]) * 2**30 / 1e9)
            for row in csv.DictReader(file)
        }


def error_cells(lines: Sequence[Line], errors: Sequence[float]) -> str:
    """Mean and median absolute error and bias in percent, every family weighing as much as any other."""
    weights = weights_of([line.row for line in lines])
    absolute = [abs(error) for error in errors]
    mean, median = weighted_mean(absolute, weights), percentile(absolute, weights, 0.5)
    return f"{100 * mean:.1f} / {100 * median:.1f} ({100 * weighted_mean(errors, weights):+.1f})"


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()
