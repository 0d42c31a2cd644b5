"""The least that a training step computes: its matrix products and its attention, and nothing else.

Each linear layer is three products (forward, input gradient, weight gradient) at the shapes of the step, written into
memory that is already there; attention is forward and backward of torch's own kernel. Every layer reads weights of its
own, as the step does. No norm, activation, loss, optimizer or communication: a step can come close to this time but
not below it, at the rates that this processor has at the moment.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.config.model import ModelSpec


@dataclass(frozen=True)
class _Product:
    """One linear layer y = x W^T, with room for its results. The result y serves as its own gradient."""

    x: Tensor
    weight: Tensor
    y: Tensor
    dx: Tensor
    dweight: Tensor

    def __call__(self) -> None:
        torch.mm(self.x, self.weight.t(), out=self.y)
        torch.mm(self.y, self.weight, out=self.dx)
        torch.mm(self.y.t(), self.x, out=self.dweight)


class Floor:
    """The products and attentions of one step of one rank: `microbatches` of `batch` sequences."""

    def __init__(self, spec: ModelSpec, batch: int, microbatches: int) -> None:
        self._microbatches = microbatches
        self._layers = spec.layers
        tokens, inner = batch * spec.sequence, spec.heads * spec.head_size
        shapes = [(spec.hidden, 3 * inner), (inner, spec.hidden), (spec.hidden, 2 * spec.ffn_size)]
        shapes = [*shapes, (spec.ffn_size, spec.hidden)] * spec.layers + [(spec.hidden, spec.vocab)]
        # Results and inputs of one shape share their memory between the layers; they are read where they are hot.
        room: dict[tuple[str, int, int], Tensor] = {}

        def shared(what: str, rows: int, columns: int) -> Tensor:
            return room.setdefault((what, rows, columns), torch.randn(rows, columns))

        self._products = [
            _Product(
                shared("x", tokens, k), torch.randn(n, k) * k**-0.5,
                shared("y", tokens, n), shared("dx", tokens, k), shared("dweight", n, k),
            )
            for k, n in shapes
        ]  # fmt: skip
        heads = (batch, spec.heads, spec.sequence, spec.head_size)
        self._qkv = [torch.randn(heads, requires_grad=True) for _ in range(3)]
        self._dout = torch.randn(heads)
        products = sum(6 * tokens * k * n for k, n in shapes)
        attention = spec.layers * batch * spec.heads * 7 * spec.sequence**2 * spec.head_size  # causal: half of 2 + 5
        self.flops = microbatches * (products + attention)

    def __call__(self) -> None:
        for _ in range(self._microbatches):
            with torch.no_grad():
                for product in self._products:
                    product()
            for _ in range(self._layers):
                out = functional.scaled_dot_product_attention(*self._qkv, is_causal=True)
                torch.autograd.grad(out, self._qkv, self._dout)
