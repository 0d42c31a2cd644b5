"""A user's own module under ZeRO: its units by submodule, and the events of its forward and backward passes.

A unit is a submodule whose parameters are gathered before its forward and released after it, and likewise in the
backward. Parameters in no unit belong to the root, which is gathered from the beginning of a forward to its end, and in
the backward. Without sharded parameters nothing happens in a forward, and units are buckets.

The last gradient is not known beforehand, since some parameters may not be used in a pass. A backward begins when its
first gradient arrives, and ends when autograd says so. Then all units that are not reduced yet are reduced.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from shardwright.config.base import RunError
from shardwright.config.phrase import say
from shardwright.config.units import counted_phrase
from shardwright.parallel.tensor.parameter import PlacedParameter
from shardwright.parallel.zero.flat_unit import FlatUnit
from shardwright.parallel.zero.sharded_stage import BackwardHook, ShardedStage
from shardwright.parallel.zero.unit_setting import Sharding, UnitSetting
from shardwright.sharding.buffer_pool import OneBuffer

ROOT = ""  # the region of parameters in no other region


class ModuleUnit(FlatUnit):
    """The flat buffers of some parameters of a module. Its gathered values always lie in the same storage.

    Our own layers ask for a parameter's values again in the backward. Autograd does not: it may have saved a view of
    the storage that the weight had in the forward, such as the transposed weight. So the values are gathered into that
    storage again, which has memory only while they are gathered (Zhao et al. 2023, arXiv 2304.11277, section 4.1). A
    parameter whose values are not gathered shows NaN, so that a read from outside its own module is noticed.
    """

    def __init__(self, parameters: Sequence[PlacedParameter], sharding: Sharding, setting: UnitSetting) -> None:
        super().__init__(parameters, sharding, setting)
        device = parameters[0].device

        def make(num_bytes: int) -> Tensor:
            with torch.inference_mode(False):  # even if the first pass is one of inference, later ones are not
                return torch.empty(num_bytes, dtype=torch.uint8, device=device)

        def resize(memory: Tensor, num_bytes: int) -> None:
            memory.untyped_storage().resize_(num_bytes)

        self.borrow_values_from(OneBuffer(make, resize, counting=setting.pool))

    @property
    def are_values_here(self) -> bool:
        """True if the parameters are views of their values."""
        return self._full_values is not None

    def _show(self) -> None:
        if self._full_values is not None:
            super()._show()
            return
        with torch.inference_mode(False):
            not_a_number = torch.full((), math.nan, dtype=self.value_shard.dtype, device=self.parameters[0].device)
        for parameter in self.parameters:
            parameter.data = not_a_number.expand(parameter.shape)


class ModuleStage(ShardedStage):
    """The parameters, gradients and optimizer state of a module."""

    unit_type = ModuleUnit
    passes_of_step = 1  # backwards in one step

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_passes = 0
        self._is_in_pass = False
        self._is_going_back: set[str] = set()  # regions whose backward has begun and not ended
        self._num_calls: Counter[str] = Counter()  # by region: calls whose backward is still to come
        self._first_order: list[str] | None = []  # regions in the order of the first forward; None once it is over

    def begin(self) -> None:
        """Begin a step without gradients. Values that are left from a forward without a backward are released."""
        self._num_passes, self._is_in_pass = 0, False
        self._is_going_back.clear()
        self._num_calls.clear()
        self._release_all()
        self.clear_gradients()

    # The forward.

    def enter_forward(self, region: str) -> None:
        """Handle the begin of a module's forward."""
        if self._is_in_pass:  # it is recomputed in the backward
            self._enter(region, None)
            return
        if self._first_order is not None and region not in self._first_order:
            self._first_order.append(region)
        self.begin_forward(region)

    def expect_backward(self, region: str) -> None:
        """Note a call of a module, the end of whose backward will be reported."""
        if not self._is_in_pass:
            self._num_calls[region] += 1

    def leave_forward(self, region: str, has_backward: bool) -> None:
        """Handle the end of a module's forward."""
        if self._is_in_pass:
            if region not in self._is_going_back:
                self._leave(region)
        elif not (region == ROOT and has_backward):  # the root is needed again at once
            self.end_forward(region, has_backward)
        if region == ROOT and self._first_order is not None:
            self._regions = [*self._first_order, *(name for name in self._regions if name not in self._first_order)]
            self._prompt = list(dict.fromkeys(u for name in reversed(self._regions) for u in self._units_in[name]))
            self._first_order = None

    # The backward.

    def enter_backward(self, region: str, gradient: Tensor | None = None) -> None:
        """Handle the begin of a module's backward: the gradient of its output has arrived."""
        if region not in self._is_going_back:
            self._begin_pass()
            self._is_going_back.add(region)
            self.begin_backward(region)

    def leave_backward(self, region: str) -> None:
        """Handle the end of a module's backward: the gradients of its inputs have arrived. If no other call's backward
        is to come, those of its parameters are complete too."""
        self._is_going_back.discard(region)
        self.end_backward(region)
        self._num_calls[region] -= 1
        if not self._num_calls[region]:
            for unit in self._units_in[region]:
                self.unit_completed(unit)

    def open(self, parameter: PlacedParameter) -> None:
        self._begin_pass()
        unit = self.unit_of(parameter)
        assert isinstance(unit, ModuleUnit)
        if not unit.are_values_here:
            raise RunError(
                say(
                    "the gradient of {name} was computed when its values had been released: it is used outside of "
                    "the forward of the module that it belongs to; name a module around both in units=, or use "
                    "plan.zero = 2",
                    name=parameter.place.name,
                )
            )
        super().open(parameter)

    def arrived(self, parameter: PlacedParameter) -> None:
        """Handle an addition to a parameter's gradient.

        If values are gathered, ranks must begin gathers and reductions in one order, but ranks may use different
        parameters of a module: then a unit counts as complete when its module's backward is over, not here.
        """
        if self.unit_of(parameter).sizes.zero < 3:
            super().arrived(parameter)

    def _begin_pass(self) -> None:
        if self._is_in_pass:
            return
        self._num_passes += 1
        if self._num_passes > self.passes_of_step:
            raise RunError(
                say(
                    "this is backward {num_passes} since the last step, and a step is to have {passes_of_step}: call "
                    "step() before it, or give shard(..., accumulate=) as many as there are; checkpoints of "
                    "torch.utils with use_reentrant=True count as backwards, so use use_reentrant=False",
                    num_passes=self._num_passes,
                    passes_of_step=self.passes_of_step,
                )
            )
        self._is_in_pass = True
        Variable._execution_engine.queue_callback(self._end_pass)
        self.arm(is_last=self._num_passes == self.passes_of_step, is_split=False)

    def _end_pass(self) -> None:
        self._is_in_pass = False
        self.reduce()
        self._is_going_back.clear()
        self._num_calls.clear()
        self._release_all()

    def finish(self) -> None:
        """Wait until all sums of the step are complete, after its backwards. RunError if there were fewer backwards
        than a step has."""
        if self._num_passes != self.passes_of_step:
            count = say(
                "step() after {backwards}, and a step is to have {passes_of_step}",
                backwards=counted_phrase(self._num_passes, "backward"),
                passes_of_step=self.passes_of_step,
            )
            if not self._num_passes:
                raise RunError(say("{count}; call loss.backward() before, or model.backward(loss)", count=count))
            raise RunError(say("{count}; give shard(..., accumulate=) as many as there are", count=count))
        self._release_all()
        self.wait()

    def forget(self) -> None:
        """Restart the step without the gradients of its backwards so far, some of which may still be in reduction."""
        if self._num_passes:
            self.wait()
            self.begin()

    def _release_all(self) -> None:
        for unit in self.units:
            unit.release()


def gather_around(module: nn.Module, region: str, stage: ModuleStage) -> None:
    """Register hooks that gather a module's values before it is computed and release them after, in the forward and in
    the backward."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        stage.enter_forward(region)
        if not torch.is_grad_enabled():
            return args, kwargs
        args, kwargs = mark_inputs((args, kwargs), stage, region)
        return args, kwargs

    def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        has_backward = torch.is_grad_enabled() and watch_gradient(output, partial(stage.enter_backward, region))
        stage.leave_forward(region, has_backward)
        return output

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave)


def mark_inputs(inputs: Any, stage: ModuleStage, region: str) -> Any:
    """The inputs of a module, marked so that the end of its backward is reported to the stage."""
    tensors = [x for x in tensors_in(inputs) if x.requires_grad]
    if not tensors:  # its backward ends with the whole backward
        return inputs
    stage.expect_backward(region)
    marked = iter(BackwardHook.apply(partial(stage.leave_backward, region), *tensors))
    return map_tensors(lambda x: next(marked) if x.requires_grad else x, inputs)


def watch_gradient(output: Any, then: Callable[[Tensor], None]) -> bool:
    """Call `then` when a gradient of a module's output arrives. Returns True if there will be any."""
    tensors = [x for x in tensors_in(output) if x.requires_grad]
    for x in tensors:
        x.register_hook(then)
    return bool(tensors)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a value, as `map_tensors` finds them."""
    tensors: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        tensors.append(x)
        return x

    map_tensors(note, value)
    return tensors


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A value with all tensors in it mapped, in tuples, lists, dictionaries and dataclasses."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)([map_tensors(function, item) for item in value])
    if isinstance(value, dict):
        mapped = {key: map_tensors(function, item) for key, item in value.items()}
        return mapped if type(value) is dict else type(value)(**mapped)
    if is_dataclass(value) and not isinstance(value, type):
        mapped = {field.name: map_tensors(function, getattr(value, field.name)) for field in fields(value)}
        return replace(value, **mapped)
    return value
