"""Regions of a forward that keep only their input, and are recomputed in the backward.

Chen et al. 2016 (arXiv 1604.06174, section 4) trade one more forward for memory. Korthikanti et al. 2022 (arXiv
2205.05198, section 5) recompute only tensors that are large and cheap. Here a region may be one operator, several in a
row, or a block up to its last product.

A region ends just before a matrix product, and the product keeps the region's input instead of its own
(parallel/tensor/product_input.py). So the region's result is not kept either, and the product is not computed twice.
In the backward the product first asks for its input; this runs the region again, with autograd on. Then the region's
own backward passes the gradient through the graph of that second run.

The same operators run in the same order, so that every gradient has the same bits as without recomputation.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.parallel.recompute.offload import Convoy
from shardwright.parallel.tensor.product_input import ProductInput, Remade

Results = tuple[Tensor, ...]
Run = Callable[..., Results]  # computes a region from its inputs


class Region:
    """One region of one microbatch: the recipe of its last result. Used for one forward and one backward.

    `inputs` must contain all tensors that need a gradient: a tensor that `run` closes over would get none.
    """

    def __init__(self, run: Run, inputs: tuple[Tensor, ...], convoy: Convoy | None = None) -> None:
        self._run: Run | None = run
        self._inputs: tuple[Tensor, ...] | None = inputs
        self._convoy = convoy
        self._numbers: list[int] = []
        self._leaves: tuple[Tensor, ...] = ()
        self._results: Results = ()

    def keep(self) -> Results:
        """The region's inputs, which the product after the region must keep; no tensors if they are offloaded."""
        inputs, self._inputs = self._inputs, None
        assert inputs is not None, "a region has one product that follows it"
        if self._convoy is None:
            return inputs
        self._numbers = [self._convoy.send(x) for x in inputs]
        return ()

    def make(self, tensors: Results) -> Tensor:
        """Run the region again, from its kept inputs. Returns its last result."""
        run, self._run = self._run, None
        assert run is not None, "a region is recomputed once"
        inputs = tensors if self._convoy is None else [self._convoy.bring(number) for number in self._numbers]
        self._leaves = tuple(x.detach().requires_grad_() for x in inputs)
        with torch.enable_grad():
            self._results = run(*self._leaves)
        return self._results[-1].detach()

    def pass_back(self, grads: Results) -> Results:
        """The gradients of the inputs, from the gradients of the results. Also adds to the gradients of parameters."""
        results, leaves = self._results, self._leaves
        self._results, self._leaves = (), ()
        assert leaves, "the product that follows a region runs backward before it"
        torch.autograd.backward(results, grads)
        input_gradients = tuple(leaf.grad for leaf in leaves if leaf.grad is not None)
        assert len(input_gradients) == len(leaves), "the results of a region depend on its inputs"
        return input_gradients


class _Forget(torch.autograd.Function):
    """A region as one node of the graph.

    Forward: run it without a graph; keep nothing, since the product after it keeps its input. Backward: the product has
    already run the region again, with a graph; pass the gradient back through this graph.
    """

    @staticmethod
    def forward(ctx: Any, region: Region, run: Run, *inputs: Tensor) -> Results:
        ctx.region = region
        return run(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.region.pass_back(grads)


def forget(run: Run, *inputs: Tensor, convoy: Convoy | None = None) -> tuple[Results, Remade]:
    """Run a region and keep only its inputs, on the device or, with a `convoy`, on the host.

    Returns all of its results but the last, and the last one, which may only be used by a matrix product.
    """
    region = Region(run, inputs, convoy)
    *first_results, last = _Forget.apply(region, run, *inputs)
    return tuple(first_results), Remade(last, region)


class _RunAgain(torch.autograd.Function):
    """A region without a product after it. Forward: run it without a graph, and keep its input. Backward: run it again,
    with a graph, and pass the gradient back through this graph."""

    @staticmethod
    def forward(ctx: Any, region: Region, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.region = region
        ctx.save_for_backward(*region.keep())
        return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.region.make(ctx.saved_tensors)
        return None, None, *ctx.region.pass_back(grads)


def run_again(run: Callable[[Tensor], Tensor], x: Tensor, convoy: Convoy | None) -> Tensor:
    """Run a region that does not end before a product, and keep only its input, on the device or, with a `convoy`, on
    the host. All its operators are computed twice."""
    return _RunAgain.apply(Region(lambda x: (run(x),), (x,), convoy), run, x)


class Chain:
    """A sequence of operators. Those named in `recomputed` are recomputed in the backward: neighbours form one region.

    `then` adds an operator, `product` a matrix product. A region must end before a matrix product. `into` adds the last
    product, and returns the chain's result. Besides the result of the operator before it, an operator may take
    `side_inputs` from outside the chain, which a region keeps like its input.
    """

    def __init__(self, x: Tensor, recomputed: frozenset[str]) -> None:
        self._x: Tensor | None = x
        self._recomputed = recomputed
        self._region: list[_ChainOperator] = []  # operators of the present region, not run yet
        self._side_inputs: list[Tensor] = []  # of its operators

    def then(self, name: str, operator: Callable[..., Tensor], *side_inputs: Tensor) -> "Chain":
        """Add an operator that is no matrix product. Returns the chain."""
        if name in self._recomputed:
            self._region.append(_ChainOperator(operator, len(side_inputs)))
            self._side_inputs += side_inputs
        else:
            assert not self._region, f"a region ends before a matrix product, not before {name!r}"
            self._x = operator(self._take(), *side_inputs)
        return self

    def product(self, name: str, operator: Callable[[ProductInput], Tensor]) -> "Chain":
        """Add a matrix product. Returns the chain."""
        if name in self._recomputed:
            self._region.append(_ChainOperator(operator, 0))
        else:
            self._x = self.into(operator)
        return self

    def into(self, operator: Callable[[ProductInput], Tensor]) -> Tensor:
        """The result of a last matrix product, which is not recomputed, after all operators before it."""
        if not self._region:
            return operator(self._take())
        region, side_inputs, self._region, self._side_inputs = self._region, self._side_inputs, [], []
        _, x = forget(partial(_one_after_the_other, region), self._take(), *side_inputs)
        return operator(x)

    def _take(self) -> Tensor:
        """The result so far. The chain keeps it no longer, so that an operator's input is freed when it is used up."""
        x, self._x = self._x, None
        assert x is not None, "an operator follows another"
        return x


class _ChainOperator(NamedTuple):
    """An operator of a chain, and the number of its side inputs."""

    operator: Callable[..., Tensor]
    num_side_inputs: int


def _one_after_the_other(steps: Sequence[_ChainOperator], x: Tensor, *side_inputs: Tensor) -> Results:
    remaining = iter(side_inputs)
    for step in steps:
        x = step.operator(x, *islice(remaining, step.num_side_inputs))
    return (x,)
