"""What ranks send is timed: collectives as parallel/comm issues them, and what they cost beside computing."""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shardwright.config.measured_table import Carried
from shardwright.measure.calibrate.operator_probes import Call, Place
from shardwright.parallel.comm.collectives import (
    Axis,
    Pending,
    barrier,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_exchange,
    start_recv,
    start_reduce_scatter,
    start_send,
)

_LEAST_S = 2e-3  # of calls that are timed together
_MOST_CALLS = 20


def collective_call(place: Place, axis: Axis, kind: Carried, num_bytes: int) -> Call:
    """A collective over an axis, begun when all ranks are there, and waited for; of `num_bytes` in full."""
    start = _started(place, axis, kind, num_bytes)

    def once() -> None:
        if kind == "message":
            _there_and_back(place, axis, num_bytes)
        else:
            start().wait()

    count = _calls_together(once, axis)
    messages = 2 if kind == "message" else 1

    def call() -> tuple[float, ...]:
        barrier(axis)
        start_s = place.now_s()
        for _ in range(count):
            once()
        return ((place.now_s() - start_s) / count / messages,)

    return call


def _calls_together(once: Callable[[], None], axis: Axis) -> int:
    """How many calls are timed together, so that the clock is fine enough; as many on all ranks."""
    once()
    start_s = time.perf_counter()
    once()
    longest = torch.tensor(time.perf_counter() - start_s, device=axis.ledger.device)
    start_all_reduce(longest, axis, torch.distributed.ReduceOp.MAX).wait()
    return int(min(_MOST_CALLS, max(1, _LEAST_S // max(1e-6, float(longest)))))


def _started(place: Place, axis: Axis, kind: Carried, num_bytes: int) -> Callable[[], Pending]:
    """How such a collective is begun."""
    elements = max(1, num_bytes // place.dtype.itemsize // axis.size) * axis.size
    whole, share = place.random(elements), place.random(elements // axis.size)
    match kind:
        case "all_reduce":
            return partial(start_all_reduce, whole, axis)
        case "all_gather":
            return partial(start_all_gather, whole, share, axis)
        case "reduce_scatter":
            return partial(start_reduce_scatter, share, whole, axis)
        case "all_to_all":
            return partial(start_all_to_all, torch.empty_like(whole), whole, axis)
        case _:
            return partial(start_exchange, torch.empty_like(whole), whole, axis)


def _there_and_back(place: Place, axis: Axis, num_bytes: int) -> None:
    """A message to a neighbour, and one back. The last of an odd number of ranks has none."""
    neighbour = axis.index ^ 1
    if neighbour >= axis.size:
        return
    message: Tensor = torch.empty(max(1, num_bytes // place.dtype.itemsize), dtype=place.dtype, device=place.device)
    for sends in (axis.index < neighbour, axis.index > neighbour):
        if sends:
            start_send(message, axis, neighbour, tag=0).wait()
        else:
            start_recv(message, axis, neighbour, tag=0).wait()


_SIDE, _BESIDE_BYTES = 1024, 8 * 2**20


def leak_call(place: Place, axis: Axis) -> Call:
    """What share of an all-reduce's seconds is seen where products run beside it that take longer than it does."""
    a, b, out = (place.random(_SIDE, _SIDE) for _ in range(3))
    travelling = place.random(_BESIDE_BYTES // place.dtype.itemsize)

    def compute(count: int) -> None:
        for _ in range(count):
            torch.mm(a, b, out=out)

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
    out = torch.empty(elements, pin_memory=is_pinned, device=None if to_host else place.device)

    def call() -> tuple[float, ...]:
        start_s = place.now_s()
        out.copy_(source)
        return (place.now_s() - start_s,)

    return call
