"""Sweeps: plans of one model on as many devices with the same kernels, of which a planner would pick one."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.layers.query import Run
from shardwright.measure.measured_runs.runs import Measured
from shardwright.measure.measured_runs.score import kendall_tau, percentile

_FEWEST_PLANS = 4


@dataclass(frozen=True)
class RankedPlan:
    """A measured row with the seconds that are expected of it, and whether its plan is expected to fit."""

    row: Measured
    expected_s: float
    fits: bool = True


def ranking_quality(plans: Iterable[RankedPlan]) -> dict[str, dict[str, float]]:
    """Kendall's tau, and the regret of the best plan, by family: means over its sweeps of at least 4 rows, the median
    regret and the worst.

    The regret is how much slower the plan that is expected to be best is than the best plan, both among those measured.
    A plan that is not expected to fit is not picked while others are. Rows of one plan are one plan, with the mean of
    their seconds; if several plans are expected to be equally good, the regret is their mean.
    """
    scores = {}
    for family, sweeps in sorted(_by_sweep(plans).items()):
        taus = [kendall_tau([p.row.step_s for p in sweep], [p.expected_s for p in sweep]) for sweep in sweeps]
        regrets = [_regret(sweep) for sweep in sweeps]
        if taus:
            scores[family] = {
                "sweeps": len(taus),
                "kendall_tau": sum(taus) / len(taus),
                "regret": sum(regrets) / len(regrets),
                "median_regret": percentile(regrets, [1.0] * len(regrets), 0.5),
                "worst_regret": max(regrets),
            }
    return scores


def _by_sweep(plans: Iterable[RankedPlan]) -> Mapping[str, list[list[RankedPlan]]]:
    """The sweeps of each family."""
    families: dict[str, dict[tuple[object, ...], list[RankedPlan]]] = {}
    for plan in plans:
        run = plan.row.run
        assert run is not None, "only what was predicted is ordered"
        shape = replace(run.shape, heads=1, head_dim=1, kv_heads=1)
        key = (shape, run.grid.world, run.software, run.grid.global_batch)
        families.setdefault(plan.row.family, {}).setdefault(key, []).append(plan)
    return {
        family: [sweep for sweep in sweeps.values() if len(sweep) >= _FEWEST_PLANS]
        for family, sweeps in families.items()
    }


def _regret(sweep: Sequence[RankedPlan]) -> float:
    measured: dict[Run | None, list[float]] = {}
    for plan in sweep:
        measured.setdefault(plan.row.run, []).append(plan.row.step_s)
    mean_s = {run: sum(seconds) / len(seconds) for run, seconds in measured.items()}
    candidates = [plan for plan in sweep if plan.fits] or sweep
    least_s = min(plan.expected_s for plan in candidates)
    picked = {plan.row.run for plan in candidates if math.isclose(plan.expected_s, least_s)}
    return sum(mean_s[run] for run in picked) / len(picked) / min(mean_s.values()) - 1
