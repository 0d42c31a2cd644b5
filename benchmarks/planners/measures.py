"""Tables of four measures, time, memory, fit and order: each planner on the rows that it expresses, and ours there."""

from collections.abc import Callable, Mapping, Sequence

from lines import BLIND, DATA_SETS, LEFT_OUT, DataSet, Line, error_cells, print_table

from shardwright.measure.measured_runs.sweeps import RankedPlan, ranking_quality

OWN = (LEFT_OUT, BLIND)  # columns beside each planner, on the same rows
Cell = Callable[[Sequence[Line], str], str]
Lines = Mapping[str, Sequence[Line]]


def print_measures(lines: Lines, planners: Sequence[str]) -> None:
    """Print the four tables."""
    _print_measure("time", [(data, _time_lines(lines, data)) for data in DATA_SETS], planners, _has_time, _time_cell)
    memory = [(data, [line for line in lines[data.memory] if line.counts_for_memory]) for data in DATA_SETS]
    _print_measure("memory", memory, planners, _has_memory, _memory_cell)
    _print_measure("fit", [(data, _fit_lines(lines, data)) for data in DATA_SETS], planners, _has_memory, _fit_cell)
    _print_order([(data, _time_lines(lines, data)) for data in DATA_SETS], planners)


def _time_lines(lines: Lines, data: DataSet) -> list[Line]:
    return [line for line in lines[data.time] if line.counts_for_time]


def _fit_lines(lines: Lines, data: DataSet) -> list[Line]:
    return [line for table in data.fit for line in lines[table] if line.row.tier in "AB"]


def _has_time(line: Line, planner: str) -> bool:
    return bool(line.answers[planner].step_s)


def _has_memory(line: Line, planner: str) -> bool:
    return bool(line.answers[planner].memory_gb)


def _time_cell(lines: Sequence[Line], planner: str) -> str:
    return error_cells(lines, [line.error(planner) for line in lines])


def _memory_cell(lines: Sequence[Line], planner: str) -> str:
    return error_cells(lines, [line.memory_error(planner) for line in lines])


def ran_out(line: Line) -> bool:
    """True if the plan was measured not to fit: all of the table of such plans, and marked ones of others."""
    return line.row.ran_out or line.table == "oom"


def _fit_cell(lines: Sequence[Line], planner: str) -> str:
    """The share of right verdicts, and of plans that ran those refused, of plans that ran out those let pass."""
    ran, failed = [line for line in lines if not ran_out(line)], [line for line in lines if ran_out(line)]
    num_refused = sum(not line.answers[planner].fits for line in ran)
    num_passed = sum(line.answers[planner].fits for line in failed)
    share = 100 * (1 - (num_refused + num_passed) / len(lines))
    return f"{share:.1f} % ({num_refused} of {len(ran)}, {num_passed} of {len(failed)})"


def _print_measure(
    measure: str,
    data_sets: Sequence[tuple[DataSet, Sequence[Line]]],
    planners: Sequence[str],
    is_answered: Callable[[Line, str], bool],
    cell: Cell,
) -> None:
    """Print one measure: a line for each table and planner that expresses some of its rows."""
    rows = []
    for data, lines in data_sets:
        for planner in planners:
            answered = [line for line in lines if all(is_answered(line, name) for name in (planner, *OWN))]
            if answered:
                count = f"{len(answered)} of {len(lines)}"
                rows.append([data.name, planner, count, *(cell(answered, name) for name in (planner, *OWN))])
    print_table([measure, "planner", "rows", "its own", *OWN], rows)


def _print_order(data_sets: Sequence[tuple[DataSet, Sequence[Line]]], planners: Sequence[str]) -> None:
    """Print regret and Kendall's tau in the sweeps of each family, over the plans that a planner expresses."""
    rows = []
    for data, lines in data_sets:
        for planner in planners:
            answered = [line for line in lines if line.is_answered((planner, *OWN))]
            scores = [_order_scores(answered, name) for name in (planner, *OWN)]
            rows += [
                [f"{data.name}: {family}", planner, f"{scores[0][family]['sweeps']:.0f}"]
                + [_order_cell(score[family]) for score in scores]
                for family in scores[0]
            ]
    print_table(["order", "planner", "sweeps", "its own", *OWN], rows)


def _order_scores(lines: Sequence[Line], planner: str) -> dict[str, dict[str, float]]:
    answers = [(line.row, line.answers[planner]) for line in lines]
    return ranking_quality(RankedPlan(row, answer.step_s, answer.fits) for row, answer in answers)


def _order_cell(score: Mapping[str, float]) -> str:
    """Mean, median and worst regret in percent, and tau."""
    regrets = " / ".join(f"{100 * score[name]:.1f}" for name in ("regret", "median_regret", "worst_regret"))
    return f"{regrets}, {score['kendall_tau']:.2f}"
