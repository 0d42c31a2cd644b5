"""Two ranks that are threads, for what needs nothing of other ranks but the largest of some numbers."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.precision.float8_linear import ReduceMax


def on_two_ranks(run: Callable[[int, ReduceMax], Any]) -> list[Any]:
    """Run as two ranks, each a thread, that can take the largest over both."""
    meeting = threading.Barrier(2, timeout=100)
    given: list[Tensor | None] = [None, None]
    results: list[Any] = [None, None]

    def rank(index: int) -> None:
        def reduce_max(amax: Tensor) -> Tensor:
            given[index] = amax.clone()
            meeting.wait()
            assert given[0] is not None and given[1] is not None
            largest = torch.maximum(given[0], given[1])
            meeting.wait()
            return amax.copy_(largest)

        results[index] = run(index, reduce_max)

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in results
    return results
