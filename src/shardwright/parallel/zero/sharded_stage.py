"""The parameters of one stage in flat units, as the events of ZeRO move them (sharding/zero_events.py).

What the program says of a whole stage, and a backward of each gradient, becomes events of units. Where values are
gathered layer by layer, each region has them when its forward and its backward begin, for autograd passes by here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shardwright.parallel.compress.choose import MakeCompressor
from shardwright.parallel.tensor.initial_values import Initial
from shardwright.parallel.tensor.parameter import PlacedParameter
from shardwright.parallel.zero.flat_unit import FlatUnit, Sharding
from shardwright.parallel.zero.master_weights import MakeOptimizer, MatrixSteps
from shardwright.parallel.zero.tensor_pool import TensorPool
from shardwright.sharding.buckets import bucket_elements, unit_groups
from shardwright.sharding.buffer_pool import Loan
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.sharding.unit_update import OF_ADAMW, UnitUpdate, Updates
from shardwright.sharding.zero_events import Reductions, StageEvents

# Makes the steps of an update, on the ranks that share a unit.
StepsOf = Callable[[UnitUpdate | None, FlatUnit], MatrixSteps | None]


class ShardedStage(StageEvents[FlatUnit]):
    """The parameters, gradients and optimizer state of one stage of the model."""

    unit_type = FlatUnit  # what it makes its units of

    def __init__(
        self,
        regions: Mapping[str, Sequence[PlacedParameter]],
        late: Sequence[PlacedParameter],
        sharding: Sharding,
        pool: TensorPool,
        bucket_mib: float,
        initial: Initial,
        reductions: Reductions,
        make_compressor: MakeCompressor | None = None,
        expert_sharding: Sharding | None = None,
        updates: Updates = OF_ADAMW,
    ) -> None:
        """`regions` are what is computed one after the other, by name, with the parameters of each.

        `late` are those whose gradient is complete only when another stage's is, `reductions` those under way on the
        rank. Experts' parameters are shared as `expert_sharding` says, and `updates` say which are updated alike.
        """

        def sharding_of(place: ParameterShard) -> Sharding:
            shared = expert_sharding if place.is_expert and expert_sharding is not None else sharding
            return replace(shared, compute=torch.float32) if place.is_exact else shared

        most = bucket_elements(bucket_mib, sharding.compute.itemsize)
        groups = unit_groups(
            regions, late, lambda p: sharding_of(p).zero == 3, most, place_of=lambda p: p.place,
            is_by_matrix=updates.is_by_matrix,
        )  # fmt: skip
        units = [
            self.unit_type(
                group, sharding_of(group[0].place), pool, initial, make_compressor=make_compressor, updates=updates
            )
            for group in groups
        ]
        self._updates = updates.groups([([p.place for p in unit.parameters], unit.layout) for unit in units])
        self._steps: list[MatrixSteps | None] = []
        self._unit_of = {parameter: unit for unit in units for parameter in unit.parameters}
        for parameter in self._unit_of:
            parameter.home = self
        super().__init__(
            units,
            late={self._unit_of[parameter] for parameter in late},
            units_in={name: list(dict.fromkeys(self._unit_of[p] for p in held)) for name, held in regions.items()},
            is_shared=any(axis.size > 1 for unit in units for axis in (unit.sharding.shards, unit.sharding.copies)),
            reductions=reductions,
            groups=[(group.units, group.scratch_bytes) for group in self._updates],
        )
        in_turn = [units[number] for group in self._updates for number in group.units]
        for unit, following in pairwise(in_turn):
            unit.updated_next = following

    def unit_of(self, parameter: PlacedParameter) -> FlatUnit:
        """The unit that a parameter lies in."""
        return self._unit_of[parameter]

    def holds(self, parameter: PlacedParameter) -> bool:
        """True if a parameter has a place of its own here."""
        return parameter in self._unit_of

    def open(self, parameter: PlacedParameter) -> None:
        """Give a parameter's gradient its memory."""
        self._unit_of[parameter].open()

    def arrived(self, parameter: PlacedParameter) -> None:
        """A parameter's gradient was added to."""
        self.gradient_arrived(self._unit_of[parameter])

    def make_optimizers(self, make: MakeOptimizer, steps_of: StepsOf = lambda update, unit: None) -> None:
        """Give each unit an optimizer of its own, and where updates look at whole matrices `steps_of` them."""
        self._steps = [steps_of(group.update, self.units[group.units[0]]) for group in self._updates]
        for group, steps in zip(self._updates, self._steps, strict=True):
            for unit in (self.units[number] for number in group.units):
                unit.masters.make_optimizer(make, unit.by_matrix, steps)

    def _make_steps(self, number: int, scratch: Loan[Tensor]) -> None:
        steps = self._steps[number]
        assert steps is not None
        steps([self.units[n].masters for n in self._updates[number].units], scratch.memory)

    def through(self, region: str, function: Callable[..., Tensor], *x: Tensor) -> Tensor:
        """Compute one region, with its values there when they are needed: now, and in the backward."""
        if not self.is_gathered(region):
            return function(*x)
        self.begin_forward(region)
        has_backward = torch.is_grad_enabled() and x[0].requires_grad
        if has_backward:
            x = _OnTheWayBack.apply(partial(self.end_backward, region), *x)
        y = function(*x)
        if has_backward:
            (y,) = _OnTheWayBack.apply(partial(self.begin_backward, region), y)
        self.end_forward(region, has_backward)
        return y


class _OnTheWayBack(torch.autograd.Function):
    """Forward: nothing. Backward: `then` is called when all gradients pass here, and may gather or let go."""

    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], *x: Tensor) -> tuple[Tensor, ...]:
        ctx.then = then
        return tuple(of.view_as(of) for of in x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.then()
        return None, *grads
