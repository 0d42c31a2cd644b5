"""The parameters of one stage in flat units, which the events of ZeRO move (sharding/zero_events.py).

The program's actions on a whole stage, and the gradients that arrive in a backward, become events of units. If values
are gathered layer by layer, each region has its values when its forward and its backward begin, by autograd hooks.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shardwright.parallel.tensor.parameter import PlacedParameter
from shardwright.parallel.zero.flat_unit import FlatUnit
from shardwright.parallel.zero.master_weights import MatrixSteps
from shardwright.parallel.zero.unit_setting import StageSharding, UnitSetting
from shardwright.sharding.buckets import bucket_elements, unit_groups
from shardwright.sharding.buffer_pool import Loan
from shardwright.sharding.unit_update import UnitUpdate
from shardwright.sharding.zero_events import StageEvents

# Makes the matrix steps of an update, on the ranks that share a unit.
StepsOf = Callable[[UnitUpdate | None, FlatUnit], MatrixSteps | None]


class ShardedStage(StageEvents[FlatUnit]):
    """The parameters, gradients and optimizer state of one stage of the model."""

    unit_type = FlatUnit  # the class of its units

    def __init__(
        self,
        regions: Mapping[str, Sequence[PlacedParameter]],
        late: Sequence[PlacedParameter],
        sharding: StageSharding,
        setting: UnitSetting,
    ) -> None:
        """`regions` are computed one after the other; they are the parameters of each, by the region's name. `late` are
        the parameters whose gradient is complete only when another stage's is."""
        self._setting, updates = setting, setting.updates
        groups = unit_groups(
            regions,
            late,
            lambda p: sharding.of_parameter(p).zero == 3,
            bucket_elements(setting.job.plan.bucket_mib, sharding.dense.compute.itemsize),
            place_of=lambda p: p.place,
            is_by_matrix=updates.is_by_matrix,
        )
        units = [self.unit_type(group, sharding.of_parameter(group[0].place), setting) for group in groups]
        self._updates = updates.groups([([p.place for p in unit.parameters], unit.layout) for unit in units])
        self._steps: list[MatrixSteps | None] = []
        self._unit_of = {parameter: unit for unit in units for parameter in unit.parameters}
        for parameter in self._unit_of:
            parameter.home = self
        super().__init__(
            units,
            late={self._unit_of[parameter] for parameter in late},
            units_in={
                name: list(dict.fromkeys(self._unit_of[p] for p in parameters)) for name, parameters in regions.items()
            },
            is_shared=any(axis.size > 1 for unit in units for axis in (unit.sharding.shards, unit.sharding.copies)),
            reductions=setting.reductions,
            groups=[(group.units, group.scratch_bytes) for group in self._updates],
        )
        update_order = [units[number] for group in self._updates for number in group.units]
        for unit, following in pairwise(update_order):
            unit.updated_next = following

    def unit_of(self, parameter: PlacedParameter) -> FlatUnit:
        """The unit that a parameter lies in."""
        return self._unit_of[parameter]

    def holds(self, parameter: PlacedParameter) -> bool:
        """True if a parameter lies in one of this stage's units."""
        return parameter in self._unit_of

    def open(self, parameter: PlacedParameter) -> None:
        """Give a parameter's gradient its memory."""
        self._unit_of[parameter].open()

    def arrived(self, parameter: PlacedParameter) -> None:
        """Handle an addition to a parameter's gradient."""
        self.gradient_arrived(self._unit_of[parameter])

    def make_optimizers(self, steps_of: StepsOf = lambda update, unit: None) -> None:
        """Give each unit an optimizer of its own, and the `steps_of` its update if that needs whole matrices."""
        self._steps = [steps_of(group.update, self.units[group.units[0]]) for group in self._updates]
        for group, steps in zip(self._updates, self._steps, strict=True):
            for unit in (self.units[number] for number in group.units):
                unit.masters.make_optimizer(self._setting.make_optimizer, unit.by_matrix, steps)

    def _make_steps(self, number: int, scratch: Loan[Tensor]) -> None:
        steps = self._steps[number]
        assert steps is not None
        steps([self.units[n].masters for n in self._updates[number].units], scratch.memory)

    def through(self, region: str, function: Callable[..., Tensor], *x: Tensor) -> Tensor:
        """Compute one region, whose values are gathered when they are needed: now, and in the backward."""
        if not self.is_gathered(region):
            return function(*x)
        self.begin_forward(region)
        has_backward = torch.is_grad_enabled() and x[0].requires_grad
        if has_backward:
            x = BackwardHook.apply(partial(self.end_backward, region), *x)
        y = function(*x)
        if has_backward:
            (y,) = BackwardHook.apply(partial(self.begin_backward, region), y)
        self.end_forward(region, has_backward)
        return y


class BackwardHook(torch.autograd.Function):
    """Forward: the identity. Backward: calls `then`, which may gather or release values, when all gradients have
    arrived. Outputs are not views for autograd, because a user's module may overwrite its input."""

    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], *x: Tensor) -> tuple[Tensor, ...]:
        ctx.then = then
        return tuple(tensor.detach() for tensor in x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.then()
        return None, *grads
