"""How sure it is that one plan is faster than another, by how far predicted ratios of steps were off.

Errors that two plans share cancel in the ratio of their steps. What is left of the logarithm follows Student's t
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
from shardwright.workload.query import PlanGrid

# Kinds of difference, and the fields of a cut by which two plans differ so.
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
# Fields that say nothing where an axis is not in use, and what then stands for all they could be.
_WITHOUT: dict[str, dict[str, Any]] = {
    "pp": {"schedule": "1f1b", "virtual": 1, "extra_warmup": 0},
    "tp": {"sequence_parallel": False},
    "cp": {"cp_method": "ring"},
    "ep": {"expert_tp": 1, "dispatch": "direct"},
}


@dataclass(frozen=True)
class RatioSpread:
    """How far logarithms of predicted ratios are off: a spread for each kind of difference that sweeps have, and the
    one that is taken for the others, the largest. `freedom` is the degrees of freedom of Student's t."""

    freedom: int
    by_kind: Mapping[str, float]
    unseen: float

    def of(self, kinds: Iterable[str]) -> float:
        """The spread of plans that differ so."""
        return math.sqrt(sum(self.by_kind.get(kind, self.unseen) ** 2 for kind in kinds))

    def confidence(self, log_ratio: float, kinds: Iterable[str]) -> float:
        """How sure it is that the first plan is faster, where the second takes exp(log_ratio) times as long.

        1/2 of plans that differ in nothing that is predicted.
        """
        spread = self.of(kinds)
        return student_cdf(log_ratio / spread, self.freedom) if spread else 0.5

    def ratio(self, confidence: float, kinds: Iterable[str]) -> float:
        """How many times as long the second plan must take for the first to be faster with a confidence above 1/2."""
        low, high = 0.0, 1.0
        while student_cdf(high, self.freedom) < confidence:
            high *= 2
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if student_cdf(middle, self.freedom) < confidence else (low, middle)
        return math.exp(high * self.of(kinds))


@lru_cache(maxsize=1)
def fitted_spread() -> RatioSpread:
    """The spread that the catalog has."""
    confidence = catalog.read_confidence()
    return RatioSpread(confidence["freedom"], confidence["spread"], max(confidence["spread"].values()))


def differing(first: PlanGrid, second: PlanGrid) -> frozenset[str]:
    """The kinds of difference between two plans; their dp follows from the others."""
    one, other = (_fields(plan) for plan in (first, second))
    return frozenset(kind for kind, names in DIFFERENCES.items() if any(one[name] != other[name] for name in names))


def _fields(plan: PlanGrid) -> dict[str, Any]:
    """The fields of a plan that have an effect."""
    unused = [fields for axis, fields in _WITHOUT.items() if getattr(plan, axis) == 1]
    said_fields = {name: getattr(plan, name) for names in DIFFERENCES.values() for name in names}
    for fields in unused:
        said_fields |= fields
    return said_fields


def student_cdf(x: float, freedom: int) -> float:
    """Student's t distribution, of a whole number of degrees of freedom.

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
