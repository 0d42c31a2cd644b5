"""Scores of whether plans are said to fit, against plans that ran and plans that ran out of memory."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwright.config.attention_kernels import ATTENTION_KERNELS
from shardwright.config.software import software_of

if TYPE_CHECKING:
    from shardwright.layers.query import Run
    from shardwright.measure.validate import Predicted

# Of software: by which people call it, and of which runs it is assumed.
_NAMES = ("frameworks", "usual", "is_usual")
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
    ran_by_numbers = defaultdict[Any, list[tuple[str, "Run"]]](list)
    for p in fitting:
        if p.row.run is not None:
            ran_by_numbers[_numbers(p.row.run)].append((p.row.id, p.row.run))
    results = dict[str, str]()
    for p in failing:
        if (failed := p.row.run) is not None:
            known = ran_by_numbers.get(_numbers(failed), [])
            if twin := next((name for name, ran in known if _needs_as_much(ran, failed)), ""):
                results[p.row.id] = twin
    return results


def _numbers(run: "Run") -> Any:
    """The model, the device and the plan of a run, whatever its number of replicas."""
    return run.shape, run.device, replace(run.grid, dp=1)


def _needs_as_much(ran: "Run", failed: "Run") -> bool:
    """True if a run that ran needs as much memory as one of the same numbers that ran out, by any account."""
    is_alike = ran.grid.dp <= failed.grid.dp
    return is_alike and (ran.software == failed.software or _but_attention(ran) == _but_attention(failed) is not None)


def _but_attention(run: "Run") -> dict[str, Any] | None:
    """The numbers and flags of a run's software, which has a word for its kernel of attention; None if that keeps
    scores."""
    software = software_of(run.software)
    if ATTENTION_KERNELS[software.attention].kept_score_bytes:
        return None
    return {name: value for name, value in software if not isinstance(value, str) and name not in _NAMES}


def _by_chance(fitting: "Sequence[Predicted]", failing: "Sequence[Predicted]") -> dict[str, dict[str, int]]:
    """Numbers of plans and of those that ran, by the chance that they fit."""

    def count(rows: "Sequence[Predicted]", low: float, high: float) -> int:
        return sum(p.fit_chance is not None and low <= p.fit_chance < high for p in rows)

    return {
        name: {"plans": count([*fitting, *failing], *ends), "ran": count(fitting, *ends)}
        for name, ends in _CHANCES.items()
    }
