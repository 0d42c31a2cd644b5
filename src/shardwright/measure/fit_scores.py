"""Scores of whether plans are said to fit, against plans that ran and plans that ran out of memory."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwright.config.attention_kernels import ATTENTION_KERNELS
from shardwright.config.software import SoftwareSpec, software_of

if TYPE_CHECKING:
    from shardwright.layers.query import Run
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
        "contradicted": _contradicted(fitting, failing),
    }


def _contradicted(fitting: "Sequence[Predicted]", failing: "Sequence[Predicted]") -> dict[str, str]:
    """Plans that ran out of memory and need no more than a plan that ran, each with that one: no account can have both
    right. They have the same numbers, that which ran on as many replicas or fewer, and attention keeps no scores."""
    results = {}
    for p in failing:
        twins = (q.row.id for q in fitting if _needs_as_much(q.row.run, p.row.run))
        if twin := next(twins, ""):
            results[p.row.id] = twin
    return results


def _needs_as_much(ran: "Run | None", failed: "Run | None") -> bool:
    """True if a run that ran needs as much memory as one that ran out, by any account."""
    if ran is None or failed is None or (ran.shape, ran.device) != (failed.shape, failed.device):
        return False
    is_alike = replace(ran.grid, dp=1) == replace(failed.grid, dp=1) and ran.grid.dp <= failed.grid.dp
    return is_alike and (ran.software == failed.software or _but_attention(ran) == _but_attention(failed) is not None)


def _but_attention(run: "Run") -> SoftwareSpec | None:
    """The software of a run but for its name and its kernel of attention; None if that keeps scores."""
    software = software_of(run.software)
    if ATTENTION_KERNELS[software.attention].kept_score_bytes:
        return None
    return software.model_copy(update=dict.fromkeys(("name", "source", "like", "since", "attention"), ""))


def _by_chance(fitting: "Sequence[Predicted]", failing: "Sequence[Predicted]") -> dict[str, dict[str, int]]:
    """Numbers of plans and of those that ran, by the chance that they fit."""

    def count(rows: "Sequence[Predicted]", low: float, high: float) -> int:
        return sum(p.fit_chance is not None and low <= p.fit_chance < high for p in rows)

    return {
        name: {"plans": count([*fitting, *failing], *ends), "ran": count(fitting, *ends)}
        for name, ends in _CHANCES.items()
    }
