"""The confidence that one plan is faster than another, from the errors of predicted ratios of steps.

Errors that two plans share cancel in the ratio of their steps. The rest of the logarithm follows Student's t
distribution, whose tails are heavy, and its spread grows with what differs between the plans: each kind of difference
adds the square of its own spread. Spreads are fitted to published sweeps, several plans of one model on one cluster
(benchmarks/fit_confidence.py); plans that were chosen because they looked best are off by more.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from shardwright.config import catalog
from shardwright.layers.query import PlanGrid

# Kinds of difference between plans, each with its fields of PlanGrid.
DIFFERENCES: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "pp": ("pp", "layout"),
    "cp": ("cp", "cp_method"),
    "ep": ("ep", "expert_tp", "dispatch"),
    "schedule": ("schedule", "virtual", "extra_warmup"),
    "sequence_parallel": ("sequence_parallel",),
    "zero": ("zero", "zero_ranks"),
    "microbatch_size": ("microbatch",),
    "recompute": ("recompute", "policies", "offload_activations"),
    "batch": ("global_batch",),
    "precision": ("precision",),
    "offload": ("offload_optimizer", "offload_parameters"),
    "compress": ("compress", "compress_rank", "compress_share"),
}
# Fields without effect if an axis is not in use, with the value that then stands for all values.
_WITHOUT: dict[str, dict[str, Any]] = {
    "pp": {"schedule": "1f1b", "virtual": 1, "extra_warmup": 0},
    "tp": {"sequence_parallel": False},
    "cp": {"cp_method": "ring"},
    "ep": {"expert_tp": 1, "dispatch": "direct"},
}


@dataclass(frozen=True)
class RatioSpread:
    """The spread of the errors of logarithms of predicted ratios: `by_kind` for each kind of difference in the sweeps,
    and `unseen`, the largest of those with all state on devices, for other kinds. `freedom` is the degrees of freedom
    of Student's t."""

    freedom: int
    by_kind: Mapping[str, float]
    unseen: float

    def of(self, kinds: Iterable[str]) -> float:
        """The spread of plans that differ in these kinds. Their order, which is that of a set, changes no bit of it."""
        return math.sqrt(math.fsum(self.by_kind.get(kind, self.unseen) ** 2 for kind in kinds))

    def confidence(self, log_ratio: float, kinds: Iterable[str]) -> float:
        """The confidence that the first plan is faster, if the second takes exp(log_ratio) times as long.

        It is 1/2 for plans that differ in no kind.
        """
        spread = self.of(kinds)
        return student_cdf(log_ratio / spread, self.freedom) if spread else 0.5

    def ratio(self, confidence: float, kinds: Iterable[str]) -> float:
        """The ratio of the second plan's step to the first's at which the first is faster with `confidence`, above
        1/2."""
        low, high = 0.0, 1.0
        while student_cdf(high, self.freedom) < confidence:
            high *= 2
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if student_cdf(middle, self.freedom) < confidence else (low, middle)
        return math.exp(high * self.of(kinds))


@lru_cache(maxsize=1)
def fitted_spread() -> RatioSpread:
    """The spread from the catalog."""
    confidence = catalog.read_confidence()
    spread = confidence["spread"]
    return RatioSpread(confidence["freedom"], spread | confidence["hosted"], max(spread.values()))


def differing(first: PlanGrid, second: PlanGrid) -> frozenset[str]:
    """The kinds of difference between two plans; their dp follows from the others."""
    first_fields, second_fields = (_fields(plan) for plan in (first, second))
    return frozenset(
        kind for kind, names in DIFFERENCES.items() if any(first_fields[name] != second_fields[name] for name in names)
    )


def _fields(plan: PlanGrid) -> dict[str, Any]:
    """The fields of a plan, with defaults for those without effect."""
    defaults = [fields for axis, fields in _WITHOUT.items() if getattr(plan, axis) == 1]
    effective = {name: getattr(plan, name) for names in DIFFERENCES.values() for name in names}
    for fields in defaults:
        effective |= fields
    return effective


def student_cdf(x: float, freedom: int) -> float:
    """The cumulative Student's t distribution, for a whole number of degrees of freedom.

    The finite series of Abramowitz and Stegun 1964, 26.7.3 and 26.7.4.
    """
    angle = math.atan(x / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    is_odd = freedom % 2
    term = cosine if is_odd else 1.0
    total = term if freedom > 1 else 0.0
    for n in range(3 if is_odd else 2, freedom, 2):
        term *= cosine**2 * (n - 1) / n
        total += term
    inside = 2 / math.pi * (angle + sine * total) if is_odd else sine * total
    return (1 + inside) / 2
