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
# A kind that says nothing where one of the plans, or neither, has its axis in use: (axis, how many must have it).
_OF_AXIS = {"schedule": ("pp", 2), "sequence_parallel": ("tp", 2), "cp": ("cp", 1), "ep": ("ep", 1)}


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


@lru_cache(maxsize=1)
def fitted_spread() -> RatioSpread:
    """The spread that the catalog has."""
    found = catalog.read_confidence()
    return RatioSpread(found["freedom"], found["spread"], max(found["spread"].values()))


def differing(first: PlanGrid, second: PlanGrid) -> frozenset[str]:
    """The kinds of difference between two plans; their dp follows from the others."""
    found = set()
    for kind, fields in DIFFERENCES.items():
        axis, least = _OF_AXIS.get(kind, ("", 0))
        num_using = sum(getattr(plan, axis) > 1 for plan in (first, second)) if axis else 0
        if num_using >= least and any(getattr(first, name) != getattr(second, name) for name in fields):
            found.add(kind)
    return frozenset(found)


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
