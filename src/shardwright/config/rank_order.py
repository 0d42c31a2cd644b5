"""The order of the mesh axes over the ranks: whose ranks are neighbours, and whose lie farthest apart.

An order names axes from the innermost to the outermost, as Megatron-LM's --order does: tp-cp-ep-dp-pp. Two things
follow from it:

- The places of the ranks of a stage, 0 to dp x cp x tp - 1: cp, dp and tp are laid over them in this order, and for
  experts ep, what is left of dp (edp) and expert_tp (etp, in the place of tp).
- Where the pipeline comes in: `block` neighbouring ranks are of one stage, those of all axes inside pp, and so many of
  the next stage follow. Where ep is inside pp and dp too, a block has all ranks of an ep line.

So the rank at place s of stage p is (s // block x pp + p) x block + s % block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from math import prod
from typing import Any, Protocol

from shardwright.config.base import shortened

Count = Any  # an int; or an array with one entry a plan, where many plans are described at once

AXES = ("tp", "cp", "ep", "dp", "pp")  # innermost first
_REPLICAS = ("cp", "ep", "dp")
_FOLDED = {"tp": "etp", "ep": "ep", "dp": "edp"}  # what stands in their places for experts
EXAMPLE = "-".join(AXES)


class Degrees(Protocol):
    """Numbers of a plan that say who is with whom: of a PlanSpec, or of many plans in arrays (workload/query.py).

    `orders` are those of the plans, as places in ORDERS, each with 1 for the plans that have it and 0 for the others.
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
    """An order by all its axes, innermost first."""

    axes: tuple[str, ...]

    def __str__(self) -> str:
        return "-".join(self.axes)

    @cached_property
    def stage(self) -> tuple[str, ...]:
        """The axes of a stage."""
        return tuple(axis for axis in self.axes if axis in ("tp", "cp", "dp"))

    @cached_property
    def experts(self) -> tuple[str, ...]:
        """The axes of a stage as experts fold its ranks."""
        return tuple(_FOLDED[axis] for axis in self.axes if axis in _FOLDED)

    @cached_property
    def inside(self) -> tuple[str, ...] | None:
        """The axes inside pp; None where those of a stage all are, so that its ranks are neighbours."""
        inside = self.axes[: self.axes.index("pp")]
        return None if set(self.stage) <= set(inside) else inside

    @cached_property
    def keeps_layers_near(self) -> bool:
        """True if those that exchange something in every layer lie as near as if there were nobody else."""
        return {"dp", "pp"}.isdisjoint(self.axes[:3])


def _separated(axes: tuple[str, ...]) -> tuple[str, str] | None:
    """The axes inside and outside of tp among cp, ep and dp, if both exist; None if an order is legal."""
    at = axes.index("tp")
    inside, outside = ([axis for axis in part if axis in _REPLICAS] for part in (axes[:at], axes[at:]))
    return (", ".join(inside), ", ".join(outside)) if inside and outside else None


# All that are legal; the first is the default.
ORDERS = tuple(RankOrder(axes) for axes in permutations(AXES) if not _separated(axes))
_NUMBERS = {str(order): number for number, order in enumerate(ORDERS)}
# Stages of a pipeline nearer to each other than replicas: inside a node, if they have room there.
STAGES_INSIDE = "tp-cp-ep-pp-dp"


def number_of(order: str) -> int:
    """The place of an order in ORDERS."""
    return _NUMBERS[order]


def order_words(degrees: Degrees) -> str:
    """The order of the axes with more than one rank, of one plan: "pp-dp"."""
    ((number, _),) = degrees.orders
    return "-".join(axis for axis in ORDERS[number].axes if getattr(degrees, axis) > 1)


def full_order(text: str) -> str:
    """An order by all its axes. Of those left out tp, cp and ep are innermost, in this order, and dp and pp outermost.

    ValueError with what is wrong with it, and a way out.
    """
    named = text.split("-")
    wrong = [name for name in dict.fromkeys(named) if name not in AXES]
    if wrong or len(set(named)) < len(named):
        twice = [] if wrong else [name for name in AXES if named.count(name) > 1]
        what = f"{shortened(wrong[0])!r} is none" if wrong else f"{' and '.join(twice)} more than once"
        raise ValueError(f'it should be axes of the mesh with "-" between, each once, and {what}; such as "{EXAMPLE}"')
    left = [axis for axis in AXES if axis not in named]
    of_stage = [axis for axis in named if axis != "pp"]
    at = named.index("tp") + 1 if of_stage[:1] == ["tp"] else 0
    near, far = ([axis for axis in left if (axis in ("dp", "pp")) == is_far] for is_far in (False, True))
    axes = (*named[:at], *near, *named[at:], *far)
    if separated := _separated(axes):
        inside, outside = separated
        legal = "-".join(("tp", *(axis for axis in axes if axis != "tp")))
        raise ValueError(
            f"tp lies outside of {inside} and inside of {outside}, and these are laid over the ranks of a stage as one "
            f"line: replicas (dp x cp) sum gradients along it, and experts fold it; put tp inside of all three or "
            f'outside, such as "{legal}"'
        )
    return "-".join(axes)


def by_order(degrees: Degrees, key: Callable[[RankOrder], Any], formula: Callable[[Any], Count]) -> Count:
    """The results of a function for the orders of plans, from the `key` of each."""
    numbers = degrees.orders
    if len(numbers) == 1:
        return formula(key(ORDERS[numbers[0][0]]))
    keys: dict[Any, Count] = {}
    for number, has_it in numbers:
        value = key(ORDERS[number])
        keys[value] = keys.get(value, 0) + has_it
    if len(keys) == 1:
        return formula(next(iter(keys)))
    return sum(has_it * formula(value) for value, has_it in keys.items())


def stage_size(degrees: Degrees) -> Count:
    """Ranks that share the work of one stage."""
    return degrees.dp * degrees.cp * degrees.tp


def stage_block(degrees: Degrees) -> Count:
    """How many neighbouring ranks are of one stage, before those of the next."""
    return by_order(degrees, lambda order: order.inside, lambda inside: _block(degrees, inside))


def _block(degrees: Degrees, inside: tuple[str, ...] | None) -> Count:
    if inside is None:
        return degrees.stage_ranks
    dense, experts = inside_pipeline(degrees, inside)
    block = dense + (experts > dense) * (experts - dense)
    return block + (degrees.pp == 1) * (degrees.stage_ranks - block)


def inside_pipeline(degrees: Degrees, inside: tuple[str, ...]) -> tuple[Count, Count]:
    """(ranks of the axes inside pp, ranks of those of experts inside pp and dp); one must divide the other."""
    sizes = {"tp": degrees.expert_tp_size, "ep": degrees.ep}
    of_experts = inside[: inside.index("dp")] if "dp" in inside else inside
    dense = prod(getattr(degrees, axis) for axis in inside if axis != "ep")
    return dense, prod(sizes[axis] for axis in of_experts if axis in sizes)


def of_stage_on_node(degrees: Degrees, ranks_per_node: int) -> Count:
    """Ranks of one stage on each node of so many neighbouring ranks, which lie behind each other in the stage; 0 where
    nodes cut blocks, or what the blocks of a pipeline take, unevenly. Where a stage's ranks are neighbours, all."""
    block = degrees.block
    pipeline = block * degrees.pp
    is_whole, is_in_block = block == degrees.stage_ranks, block % ranks_per_node == 0
    is_of_blocks = (ranks_per_node % block == 0) & (pipeline % ranks_per_node == 0)
    is_of_pipelines = ranks_per_node % pipeline == 0
    on_node = is_in_block * ranks_per_node
    on_node = on_node + (on_node == 0) * is_of_blocks * block
    on_node = on_node + (on_node == 0) * is_of_pipelines * (ranks_per_node // pipeline) * block
    return is_whole * ranks_per_node + (1 - is_whole) * on_node
