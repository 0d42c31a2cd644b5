"""The mesh as an array, laid out and cut by numpy alone: what the table of groups is compared with."""

import numpy as np

from shardwright.config.plan import PlanSpec


def mesh_array(plan: PlanSpec, order: tuple[str, ...] = ("pp", "dp", "cp", "tp")) -> np.ndarray:
    """Ranks by their places, (pp, dp, cp, tp), in whatever order the axes are laid out."""
    ranks = np.arange(plan.world).reshape([getattr(plan, axis) for axis in order])
    return ranks.transpose([order.index(axis) for axis in ("pp", "dp", "cp", "tp")])


def expert_array(plan: PlanSpec) -> np.ndarray:
    """Ranks by their places as experts fold them, (pp, edp, ep, etp)."""
    return np.arange(plan.world).reshape(plan.pp, -1, plan.ep, plan.expert_tp or plan.tp)


def lines(ranks: np.ndarray, *along: int) -> list[list[int]]:
    """Groups of the ranks whose places differ along some dims of an array alone, by their first ranks."""
    others = [dim for dim in range(ranks.ndim) if dim not in along]
    length = int(np.prod([ranks.shape[dim] for dim in along]))
    return by_first(ranks.transpose([*others, *along]).reshape(-1, length).tolist())


def by_first(groups: list[list[int]]) -> list[list[int]]:
    """Groups in the order of their first ranks, each in the order of its ranks."""
    return sorted(map(sorted, groups))
