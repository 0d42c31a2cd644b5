"""A 64-bit hash of a tensor's contents, bit for bit, computed on its device.

Each element, read as an integer, is multiplied by an odd factor that depends on its position, and the products are
summed modulo 2^64. Such a sum does not depend on its order, so threads and devices agree. An odd factor loses no bit:
if one element differs, the hash always differs. The hashes of the parts of a tensor add up to the hash of the tensor.
"""

import torch
from torch import Tensor

# Elements at a time. Working memory is 16 bytes per element: 1 MiB on a CPU, which stays in a cache, 64 MiB on a GPU.
_CHUNKS = {"cpu": 1 << 16, "cuda": 1 << 22}
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 over the golden ratio, as an int64: spreads neighbouring positions
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def content_hash(x: Tensor, first: int = 0) -> Tensor:
    """The hash of a contiguous tensor whose first element has position `first`: an int64 [] on its device."""
    words = x.detach().reshape(-1).view(_WORDS[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    size = _CHUNKS[x.device.type]
    for start in range(0, words.numel(), size):
        chunk = words[start : start + size].to(torch.int64)
        begin = first + start
        factors = torch.arange(begin, begin + chunk.numel(), dtype=torch.int64, device=x.device)
        factors.mul_(_GOLDEN).bitwise_or_(1)
        # Products and sums of int64 wrap around, so they are modulo 2^64.
        total += factors.mul_(chunk).sum()
    return total


def wrapped(number: int) -> int:
    """A sum of hashes, modulo 2^64, in the range of an int64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
