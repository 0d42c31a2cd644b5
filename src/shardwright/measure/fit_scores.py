"""Scores of whether plans are said to fit, against plans that ran and plans that ran out of memory."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.measure.validate import Predicted

_CHANCES = {"low": (0.0, 0.1), "open": (0.1, 0.9), "high": (0.9, 1.01)}  # that a plan fits: at least, and less than


def fit_scores(fitting_rows: "Iterable[Predicted]", oom_rows: "Iterable[Predicted]") -> dict[str, Any]:
    """Predictions of fit, against plans that ran and plans that ran out of memory."""
    fitting = [p for p in fitting_rows if p.fits is not None and p.row.tier in "AB"]
    failing = [p for p in oom_rows if p.fits is not None]
    false_misfits = [p.row.id for p in fitting if not p.fits]
    false_fits = [p.row.id for p in failing if p.fits]
    count = len(fitting) + len(failing)
    num_right = count - len(false_fits) - len(false_misfits)
    return {
        "accuracy": num_right / count if count else 0.0,
        "false_fits": len(false_fits),
        "false_misfits": len(false_misfits),
        "ran": len(fitting),
        "ran_out": len(failing),
        "by_chance": _by_chance(fitting, failing),
        "by_family": {
            family: {
                "false_fits": sum(bool(p.fits) for p in failing if p.row.family == family),
                "ran_out": sum(p.row.family == family for p in failing),
                "false_misfits": sum(not p.fits for p in fitting if p.row.family == family),
                "ran": sum(p.row.family == family for p in fitting),
            }
            for family in sorted({p.row.family for p in failing})
        },
        "which": {"false_fits": false_fits, "false_misfits": false_misfits},
    }


def _by_chance(fitting: "Sequence[Predicted]", failing: "Sequence[Predicted]") -> dict[str, dict[str, int]]:
    """Numbers of plans and of those that ran, by the chance that they fit."""

    def count(rows: "Sequence[Predicted]", low: float, high: float) -> int:
        return sum(p.fit_chance is not None and low <= p.fit_chance < high for p in rows)

    return {
        name: {"plans": count([*fitting, *failing], *ends), "ran": count(fitting, *ends)}
        for name, ends in _CHANCES.items()
    }
