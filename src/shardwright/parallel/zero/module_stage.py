"""A module that is not ours, as ZeRO's engine moves it: its units by submodule, and the events that its passes are.

A unit is a submodule whose parameters are gathered before its forward, released after it, and so again in the backward;
what is in none is the root's, which is gathered from the beginning of a forward to its end, and in the backward.
Without sharded parameters nothing happens in a forward, and units are buckets.

Which gradient comes last is not known beforehand: some parameters may not be used in a pass. A backward begins where
its first gradient arrives, and ends where autograd says so. Then what has not been reduced is.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from shardwright.config.base import RunError
from shardwright.config.units import counted
from shardwright.parallel.tensor.parameter import PlacedParameter
from shardwright.parallel.zero.module_unit import ModuleUnit
from shardwright.parallel.zero.sharded_stage import ShardedStage

ROOT = ""  # the region of what is in no other


class ModuleStage(ShardedStage):
    """The parameters, gradients and optimizer state of a module."""

    unit_type = ModuleUnit
    passes_of_step = 1  # backwards in one step

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_passes = 0
        self._is_in_pass = False
        self._is_going_back: set[str] = set()  # regions that are in their backward
        self._num_calls: Counter[str] = Counter()  # of regions, whose backwards are to come
        self._seen: list[str] | None = []  # regions in the order of the first forward, until it is over

    def begin(self) -> None:
        """Begin a step: there are no gradients yet. Values that a forward without a backward has left go."""
        self._num_passes, self._is_in_pass = 0, False
        self._is_going_back.clear()
        self._num_calls.clear()
        self._release_all()
        self.zero()

    # The forward.

    def enter_forward(self, region: str) -> None:
        """A module's forward begins."""
        if self._is_in_pass:  # it is computed again, in the backward
            self._enter(region, None)
            return
        if self._seen is not None and region not in self._seen:
            self._seen.append(region)
        self.begin_forward(region)

    def expect_backward(self, region: str) -> None:
        """A backward of a module's call will tell when it is over."""
        if not self._is_in_pass:
            self._num_calls[region] += 1

    def leave_forward(self, region: str, has_backward: bool) -> None:
        """A module's forward is over."""
        if self._is_in_pass:
            if region not in self._is_going_back:
                self._leave(region)
        elif not (region == ROOT and has_backward):  # it is needed again at once
            self.end_forward(region, has_backward)
        if region == ROOT and self._seen is not None:
            self._regions = [*self._seen, *(name for name in self._regions if name not in self._seen)]
            self._prompt = list(dict.fromkeys(u for name in reversed(self._regions) for u in self._units_in[name]))
            self._seen = None

    # The backward.

    def enter_backward(self, region: str, gradient: Tensor | None = None) -> None:
        """The gradient of a module's output is there."""
        if region not in self._is_going_back:
            self._begin_pass()
            self._is_going_back.add(region)
            self.begin_backward(region)

    def leave_backward(self, region: str) -> None:
        """The gradients of a module's inputs are there. Those of its parameters are too, if it was called no more."""
        self._is_going_back.discard(region)
        self.end_backward(region)
        self._num_calls[region] -= 1
        if not self._num_calls[region]:
            for unit in self._units_in[region]:
                self.unit_completed(unit)

    def open(self, parameter: PlacedParameter) -> None:
        """Give a parameter's gradient its memory."""
        self._begin_pass()
        unit = self.unit_of(parameter)
        assert isinstance(unit, ModuleUnit)
        if not unit.are_values_here:
            raise RunError(
                f"the gradient of {parameter.place.name} was computed when its values had been released: it is used "
                "outside of the forward of the module that it belongs to; name a module around both in units=, or use "
                "plan.zero = 2"
            )
        super().open(parameter)

    def arrived(self, parameter: PlacedParameter) -> None:
        """A parameter's gradient was added to.

        Where values are gathered, ranks must begin gathers and reductions in one order, and which parameters a module
        uses may differ from rank to rank: there a unit is complete when its module's backward is over.
        """
        if self.unit_of(parameter).sizes.zero < 3:
            super().arrived(parameter)

    def _begin_pass(self) -> None:
        if self._is_in_pass:
            return
        self._num_passes += 1
        if self._num_passes > self.passes_of_step:
            raise RunError(
                f"this is backward {self._num_passes} since the last step, and a step is to have "
                f"{self.passes_of_step}: call step() before it, or give shard(..., accumulate=) as many as there are; "
                "checkpoints of torch.utils with use_reentrant=True count as backwards, so use use_reentrant=False"
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
        """The step's backwards are over: wait until all sums are there. RunError where there were fewer than a step
        has."""
        if self._num_passes != self.passes_of_step:
            raise RunError(
                f"step() after {counted(self._num_passes, 'backward')}, and a step is to have {self.passes_of_step}; "
                "give shard(..., accumulate=) as many as there are"
            )
        self._release_all()
        self.wait()

    def forget(self) -> None:
        """Begin the step anew, without the gradients of its backwards so far, of which some may be on their way."""
        if self._num_passes:
            self.wait()
            self.begin()

    def _release_all(self) -> None:
        for unit in self.units:
            unit.release()


def gather_around(module: nn.Module, region: str, stage: ModuleStage) -> None:
    """Have a module's values gathered before it is computed, and released after, in the forward and the backward."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        stage.enter_forward(region)
        if not torch.is_grad_enabled():
            return args, kwargs
        args, kwargs = mark_way_back((args, kwargs), stage, region)
        return args, kwargs

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        has_backward = torch.is_grad_enabled() and watch_gradient(output, partial(stage.enter_backward, region))
        stage.leave_forward(region, has_backward)
        return output

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def mark_way_back(inputs: Any, stage: ModuleStage, region: str) -> Any:
    """The inputs of a module, by way of which its backward tells that it is over."""
    found = [x for x in tensors_in(inputs) if x.requires_grad]
    if not found:  # it is over when the whole backward is
        return inputs
    stage.expect_backward(region)
    marked = iter(_WayBack.apply(partial(stage.leave_backward, region), *found))
    return map_tensors(lambda x: next(marked) if x.requires_grad else x, inputs)


def watch_gradient(output: Any, then: Callable[[Tensor], None]) -> bool:
    """Have `then` called when a gradient of a module's output is there. Returns whether there will be any."""
    found = [x for x in tensors_in(output) if x.requires_grad]
    for x in found:
        x.register_hook(then)
    return bool(found)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a value, as `map_tensors` finds them."""
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        found.append(x)
        return x

    map_tensors(note, value)
    return found


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A value with all tensors in it mapped, in tuples, lists, dictionaries and dataclasses."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, of) for of in value))
    if isinstance(value, list | tuple):
        return type(value)([map_tensors(function, of) for of in value])
    if isinstance(value, dict):
        mapped = {key: map_tensors(function, of) for key, of in value.items()}
        return mapped if type(value) is dict else type(value)(**mapped)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{of.name: map_tensors(function, getattr(value, of.name)) for of in fields(value)})
    return value


class _WayBack(torch.autograd.Function):
    """Forward: nothing. Backward: `then` is called when all gradients have passed."""

    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], *x: Tensor) -> tuple[Tensor, ...]:
        ctx.then = then
        # No views that autograd knows of: the module may overwrite its input.
        return tuple(of.detach() for of in x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.then()
        return None, *grads
