"""The mesh as an array, laid out and cut by numpy alone: what the table of groups is compared with."""

import numpy as np

from shardwright.config.plan import PlanSpec


def stage_array(plan: PlanSpec) -> np.ndarray:
    """Ranks by their places, (pp, place in the stage): blocks of neighbours, with those of the other stages between."""
    axes, size = plan.order.split("-"), plan.dp * plan.cp * plan.tp
    etp = plan.expert_tp or plan.tp
    dense = {"tp": plan.tp, "cp": plan.cp, "dp": plan.dp}
    experts = {"tp": etp, "ep": plan.ep}
    inside = axes[: axes.index("pp")]
    near = axes[: min(axes.index("pp"), axes.index("dp"))]
    sizes = [int(np.prod([fold.get(axis, 1) for axis in part])) for fold, part in ((dense, inside), (experts, near))]
    block = max(sizes)
    if set(dense) <= set(inside):
        block = size
    return np.arange(plan.world).reshape(size // block, plan.pp, block).transpose(1, 0, 2).reshape(plan.pp, size)


def _laid(plan: PlanSpec, sizes: dict[str, int], shown: tuple[str, ...]) -> np.ndarray:
    slowest_first = [axis for axis in reversed(plan.order.split("-")) if axis in sizes]
    ranks = stage_array(plan).reshape(plan.pp, *(sizes[axis] for axis in slowest_first))
    return ranks.transpose(0, *(1 + slowest_first.index(axis) for axis in shown))


def mesh_array(plan: PlanSpec) -> np.ndarray:
    """Ranks by their places, (pp, dp, cp, tp), in whatever order the axes are laid out."""
    return _laid(plan, {"dp": plan.dp, "cp": plan.cp, "tp": plan.tp}, ("dp", "cp", "tp"))


def expert_array(plan: PlanSpec) -> np.ndarray:
    """Ranks by their places as experts fold them, (pp, edp, ep, etp)."""
    etp = plan.expert_tp or plan.tp
    edp = plan.dp * plan.cp * plan.tp // (plan.ep * etp)
    return _laid(plan, {"dp": edp, "ep": plan.ep, "tp": etp}, ("dp", "ep", "tp"))


def lines(ranks: np.ndarray, *along: int) -> list[list[int]]:
    """Groups of the ranks whose places differ along some dims of an array alone, by their first ranks."""
    others = [dim for dim in range(ranks.ndim) if dim not in along]
    length = int(np.prod([ranks.shape[dim] for dim in along]))
    return by_first(ranks.transpose([*others, *along]).reshape(-1, length).tolist())


def by_first(groups: list[list[int]]) -> list[list[int]]:
    """Groups in the order of their first ranks, each in the order of its ranks."""
    return sorted(map(sorted, groups))
