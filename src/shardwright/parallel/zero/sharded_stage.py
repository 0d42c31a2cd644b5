"""ZeRO: replicas share their optimizer state, gradients and parameters. Rajbhandari et al. 2020 (arXiv 1910.02054).

One engine for all stages of it. What is held whole and what in shards is told in flat_unit.py; here is when things
move. Gradients are reduced while the backward still runs (Li et al. 2020, arXiv 2006.15704, section 3.2), unit after
unit in the order in which they become complete. Nothing is reduced while microbatches accumulate.

In stage 3 the values of a unit are gathered before they are used and let go after. Without a pipeline that goes layer
by layer, forward and backward, the next one's on its way while one computes (Zhao et al. 2023, arXiv 2304.11277,
section 3.3). In a pipeline the program gathers and releases whole stages, and the layers find theirs there.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwright.parallel.compress.compressor import Compressor
from shardwright.parallel.tensor.parameter import Initial, PlacedParameter
from shardwright.parallel.zero.buffers import BufferPool
from shardwright.parallel.zero.flat_unit import Sharding, Unit
from shardwright.parallel.zero.master_weights import MakeOptimizer
from shardwright.sharding.buckets import MOST_REDUCING, bucket_elements, unit_groups
from shardwright.sharding.parameter_shard import Place


class ShardedStage:
    """The parameters, gradients and optimizer state of one stage of the model.

    In a step: `zero`, backwards, each with `arm` before it if its gradients are then to be reduced and `reduce` after
    it, `wait`, `reduce_late`, and `update`.
    """

    def __init__(
        self,
        regions: Mapping[str, Sequence[PlacedParameter]],
        late: Sequence[PlacedParameter],
        sharding: Sharding,
        pool: BufferPool,
        bucket_mib: float,
        initial: Initial,
        make_compressor: Callable[[], Compressor] | None = None,
        expert_sharding: Sharding | None = None,
    ) -> None:
        """`regions` are what is computed one after the other, by name, with the parameters of each.

        `late` are those whose gradient is complete only when another stage's is. Experts' parameters are shared as
        `expert_sharding` says.
        """
        self._armed = False
        self._next = 0
        self._region_order = list(regions)
        self._reducing: deque[Unit] = deque()
        self._unit_of: dict[PlacedParameter, Unit] = {}

        def sharding_of(place: Place) -> Sharding:
            return expert_sharding if place.is_expert and expert_sharding is not None else sharding

        most = bucket_elements(bucket_mib, sharding.compute.itemsize)
        groups = unit_groups(regions, late, lambda p: sharding_of(p).zero == 3, most, lambda p: p.place)
        self.units = [Unit(group, sharding_of(group[0].place), pool, initial, make_compressor) for group in groups]
        self._late = [unit for unit in self.units if not set(late).isdisjoint(unit.parameters)]
        self._prompt = [unit for unit in reversed(self.units) if unit not in self._late]
        self._due = self._prompt  # those of the next reduction
        for unit in self.units:
            for parameter in unit.parameters:
                self._unit_of[parameter] = unit
                parameter.home = self
        self._units_in: dict[str, list[Unit]] = {
            name: list(dict.fromkeys(self._unit_of[p] for p in parameters)) for name, parameters in regions.items()
        }

    def unit_of(self, parameter: PlacedParameter) -> Unit:
        """The unit that a parameter lies in."""
        return self._unit_of[parameter]

    def holds(self, parameter: PlacedParameter) -> bool:
        """Whether a parameter has a place of its own here."""
        return parameter in self._unit_of

    def also_uses(self, region: str, unit: Unit) -> None:
        """A region needs the values of one more unit, which may be another stage's."""
        self._units_in[region].append(unit)

    # Gradients.

    def open(self, parameter: PlacedParameter) -> None:
        """Give a parameter's gradient its memory."""
        self._unit_of[parameter].open()

    def arrived(self, parameter: PlacedParameter) -> None:
        """A gradient was added to. If it was the last of its unit, the unit is reduced."""
        if not self._armed:
            return
        self._unit_of[parameter].missing -= 1
        # Always in the order of the list: replicas must issue the same reductions in the same order.
        while self._next < len(self._due) and self._due[self._next].missing <= 0:
            self._start_next()

    def _start_next(self) -> None:
        unit = self._due[self._next]
        self._next += 1
        while len(self._reducing) >= MOST_REDUCING:
            self._reducing.popleft().finish_reduce()
        unit.start_reduce()
        self._reducing.append(unit)

    def zero(self) -> None:
        """Begin a step."""
        for unit in self.units:
            unit.zero()

    def arm(self, is_last: bool) -> None:
        """The next backward is the last before a reduction: reduce each unit as soon as it is complete.

        Units that hold their gradients whole wait for the last reduction of the step.
        """
        self._due = [unit for unit in self._prompt if is_last or unit.sharding.zero >= 2]
        self._armed = any(unit.sharding.shards.size > 1 or unit.sharding.copies.size > 1 for unit in self.units)
        self._next = 0
        for unit in self.units:
            unit.missing = len(unit.parameters)

    def reduce(self) -> None:
        """Start what has not been started: units with a parameter that got no gradient."""
        self._armed = False
        while self._next < len(self._due):
            self._start_next()

    def wait(self) -> None:
        """Block until all sums are there, but those of late units."""
        while self._reducing:
            self._reducing.popleft().finish_reduce()
        self._next = 0

    def reduce_late(self) -> None:
        """Reduce, and wait for, the units whose gradients the caller has just completed."""
        for unit in self._late:
            unit.start_reduce()
        for unit in self._late:
            unit.finish_reduce()

    # Update.

    def make_optimizers(self, make: MakeOptimizer) -> None:
        """Give each unit an optimizer of its own."""
        for unit in self.units:
            unit.masters.make_optimizer(make)

    def update(self, factor: float, rate: float) -> None:
        """Step with the summed gradients times `factor`; the update of one unit hides the gather of the one before."""
        for unit in self.units:
            unit.update(factor, rate)
        for unit in self.units:
            if unit.sharding.zero < 3:
                unit.finish_gather()

    # Values.

    def gather(self) -> None:
        """Begin to gather all values, and keep them until `release`."""
        for unit in self._all_units():
            unit.holds += 1
            unit.start_gather()

    def finish_gather(self) -> None:
        """Wait for what `gather` began."""
        for unit in self._all_units():
            unit.finish_gather()

    def release(self) -> None:
        """Let the values go that `gather` asked for."""
        for unit in self._all_units():
            unit.holds -= 1
            unit.release()

    def _all_units(self) -> list[Unit]:
        return list(dict.fromkeys(unit for units in self._units_in.values() for unit in units))

    def through(self, region: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Compute one region, with its values there when they are needed: now, and in the backward."""
        if all(unit.sharding.zero < 3 for unit in self._units_in[region]):
            return function(x)
        self._enter(region, self._after(region))
        trains = torch.is_grad_enabled()
        if trains and x.requires_grad:
            x = _OnTheWayBack.apply(x, partial(self.leave, region))
        y = function(x)
        if trains and x.requires_grad:
            y = _OnTheWayBack.apply(y, partial(self.enter_backward, region))
        # The last region's backward comes next; that of an embedding needs no values, nor would it let them go.
        if not (trains and x.requires_grad and region == self._region_order[-1]):
            self.leave(region)
        return y

    def enter_backward(self, region: str) -> None:
        """The backward of a region begins: have its values, and begin to gather those of the one before."""
        self._enter(region, self._before(region))

    def _enter(self, region: str, following: str | None) -> None:
        units = self._units_in[region]
        for unit in units:
            unit.start_gather()
        for unit in units:
            unit.finish_gather()
        for unit in self._units_in[following] if following is not None else ():
            unit.start_gather()

    def leave(self, region: str) -> None:
        """Let a region's values go, unless the program holds them."""
        for unit in self._units_in[region]:
            unit.release()

    def _after(self, region: str) -> str | None:
        index = self._region_order.index(region) + 1
        return self._region_order[index] if index < len(self._region_order) else None

    def _before(self, region: str) -> str | None:
        index = self._region_order.index(region)
        # The first region of the model looks tokens up, and its backward needs the tokens and not the table.
        return self._region_order[index - 1] if index > 0 and self._region_order[index - 1] != "embedding" else None


class _OnTheWayBack(torch.autograd.Function):
    """Forward: nothing. Backward: `then` is called when the gradient passes here, and may gather or let go."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Callable[[], None]) -> Tensor:
        ctx.then = then
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.then()
        return grads[0], None
