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
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.parallel.recompute.offload import Convoy
from shardwright.parallel.tensor.recomputed_input import ProductInput, Remade

Results = tuple[Tensor, ...]
Run = Callable[..., Results]  # of a region's inputs


class Region:
    """One region of one microbatch: the recipe of its last result. Used for one forward and one backward.

    It is a function of all tensors that need a gradient, `inputs`: one that a function closes over would get none.
    """

    def __init__(self, again: Run, inputs: tuple[Tensor, ...], convoy: Convoy | None = None) -> None:
        self._again: Run | None = again
        self._inputs: tuple[Tensor, ...] | None = inputs
        self._convoy = convoy
        self._numbers: list[int] = []
        self._leaves: tuple[Tensor, ...] = ()
        self._made: Results = ()

    def keep(self) -> Results:
        """The region's inputs, for the product that follows the region to keep; nothing, if they are sent away."""
        inputs, self._inputs = self._inputs, None
        assert inputs is not None, "a region has one product that follows it"
        if self._convoy is None:
            return inputs
        self._numbers = [self._convoy.send(x) for x in inputs]
        return ()

    def make(self, kept: Results) -> Tensor:
        """Run the region again. Returns its last result."""
        again, self._again = self._again, None
        assert again is not None, "a region is recomputed once"
        inputs = kept if self._convoy is None else [self._convoy.bring(number) for number in self._numbers]
        self._leaves = tuple(x.detach().requires_grad_() for x in inputs)
        with torch.enable_grad():
            self._made = again(*self._leaves)
        return self._made[-1].detach()

    def pass_back(self, grads: Results) -> Results:
        """From the gradients of the results to those of the inputs. Gradients of parameters are added up on the way."""
        made, leaves = self._made, self._leaves
        self._made, self._leaves = (), ()
        assert leaves, "the product that follows a region runs backward before it"
        torch.autograd.backward(made, grads)
        found = tuple(leaf.grad for leaf in leaves if leaf.grad is not None)
        assert len(found) == len(leaves), "the results of a region depend on its inputs"
        return found


class _Forget(torch.autograd.Function):
    """A region as one node of the graph.

    Forward: run it without a graph; keep nothing, for the product after it keeps its input. Backward: by then that
    product has had the region run again, with a graph; go back through this one.
    """

    @staticmethod
    def forward(ctx: Any, region: Region, run: Run, *inputs: Tensor) -> Results:
        ctx.region = region
        return run(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.region.pass_back(grads)


def forget(run: Run, *inputs: Tensor, convoy: Convoy | None = None) -> tuple[Results, Remade]:
    """Run a region and keep its inputs alone, or send them away with `convoy`.

    Returns all of its results but the last, and the last one, which must go into a matrix product and nowhere else.
    """
    region = Region(run, inputs, convoy)
    *others, last = _Forget.apply(region, run, *inputs)
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
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.region.make(ctx.saved_tensors)
        return None, None, *ctx.region.pass_back(grads)


def run_again(run: Callable[[Tensor], Tensor], x: Tensor, convoy: Convoy | None = None) -> Tensor:
    """Run a region that does not end before a product, and keep its input alone, or send that away with `convoy`. Its
    last operators are computed twice too."""
    return _Again.apply(Region(lambda x: (run(x),), (x,), convoy), run, x)


class Chain:
    """Operators one after the other, of which those named in `recomputed` are computed again: neighbours as one region.

    `then` takes an operator, `product` one that is a matrix product: a region must end before one of those. The last
    product is `into`'s, and gives the chain's result. An operator may take other tensors `beside` what came before it,
    from outside the chain, which a region keeps as it does its input.
    """

    def __init__(self, x: Tensor, recomputed: frozenset[str]) -> None:
        self._x, self._recomputed = x, recomputed
        self._region: list[_ChainOperator] = []  # what is to be forgotten, and was not run yet
        self._beside: list[Tensor] = []  # what its operators take besides

    def then(self, name: str, operator: Callable[..., Tensor], *beside: Tensor) -> "Chain":
        """Take an operator that is no matrix product. Returns itself."""
        if name in self._recomputed:
            self._region.append(_ChainOperator(operator, len(beside)))
            self._beside += beside
        else:
            assert not self._region, f"a region ends before a matrix product, not before {name!r}"
            self._x = operator(self._x, *beside)
        return self

    def product(self, name: str, operator: Callable[[ProductInput], Tensor]) -> "Chain":
        """Take a matrix product. Returns itself."""
        if name in self._recomputed:
            self._region.append(_ChainOperator(operator, 0))
        else:
            self._x = self.into(operator)
        return self

    def into(self, operator: Callable[[ProductInput], Tensor]) -> Tensor:
        """The result of a matrix product that is kept, of all that came before."""
        if not self._region:
            return operator(self._x)
        region, beside, self._region, self._beside = self._region, self._beside, [], []
        _, x = forget(partial(_one_after_the_other, region), self._x, *beside)
        return operator(x)


class _ChainOperator(NamedTuple):
    """An operator of a chain, and how many tensors it takes besides."""

    operator: Callable[..., Tensor]
    num_beside: int


def _one_after_the_other(steps: Sequence[_ChainOperator], x: Tensor, *beside: Tensor) -> Results:
    others = iter(beside)
    for step in steps:
        x = step.operator(x, *islice(others, step.num_beside))
    return (x,)
