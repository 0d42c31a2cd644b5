"""Predict every row of a table of measured runs, and score the predictions as benchmarks/truth/README.md says.

Tier A is the headline. If newer software repeats a plan, only the latest row counts; a plan group weighs 1, and each
family of runs weighs the same. Three scores stand next to it: a baseline with one constant efficiency, the constants
fitted without each family, and the predictions that known plans fit or not. Rows that lack a part of their plan or
contradict themselves count in none of them: they are listed with their faults and scored apart.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.config.base import PlanError, error_text, shortened
from shardwright.config.catalog import nearest
from shardwright.config.phrase import say
from shardwright.config.progress_records import tell_part, tell_share
from shardwright.cost.calibration import (
    Constants,
    device_constant,
    device_of,
    left_out,
    left_out_generations,
    shipped,
    software_under,
)
from shardwright.cost.communicators import process_bytes
from shardwright.cost.prediction_range import families_by_constant, range_ends, share_of_experts
from shardwright.layers.query import Run
from shardwright.measure.fit_scores import fit_scores
from shardwright.measure.measured_runs.row_facts import AMOUNTS, COLUMNS, FACT_COLUMNS, SOFTWARE_COLUMNS
from shardwright.measure.measured_runs.run_table import TableLine, read_lines
from shardwright.measure.measured_runs.runs import Measured, measured, read_runs
from shardwright.measure.measured_runs.score import percentile, share_within, weighted_mean, weights_of
from shardwright.measure.measured_runs.sweeps import RankedPlan, ranking_quality
from shardwright.measure.number_counts import number_counts
from shardwright.measure.unstated_columns import unstated_columns
from shardwright.memory.fit_chance import SPREAD, UNNAMED_SPREAD, fit_chance
from shardwright.memory.rank_estimate import Memory, rank_memory
from shardwright.simulate.batch_pricing import Price, prices
from shardwright.simulate.closed_form import StepTime

GB = 1e9
# The baseline assumes this share of the peak for all executed FLOPs, with recomputation.
BASELINE_EFFICIENCY = 0.5
_PARTS = 3  # of the work, about equally long


@dataclass(frozen=True)
class Predicted:
    """One row with its prediction."""

    row: Measured
    time: StepTime | None
    memory_gb: float
    fits: bool | None
    reason: str
    fit_chance: float | None = None  # that it fits
    families_by_constant: Mapping[str, Sequence[str]] | None = None  # of the fit behind it; None: the catalog's
    without: frozenset[str] = frozenset()  # families and generations whose measured runs are left out
    priced_run: Run | None = None  # the row's, with the recomputation that is assumed where the row states none

    @property
    def ratio(self) -> float:
        """Predicted over measured seconds; 0 if one is missing."""
        return self.time.total / self.row.step_s if self.time and self.row.step_s else 0.0

    @property
    def range_s(self) -> tuple[float, float]:
        """Seconds between which four of five steps lie."""
        assert self.time is not None and self.row.run is not None, "only what was predicted has a range"
        run, time, fitted = self.row.run, self.time, self.families_by_constant
        share = share_of_experts(run, sent_s=time.expert, computed_s=time.compute + time.again, total_s=time.total)
        without = self.without if self.row.knows_software else None
        shares = {"expert_share": share, "host_share": time.host_share}
        low, high = range_ends(run, shipped(), **shares, fitted=fitted, without=without)
        return float(low * self.time.total), float(high * self.time.total)


# Errors of a plan that contradicts itself, whose arithmetic may come to nothing anywhere.
_OF_CONTRADICTIONS = (ArithmeticError, AssertionError, IndexError, TypeError)


def predict(rows: Sequence[Measured], constants: Constants) -> list[Predicted]:
    """Time and memory of each row; a row that can't be predicted has a reason.

    A row that does not state its recomputation is assumed to recompute the least that fits, or all. A row with faults
    is predicted by itself, so that no other row's prediction depends on it.
    """
    sound = iter(_predict([row for row in rows if not row.faults], constants))
    return [_predict_faulty(row, constants) if row.faults else next(sound) for row in rows]


def _predict_faulty(row: Measured, constants: Constants) -> Predicted:
    """The prediction of a row with faults, if it comes to one."""
    try:
        with np.errstate(all="ignore"):
            (predicted,) = _predict([row], constants)
    except _OF_CONTRADICTIONS as error:
        return Predicted(row, None, 0.0, None, reason=say("its plan has no price: {reason}", reason=error_text(error)))
    seconds = predicted.time.total if predicted.time else 1.0
    if not (0 < seconds < math.inf and 0 <= predicted.memory_gb < math.inf):
        return Predicted(row, None, 0.0, None, reason=say("its plan has no price"))
    return predicted


def _predict(rows: Sequence[Measured], constants: Constants) -> list[Predicted]:
    priced = _priced({n: row.run for n, row in enumerate(rows) if row.run}, constants)
    judged = {n: price for n, price in priced.items() if not isinstance(price, str)}  # which a verdict is about
    is_fitting = {n: _fits(rows[n], price) for n, price in judged.items()}
    runs = {n: rows[n].run for n in is_fitting}
    for policy in ("selective", "full"):
        unsure = {
            n: _with_recompute(rows[n], policy) for n in is_fitting if not is_fitting[n] and not rows[n].knows_recompute
        }
        for n, price in _priced(unsure, constants).items():
            assert isinstance(price, Price), "a run that is priced with less memory is priced with more"
            is_fitting[n], judged[n] = _fits(rows[n], price), price
            if not rows[n].says_recompute:
                priced[n], runs[n] = price, unsure[n]
    predictions = []
    for n, row in enumerate(rows):
        price, run = priced.get(n, row.reason), runs.get(n)
        if isinstance(price, str) or run is None:
            predictions.append(Predicted(row, None, 0.0, None, reason=str(price)))
            continue
        memory = price.memory if row.memory_rank is None else rank_memory(run, constants)[row.memory_rank]
        needed_bytes, spread = float(judged[n].memory.process), SPREAD if row.knows_software else UNNAMED_SPREAD
        chance = fit_chance(needed_bytes, device_of(run.device).offered_bytes, spread)
        num_gb = _reported(row, run, memory, constants) / GB
        predictions.append(
            Predicted(row, price.time, num_gb, is_fitting[n], reason="", fit_chance=chance, priced_run=run)
        )
    return predictions


def _reported(row: Measured, run: Run, memory: Memory, constants: Constants) -> float:
    """The bytes that a row's counter shows: the driver's, which are the context and all that the allocator has, or
    those of the allocator's counter which the row or its software names."""
    counter, device = row.memory_counter or software_under(run).memory_counter, device_of(run.device)
    if counter != "reserved" and not row.sees_device:
        return float(memory.total)
    context_bytes = process_bytes(run, device_constant(constants, device, "context_bytes"))
    reserved_bytes = float(memory.reserved(device.offered_bytes - context_bytes))
    return context_bytes + reserved_bytes if row.sees_device else reserved_bytes


def _priced(runs: Mapping[int, Run], constants: Constants) -> dict[int, Price | str]:
    return dict(zip(runs, prices(list(runs.values()), constants), strict=True))


def _with_recompute(row: Measured, policy: str) -> Run:
    """The run of a row with every layer recomputed under a policy."""
    assert row.run is not None, "only what can be priced is recomputed"
    return replace(row.run, grid=replace(row.run.grid, recompute=policy, policies=()))


def _fits(row: Measured, price: Price | str) -> bool:
    assert row.run is not None and isinstance(price, Price), "only what is priced can fit"
    return bool(price.memory.process <= device_of(row.run.device).offered_bytes)


def validate(runs: Path, out_of_memory: Path | None) -> dict[str, Any]:
    """All scores."""
    tell_part(say("predicting"), 0, _PARTS)
    constants = shipped()
    measurements = read_runs(runs)
    _expect_a_measurement(runs, measurements)
    every_row = predict(measurements, constants)
    rows = [p for p in every_row if not p.row.faults]
    headline = headline_of(rows)
    tier_b = [p for p in rows if p.ratio and p.row.tier == "B" and p.row.is_latest]
    scores: dict[str, Any] = {"rows": len(every_row), "predicted": sum(p.time is not None for p in every_row)}
    scores |= headline_scores(headline)
    scores["by_device"] = _by(headline, lambda p: p.row.device)
    scores["tier_b"] = summary(tier_b, lambda p: p.ratio) | {"by_family": _by(tier_b, lambda p: p.row.family)}
    scores["baseline"] = summary(headline, _baseline_ratio)
    scores["baseline"].pop("in_range", None)  # it has none
    scores["memory_mape"], scores["memory_by_family"] = _memory(rows)
    out_of_memory_rows = predict(read_runs(out_of_memory), constants) if out_of_memory else []
    failing = [p for p in rows if p.row.ran_out] + [p for p in out_of_memory_rows if not p.row.faults]
    scores["fit"] = fit_scores([p for p in rows if not p.row.ran_out], failing)
    scores["order_with_tier_b"] = _order(rows, "AB")
    scores["order"] = scores["order_with_tier_b"] | _order(rows, "A")
    tell_part(say("predicting each family by the others"), 1, _PARTS)
    scores |= _unseen(runs, headline)
    scores["generations_left_out"] = _generations_left_out(headline)
    scores["numbers"] = number_counts(measurements)
    tell_part(say("columns that would tell most"), 2, _PARTS)
    scores["unnamed_software"] = sum(not p.row.knows_software for p in every_row)
    scores["missing_columns"] = [name for name in FACT_COLUMNS if not any(name in row.columns for row in measurements)]
    scores["unread_columns"] = sorted({name for row in measurements for name in row.columns - COLUMNS})
    scores["unstated_columns"] = [asdict(column) for column in unstated_columns(runs, constants)]
    scores["not_predicted"] = {p.row.id: p.reason for p in rows if p.time is None}
    scores["apart"] = _apart(every_row) | {"faults": _faults(runs, every_row)}
    if out_of_memory:
        scores["apart"]["faults"] += _faults(out_of_memory, out_of_memory_rows)
    scores["predictions"] = [_output_row(p) for p in every_row]
    return scores


def _expect_a_measurement(table: Path, rows: Sequence[Measured]) -> None:
    """Raise PlanError for a table whose rows can be predicted, and none of which says what was measured. A row that
    says it wrongly has a fault, which is told with the others."""
    sound = [row for row in rows if row.run is not None]
    if not sound or any(row.step_s or row.memory_gb or row.ran_out or row.faults for row in rows):
        return
    near = {name: nearest(name, [*AMOUNTS], most=1) for name in sorted(sound[0].columns - {*AMOUNTS})}
    meant = tuple(
        say("{column} for {name}", column=known[0], name=shortened(name, 60)) for name, known in near.items() if known
    )
    fault = say(
        "no row says what was measured; give them step_time_s, tokens_per_s_per_gpu, tflops_per_gpu or peak_mem_gb"
    )
    raise PlanError(
        say("file {path}", path=str(table)),
        [say("{fault}: {meant}, perhaps", fault=fault, meant=meant) if meant else fault],
    )


def headline_of(rows: Sequence[Predicted]) -> list[Predicted]:
    """The rows that the headline is made of."""
    return [p for p in rows if p.ratio and not p.row.faults and p.row.tier == "A" and p.row.is_latest]


def headline_scores(headline: list[Predicted]) -> dict[str, Any]:
    """Their scores, together and by family."""
    return summary(headline, lambda p: p.ratio) | {"by_family": _by(headline, lambda p: p.row.family)}


def _apart(rows: Sequence[Predicted]) -> dict[str, Any]:
    """Scores of the rows with faults, of every tier, as far as they have a prediction."""
    faulty = [p for p in rows if p.row.faults]
    return {"rows": len(faulty)} | summary([p for p in faulty if p.ratio], lambda p: p.ratio)


def _faults(table: Path, rows: Sequence[Predicted]) -> list[dict[str, Any]]:
    """The faults of a table's rows, each with its place."""
    return [
        {"table": table.name, "line": p.row.line, "id": p.row.id, "where": p.row.where, "fault": fault}
        for p in rows
        for fault in p.row.faults
    ]


def summary(rows: list[Predicted], ratio: Callable[[Predicted], float]) -> dict[str, float]:
    """Weighted scores of the ratios of predicted to measured."""
    if not rows:
        return {}
    weights = weights_of([p.row for p in rows])
    ratios = [ratio(p) for p in rows]
    errors = [abs(r - 1) for r in ratios]
    logs = [abs(math.log(r)) for r in ratios]
    return {
        "median_ape": percentile(errors, weights, 0.5),
        "mape": weighted_mean(errors, weights),
        "bias": weighted_mean([r - 1 for r in ratios], weights),
        "within_10_percent": share_within(errors, weights, 0.10),
        "within_15_percent": share_within(errors, weights, 0.15),
        "within_20_percent": share_within(errors, weights, 0.20),
        "in_range": weighted_mean([float(p.range_s[0] <= p.row.step_s <= p.range_s[1]) for p in rows], weights),
        "median_log": percentile(logs, weights, 0.5),
        "p90_log": percentile(logs, weights, 0.9),
    }


def _by(rows: list[Predicted], key: Callable[[Predicted], str]) -> dict[str, dict[str, float]]:
    return {
        name: {"rows": len(group)} | summary(group, lambda p: p.ratio)
        for name in sorted({key(p) for p in rows})
        if (group := [p for p in rows if key(p) == name])
    }


def _baseline_ratio(predicted: Predicted) -> float:
    """Predicted over measured time of a baseline that runs every job at 50 % of peak (HFU = 0.5)."""
    time = predicted.time
    assert time is not None, "only what was predicted has a baseline"
    return float(time.total * time.hfu / BASELINE_EFFICIENCY / predicted.row.step_s)


def _memory(rows: Iterable[Predicted]) -> tuple[float, dict[str, dict[str, float]]]:
    """The MAPE of rows that report the allocator's peak, and statistics for each family that also include rows that
    report memory as the driver sees it."""
    with_memory = [p for p in rows if p.row.memory_gb and p.memory_gb and p.row.tier in "AB" and p.row.is_latest]
    by_family = {}
    for family in sorted({p.row.family for p in with_memory}):
        group = [p for p in with_memory if p.row.family == family]
        weights = weights_of([p.row for p in group])
        by_family[family] = {
            "rows": len(group),
            "median_ape": percentile([abs(_memory_ratio(p) - 1) for p in group], weights, 0.5),
            "mape": weighted_mean([abs(_memory_ratio(p) - 1) for p in group], weights),
            "bias": weighted_mean([_memory_ratio(p) - 1 for p in group], weights),
            "mean_error_gb": weighted_mean([p.memory_gb - p.row.memory_gb for p in group], weights),
        }
    allocator = [p for p in with_memory if not p.row.sees_device]
    weights = weights_of([p.row for p in allocator])
    return weighted_mean([abs(_memory_ratio(p) - 1) for p in allocator], weights), by_family


def _memory_ratio(p: Predicted) -> float:
    """Predicted over measured bytes."""
    return p.memory_gb / p.row.memory_gb


def _order(rows: Sequence[Predicted], tiers: str) -> dict[str, dict[str, float]]:
    """Scores of the order of plans in sweeps of rows of these tiers."""
    ranked = [p for p in rows if p.ratio and p.row.tier in tiers and p.row.is_latest]
    return ranking_quality(RankedPlan(p.row, p.ratio * p.row.step_s, bool(p.fits)) for p in ranked)


def _unseen(runs: Path, headline: list[Predicted]) -> dict[str, dict[str, Any]]:
    """Scores if each family is predicted by constants that were fitted without it; if also the catalog lacks the
    descriptions of software that it has alone; and if the columns that say what software ran are empty in every row."""
    left, own, blind = list[Predicted](), list[Predicted](), list[Predicted]()
    lines = {line.number: line for line in read_lines(runs)}
    families: dict[str, set[str]] = {}
    for p in headline:
        families.setdefault(_described_by(p), set()).add(p.row.family)
    folds = left_out()
    for number, (family, constants) in enumerate(folds.items()):
        tell_share(family, number / len(folds))
        rows, without = [p.row for p in headline if p.row.family == family], shipped() | dict(constants)
        alone = frozenset(name for name, having in families.items() if having == {family})
        undescribed = [measured(lines[row.line], alone) for row in rows]
        unnamed = [_without_software(lines[row.line]) for row in rows]
        at_once = iter(predict([*rows, *undescribed, *unnamed], without))  # many of them are alike
        for scored in (left, own, blind):
            scored += [replace(p, without=frozenset({family})) for p in islice(at_once, len(rows))]
    if not left:
        return {"cross_validated": {}, "software_left_out": {}, "software_blind": {}}
    scores = {"cross_validated": left, "software_left_out": own, "software_blind": blind}
    predicted = {name: [p for p in some if p.ratio] for name, some in scores.items()}
    return {
        name: summary(some, lambda p: p.ratio) | {"by_family": _by(some, lambda p: p.row.family)}
        for name, some in predicted.items()
    }


def _described_by(p: Predicted) -> str:
    """The entry of the catalog that describes a run's software."""
    assert p.row.run is not None, "only what was predicted has software"
    return p.row.run.software.partition("+")[0]


def _without_software(line: TableLine) -> Measured:
    """A row as it is if the columns that say what software ran are empty."""
    return measured(replace(line, row={**line.row, **dict.fromkeys(SOFTWARE_COLUMNS, "")}))


def _generations_left_out(headline: list[Predicted]) -> dict[str, Any]:
    """Scores if the runs on each generation of devices are predicted by constants that were fitted without them."""
    by_generation: dict[str, list[Predicted]] = {}
    for generation, constants in left_out_generations().items():
        fitted = {name: told for name, told in families_by_constant().items() if not name.startswith(f"{generation}.")}
        rows = [p.row for p in headline if p.row.run and device_of(p.row.run.device).generation == generation]
        if predicted := predict(rows, shipped() | dict(constants)):
            left = frozenset({generation})
            by_generation[generation] = [replace(p, families_by_constant=fitted, without=left) for p in predicted]
    if not by_generation:
        return {}
    scores = summary([p for some in by_generation.values() for p in some], lambda p: p.ratio)
    return scores | {
        "by_generation": {
            name: {"rows": len(some)} | summary(some, lambda p: p.ratio) for name, some in by_generation.items()
        }
    }


def _output_row(p: Predicted) -> dict[str, Any]:
    """One row of the output file."""
    output_row: dict[str, Any] = {
        "id": p.row.id,
        "tier": p.row.tier,
        "device": p.row.device,
        "software": p.row.run.software if p.row.run else "",
        "measured_s": p.row.step_s,
        "measured_gb": p.row.memory_gb,
        "predicted_gb": p.memory_gb,
        "fits": p.fits,
        "fit_chance": p.fit_chance,
        "reason": p.reason,
        "faults": "; ".join(p.row.faults),
    }
    if p.time:
        output_row |= dict(zip(("low_s", "high_s"), p.range_s, strict=True))
        output_row |= {"predicted_s": p.time.total, "error": p.ratio - 1 if p.ratio else None} | {
            f"{name}_s": value
            for name, value in asdict(p.time).items()
            if name not in ("total", "mfu", "hfu", "low", "high")
        }
        output_row |= {"mfu": p.time.mfu, "hfu": p.time.hfu}
    return output_row
