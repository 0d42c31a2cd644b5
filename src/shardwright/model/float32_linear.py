"""x W^T in float32, whatever the model's dtype: for products that decide, such as the logits of a gate.

Shape suffixes: T tokens, H input width, E output width.
"""

from typing import Any

import torch
from torch import Tensor

from shardwright.parallel.tensor.deferred_gradients import DeferredGradients
from shardwright.parallel.tensor.parameter import PlacedParameter


def exact_product(x_TH: Tensor, weight_EH: PlacedParameter, deferred: DeferredGradients, kind: str) -> Tensor:
    """[T, H] to [T, E], float32. The weight's gradient may wait in `deferred`. `kind` is the kind of device."""
    return _ExactProduct.apply(x_TH, weight_EH, deferred, kind)


class _ExactProduct(torch.autograd.Function):
    """Communicates nothing. Keeps x in its own dtype, so that no float32 copy of it stays; nothing, if the weight is
    frozen."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_EH: PlacedParameter, deferred: DeferredGradients, kind: str) -> Tensor:
        if not weight_EH.place.is_frozen:
            ctx.save_for_backward(x_TH)
        # Not a saved tensor: the weight may be freed after the forward, and gathered again into other memory.
        ctx.weight, ctx.deferred, ctx.kind, ctx.dtype = weight_EH, deferred, kind, x_TH.dtype
        return x_TH.float() @ weight_EH.float().t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (dy_TE,) = grads
        weight_EH: PlacedParameter = ctx.weight
        dx_TH = (dy_TE @ weight_EH.float()).to(ctx.dtype)
        if weight_EH.place.is_frozen:
            return dx_TH, None, None, None
        (x_TH,) = ctx.saved_tensors
        kind: str = ctx.kind
        ctx.deferred.now_or_later(lambda: weight_EH.add_product(dy_TE, x_TH.float(), kind))
        return dx_TH, None, None, None
