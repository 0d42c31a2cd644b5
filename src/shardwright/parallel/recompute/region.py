"""Regions of a forward that keep their input alone, and are computed again in the backward.

Chen et al. 2016 (arXiv 1604.06174, section 4) trade one more forward for memory. Korthikanti et al. 2022 (arXiv
2205.05198, section 5) recompute only what is large and cheap. Here a region may be one operator, several in a row, or a
block up to its last product.

A region ends just before a matrix product, and the product takes part: it keeps the region's input instead of its own
(parallel/tensor/recomputed_input.py). So the region's result is dropped too, and the product is not computed twice. In
the backward the product asks for its input first; that runs the region again, with autograd on. When the region's own
turn comes, the gradient passes through what was made.

The same operators run in the same order, so that every gradient has the same bits as without recomputation.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwright.parallel.recompute.offload import Convoy
from shardwright.parallel.tensor.recomputed_input import ProductInput, Remade

Results = tuple[Tensor, ...]


class Region:
    """One region of one microbatch: the recipe of its last result. Used for one forward and one backward."""

    def __init__(self, again: Callable[[Tensor], Results], x: Tensor, convoy: Convoy | None = None) -> None:
        self._again: Callable[[Tensor], Results] | None = again
        self._input: Tensor | None = x
        self._convoy = convoy
        self._number = -1
        self._leaf: Tensor | None = None
        self._made: Results = ()

    def keep(self) -> Results:
        """The region's input, for the product that follows the region to keep; nothing, if it is sent away."""
        x, self._input = self._input, None
        assert x is not None, "a region has one product that follows it"
        if self._convoy is None:
            return (x,)
        self._number = self._convoy.send(x)
        return ()

    def make(self, kept: Results) -> Tensor:
        """Run the region again. Returns its last result."""
        again, self._again = self._again, None
        assert again is not None, "a region is recomputed once"
        x = kept[0] if self._convoy is None else self._convoy.bring(self._number)
        self._leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            self._made = again(self._leaf)
        return self._made[-1].detach()

    def pass_back(self, grads: Results) -> Tensor:
        """From the gradients of the results to that of the input. Gradients of parameters are added up on the way."""
        made, leaf = self._made, self._leaf
        self._made, self._leaf = (), None
        assert leaf is not None, "the product that follows a region runs backward before it"
        torch.autograd.backward(made, grads)
        assert leaf.grad is not None, "the results of a region depend on its input"
        return leaf.grad


class _Forget(torch.autograd.Function):
    """A region as one node of the graph.

    Forward: run it without a graph; keep nothing, for the product after it keeps its input. Backward: by then that
    product has had the region run again, with a graph; go back through this one.
    """

    @staticmethod
    def forward(ctx: Any, region: Region, run: Callable[[Tensor], Results], x: Tensor) -> Results:
        ctx.region = region
        return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.region.pass_back(grads)


def forget(run: Callable[[Tensor], Results], x: Tensor, convoy: Convoy | None = None) -> tuple[Results, Remade]:
    """Run a region and keep its input alone, or send that away with `convoy`.

    Returns all of its results but the last, and the last one, which must go into a matrix product and nowhere else.
    """
    region = Region(run, x, convoy)
    *others, last = _Forget.apply(region, run, x)
    return tuple(others), Remade(last, region)


class _Again(torch.autograd.Function):
    """A region that no product follows. Forward: run it without a graph, and keep its input. Backward: run it again,
    with a graph, and go back through that."""

    @staticmethod
    def forward(ctx: Any, region: Region, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.region = region
        ctx.save_for_backward(*region.keep())
        return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        ctx.region.make(ctx.saved_tensors)
        return None, None, ctx.region.pass_back(grads)


def run_again(run: Callable[[Tensor], Tensor], x: Tensor, convoy: Convoy | None = None) -> Tensor:
    """Run a region that does not end before a product, and keep its input alone, or send that away with `convoy`. Its
    last operators are computed twice too."""
    return _Again.apply(Region(lambda x: (run(x),), x, convoy), run, x)


class Chain:
    """Operators one after the other, of which those named in `recomputed` are computed again: neighbours as one region.

    `then` takes an operator, `product` one that is a matrix product: a region must end before one of those. The last
    product is `into`'s, and gives the chain's result.
    """

    def __init__(self, x: Tensor, recomputed: frozenset[str]) -> None:
        self._x, self._recomputed = x, recomputed
        self._region: list[Callable[[Tensor], Tensor]] = []  # what is to be forgotten, and was not run yet

    def then(self, name: str, operator: Callable[[Tensor], Tensor]) -> "Chain":
        """Take an operator that is no matrix product. Returns itself."""
        if name in self._recomputed:
            self._region.append(operator)
        else:
            assert not self._region, f"a region ends before a matrix product, not before {name!r}"
            self._x = operator(self._x)
        return self

    def product(self, name: str, operator: Callable[[ProductInput], Tensor]) -> "Chain":
        """Take a matrix product. Returns itself."""
        if name in self._recomputed:
            self._region.append(operator)
        else:
            self._x = self.into(operator)
        return self

    def into(self, operator: Callable[[ProductInput], Tensor]) -> Tensor:
        """The result of a matrix product that is kept, of all that came before."""
        if not self._region:
            return operator(self._x)
        region, self._region = self._region, []
        _, x = forget(partial(_one_after_the_other, region), self._x)
        return operator(x)


def _one_after_the_other(operators: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Results:
    for operator in operators:
        x = operator(x)
    return (x,)
