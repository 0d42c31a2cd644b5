"""Tensors of a bucket, side by side in one vector."""

import torch
from torch import Tensor


def pack(tensors: list[Tensor], dtype: torch.dtype, num_elements: int = 0) -> Tensor:
    """A vector of all elements, in number type `dtype`, padded with zeros to `num_elements`."""
    filled = sum(tensor.numel() for tensor in tensors)
    packed = tensors[0].new_empty(max(filled, num_elements), dtype=dtype)
    offset = 0
    for tensor in tensors:
        packed[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor)
        offset += tensor.numel()
    packed[filled:].zero_()
    return packed


def unpack(packed: Tensor, tensors: list[Tensor]) -> None:
    """Overwrite the tensors with the elements of the vector."""
    offset = 0
    for tensor in tensors:
        tensor.copy_(packed[offset : offset + tensor.numel()].view(tensor.shape))
        offset += tensor.numel()
