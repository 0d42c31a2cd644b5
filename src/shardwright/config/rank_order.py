"""The order of the mesh axes over the ranks: the axes with neighbouring ranks, and the axes with distant ranks.

An order names axes from the innermost to the outermost, as Megatron-LM's --order does: tp-cp-ep-dp-pp. It determines:

- The places of the ranks of a stage, 0 to dp x cp x tp - 1: cp, dp and tp are laid over them in this order; for
  experts ep, the remainder of dp (edp) and expert_tp (etp, in the place of tp).
- The place of the pipeline: `block` neighbouring ranks, those of all axes inside pp, are of one stage, and as many of
  the next stage follow. If ep is inside pp and dp, a block has all ranks of an ep line.

So the rank at place s of stage p is (s // block x pp + p) x block + s % block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from math import prod
from typing import Any, Protocol

from shardwright.config.base import shortened
from shardwright.config.phrase import both, say

Count = Any  # an int, or an array with one entry per plan if many plans are described at once

AXES = ("tp", "cp", "ep", "dp", "pp")  # innermost first
_REPLICAS = ("cp", "ep", "dp")
_FOLDED = {"tp": "etp", "ep": "ep", "dp": "edp"}  # the axes of experts in the places of these axes
DEFAULT_ORDER = "-".join(AXES)


class Degrees(Protocol):
    """The numbers of a plan that determine its groups of ranks: a PlanSpec, or arrays for many plans
    (layers/query.py).

    `orders` are the orders of the plans, as (index in ORDERS, 1 for the plans that have it and 0 for the others).
    """

    @property
    def pp(self) -> Count: ...
    @property
    def dp(self) -> Count: ...
    @property
    def cp(self) -> Count: ...
    @property
    def tp(self) -> Count: ...
    @property
    def ep(self) -> Count: ...
    @property
    def expert_tp_size(self) -> Count: ...
    @property
    def zero(self) -> Count: ...
    @property
    def zero_ranks(self) -> Count: ...
    @property
    def num_copies(self) -> Count: ...
    @property
    def stage_ranks(self) -> Count: ...
    @property
    def block(self) -> Count: ...
    @property
    def orders(self) -> tuple[tuple[int, Count], ...]: ...


@dataclass(frozen=True)
class RankOrder:
    """An order of all axes, innermost first."""

    axes: tuple[str, ...]

    def __str__(self) -> str:
        return "-".join(self.axes)

    @cached_property
    def stage(self) -> tuple[str, ...]:
        """The axes of a stage."""
        return tuple(axis for axis in self.axes if axis in ("tp", "cp", "dp"))

    @cached_property
    def experts(self) -> tuple[str, ...]:
        """The axes over which experts lay the ranks of a stage."""
        return tuple(_FOLDED[axis] for axis in self.axes if axis in _FOLDED)

    @cached_property
    def inside(self) -> tuple[str, ...] | None:
        """The axes inside pp; None if all axes of a stage are inside, so that its ranks are neighbours."""
        inside = self.axes[: self.axes.index("pp")]
        return None if set(self.stage) <= set(inside) else inside

    @cached_property
    def keeps_layers_near(self) -> bool:
        """True if tp, cp and ep are the innermost axes, so that ranks that communicate in every layer are as near as
        possible."""
        return {"dp", "pp"}.isdisjoint(self.axes[:3])


def _separated(axes: tuple[str, ...]) -> tuple[str, str] | None:
    """The axes among cp, ep and dp inside and outside of tp, if both exist; None if an order is legal."""
    tp_index = axes.index("tp")
    inside, outside = ([axis for axis in part if axis in _REPLICAS] for part in (axes[:tp_index], axes[tp_index:]))
    return (", ".join(inside), ", ".join(outside)) if inside and outside else None


# All legal orders; the first is the default.
ORDERS = tuple(RankOrder(axes) for axes in permutations(AXES) if not _separated(axes))
_NUMBERS = {str(order): number for number, order in enumerate(ORDERS)}
# The order that puts stages of a pipeline nearer to each other than replicas: inside a node, if a node has room.
STAGES_INSIDE = "tp-cp-ep-pp-dp"


def number_of(order: str) -> int:
    """The index of an order in ORDERS."""
    return _NUMBERS[order]


def order_words(degrees: Degrees) -> str:
    """The order of the axes with more than one rank, for a single plan: "pp-dp"."""
    ((number, _),) = degrees.orders
    return "-".join(axis for axis in ORDERS[number].axes if getattr(degrees, axis) > 1)


def full_order(text: str) -> str:
    """Complete an order to all axes. Missing tp, cp and ep become innermost, in this order, and missing dp and pp
    outermost.

    ValueError with the fault and a way out.
    """
    names = text.split("-")
    wrong = [name for name in dict.fromkeys(names) if name not in AXES]
    if wrong or len(set(names)) < len(names):
        twice = [] if wrong else [name for name in AXES if names.count(name) > 1]
        fault = (
            say("{name} is none", name=repr(shortened(wrong[0])))
            if wrong
            else say("{axes} more than once", axes=both(twice))
        )
        raise ValueError(
            say(
                'it should be axes of the mesh with "-" between, each once, and {fault}; such as "{default}"',
                fault=fault,
                default=DEFAULT_ORDER,
            )
        )
    missing = [axis for axis in AXES if axis not in names]
    stage_axes = [axis for axis in names if axis != "pp"]
    first = names.index("tp") + 1 if stage_axes[:1] == ["tp"] else 0
    near, far = ([axis for axis in missing if (axis in ("dp", "pp")) == is_far] for is_far in (False, True))
    axes = (*names[:first], *near, *names[first:], *far)
    if separated := _separated(axes):
        inside, outside = separated
        legal = "-".join(("tp", *(axis for axis in axes if axis != "tp")))
        raise ValueError(
            say(
                "tp lies outside of {inside} and inside of {outside}, and these are laid over the ranks of a stage "
                "as one line: replicas (dp x cp) sum gradients along it, and experts fold it; put tp inside of all "
                'three or outside, such as "{legal}"',
                inside=inside,
                outside=outside,
                legal=legal,
            )
        )
    return "-".join(axes)


def by_order(degrees: Degrees, key: Callable[[RankOrder], Any], formula: Callable[[Any], Count]) -> Count:
    """The result of `formula` for each plan, from the `key` of its order."""
    numbers = degrees.orders
    if len(numbers) == 1:
        return formula(key(ORDERS[numbers[0][0]]))
    keys: dict[Any, Count] = {}
    for number, has_order in numbers:
        value = key(ORDERS[number])
        keys[value] = keys.get(value, 0) + has_order
    if len(keys) == 1:
        return formula(next(iter(keys)))
    return sum(has_key * formula(value) for value, has_key in keys.items())


def stage_size(degrees: Degrees) -> Count:
    """Number of ranks that share the work of one stage."""
    return degrees.dp * degrees.cp * degrees.tp


def stage_block(degrees: Degrees) -> Count:
    """Number of neighbouring ranks of one stage, before the ranks of the next stage."""
    return by_order(degrees, lambda order: order.inside, lambda inside: _block(degrees, inside))


def _block(degrees: Degrees, inside: tuple[str, ...] | None) -> Count:
    if inside is None:
        return degrees.stage_ranks
    dense, experts = inside_pipeline(degrees, inside)
    block = dense + (experts > dense) * (experts - dense)
    return block + (degrees.pp == 1) * (degrees.stage_ranks - block)


def inside_pipeline(degrees: Degrees, inside: tuple[str, ...]) -> tuple[Count, Count]:
    """(ranks of the axes inside pp, ranks of the experts' axes inside pp and dp); one must divide the other."""
    sizes = {"tp": degrees.expert_tp_size, "ep": degrees.ep}
    expert_axes = inside[: inside.index("dp")] if "dp" in inside else inside
    dense = prod(getattr(degrees, axis) for axis in inside if axis != "ep")
    return dense, prod(sizes[axis] for axis in expert_axes if axis in sizes)


def of_stage_on_node(degrees: Degrees, ranks_per_node: int) -> Count:
    """Number of ranks of one stage on each node of `ranks_per_node` neighbouring ranks; they are consecutive in the
    stage. 0 if nodes cut blocks, or the ranks of a pipeline, unevenly. `ranks_per_node` if a stage's ranks are
    neighbours."""
    block = degrees.block
    pipeline = block * degrees.pp
    is_whole, is_in_block = block == degrees.stage_ranks, block % ranks_per_node == 0
    is_of_blocks = (ranks_per_node % block == 0) & (pipeline % ranks_per_node == 0)
    is_of_pipelines = ranks_per_node % pipeline == 0
    on_node = is_in_block * ranks_per_node
    on_node = on_node + (on_node == 0) * is_of_blocks * block
    on_node = on_node + (on_node == 0) * is_of_pipelines * (ranks_per_node // pipeline) * block
    return is_whole * ranks_per_node + (1 - is_whole) * on_node
