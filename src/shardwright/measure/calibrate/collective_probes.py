"""Timing of collectives as parallel/comm issues them, alone and in parallel with computing."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shardwright.config.measured_table import Carried
from shardwright.measure.calibrate.device_rounds import rounds_call
from shardwright.measure.calibrate.measuring_place import Call, Place
from shardwright.parallel.comm.collectives import (
    Axis,
    all_gather,
    all_reduce_max,
    all_to_all,
    barrier,
    reduce_scatter,
    start_all_reduce,
    start_exchange,
    start_recv,
    start_send,
)

_TOGETHER_S = 10e-3  # seconds of collectives, each after a product, whose mean is one sample
_MOST_CALLS = 4


def collective_call(place: Place, axis: Axis, kind: Carried, num_bytes: int) -> Call:
    """A collective over an axis, of `num_bytes` in full, as a step runs it: after a product, and waited for.

    Its time is from its begin on the last rank to its end on the last. Alone, in a loop, it takes less on a CPU: in a
    step its threads share the cores with computing threads, and have to get a core first. Ranks compare their clocks,
    and so must be on one machine. On a device a round of collectives is timed by its events.
    """
    messages = (
        _there_and_back(place, axis, num_bytes) if kind == "message" else [_started(place, axis, kind, num_bytes)]
    )
    if place.clock is not None:
        rounds = rounds_call(place.clock, [lambda _, carry=carry: carry() for carry in messages])  # type: ignore[misc]

        def slowest() -> tuple[float, ...]:
            barrier(axis)
            seconds = torch.tensor(rounds(), dtype=torch.float64, device=axis.ledger.device)
            return (float(all_reduce_max(seconds, axis).mean()),)

        return slowest
    compute = place.product_between()

    def once() -> list[tuple[float, float]]:
        spans = []
        for carry in messages:
            compute()
            start_s = place.now_s()
            carry()
            spans.append((start_s, place.now_s()))
        return spans

    count = _calls_together(once, axis)

    def call() -> tuple[float, ...]:
        barrier(axis)
        spans = [span for _ in range(count) for span in once()]
        spans_of_all = all_reduce_max(torch.tensor(spans, dtype=torch.float64, device=axis.ledger.device), axis)
        return (float((spans_of_all[:, 1] - spans_of_all[:, 0]).mean()),)

    return call


def _calls_together(once: Callable[[], list[tuple[float, float]]], axis: Axis) -> int:
    """Number of calls in one sample, the same on all ranks."""
    once()
    longest = torch.tensor([sum(end_s - start_s for start_s, end_s in once())], device=axis.ledger.device)
    return int(min(_MOST_CALLS, max(1, _TOGETHER_S // max(1e-6, float(all_reduce_max(longest, axis))))))


def _started(place: Place, axis: Axis, kind: Carried, num_bytes: int) -> Callable[[], None]:
    """A collective of this kind, whose result is in memory of its own."""
    elements = max(1, num_bytes // place.dtype.itemsize // axis.size) * axis.size
    full, share = place.random(elements), place.random(elements // axis.size)

    def carry() -> None:
        match kind:
            case "all_reduce":
                start_all_reduce(full, axis).wait()
            case "all_gather":
                all_gather(share, axis)
            case "reduce_scatter":
                reduce_scatter(full, axis)
            case "all_to_all":
                all_to_all(full, axis)
            case _:
                start_exchange(torch.empty_like(full), full, axis).wait()

    return carry


def _there_and_back(place: Place, axis: Axis, num_bytes: int) -> list[Callable[[], None]]:
    """A message to a neighbour, and one back. The last of an odd number of ranks has no neighbour."""
    neighbour = axis.index ^ 1
    if neighbour >= axis.size:
        return [lambda: None] * 2
    message: Tensor = torch.empty(max(1, num_bytes // place.dtype.itemsize), dtype=place.dtype, device=place.device)

    def carry(sends: bool) -> None:
        start = start_send if sends else start_recv
        start(message, axis, neighbour, tag=0).wait()

    return [partial(carry, axis.index < neighbour), partial(carry, axis.index > neighbour)]


_SIDE, _BESIDE_BYTES = 1024, 8 * 2**20


def leak_call(place: Place, axis: Axis) -> Call:
    """A call that measures the exposed share of an all-reduce's seconds if longer products run in parallel."""
    a, b, result = (place.random(_SIDE, _SIDE) for _ in range(3))
    travelling = place.random(_BESIDE_BYTES // place.dtype.itemsize)

    def compute(count: int) -> None:
        for _ in range(count):
            torch.mm(a, b, out=result)

    def timed(count: int, communicates: bool) -> float:
        barrier(axis)
        start_s = place.now_s()
        pending = start_all_reduce(travelling, axis) if communicates else None
        compute(count)
        if pending is not None:
            pending.wait()
        return place.now_s() - start_s

    alone_s = [timed(1, False) for _ in range(3)][-1]
    lengths = torch.tensor([timed(0, True) / max(1e-6, alone_s)], device=place.device)
    start_all_reduce(lengths, axis, torch.distributed.ReduceOp.MAX).wait()
    count = int(min(200.0, 3 + 3 * float(lengths)))

    def call() -> tuple[float, ...]:
        travelling.fill_(1.0)
        communication_s, compute_s, both_s = timed(0, True), timed(count, False), timed(count, True)
        return (min(1.0, max(0.0, (both_s - compute_s) / communication_s)),)

    return call


def copy_call(place: Place, num_bytes: int, to_host: bool) -> Call:
    """A copy in memory, or from the device to its host."""
    elements = num_bytes // 4
    source = torch.ones(elements, device=place.device)
    is_pinned = to_host and place.device.type == "cuda"
    copy = torch.empty(elements, pin_memory=is_pinned, device=None if to_host else place.device)
    return place.timing([lambda _: copy.copy_(source, non_blocking=True)])
