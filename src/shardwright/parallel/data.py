"""Data parallel: gradients in flat buckets, summed over the replicas while the backward still runs.

Li et al. 2020 (arXiv 2006.15704, section 3.2). Parameters are put into buckets in reverse order of the model, for
that is about the order in which their gradients become complete. A parameter's gradient is a view of its bucket, so
a bucket is reduced where it lies. Nothing is reduced while microbatches accumulate.
"""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from shardwright.parallel.collectives import Axis, Pending, all_reduce, start_all_reduce
from shardwright.parallel.mesh import Mesh
from shardwright.parallel.parameter import PlacedParameter


@dataclass
class _Bucket:
    """Gradients that travel together. `first_over` are axes over which they are partial sums besides dp."""

    gradients: Tensor
    size: int
    first_over: tuple[Axis, ...]
    missing: int = 0
    reductions: list[Pending] = field(default_factory=list)


class GradientBuckets:
    """The gradients of one stage.

    In a step: `zero`, backwards, `arm` before the last of them, `reduce` after it, `wait` before the optimizer.
    """

    def __init__(self, parameters: list[PlacedParameter], mesh: Mesh, replicas: Axis, bucket_mib: float) -> None:
        self._replicas = replicas
        self._armed = False
        self._next = 0
        self._buckets: list[_Bucket] = []
        most = int(bucket_mib * 2**20)
        last = [p for p in reversed(parameters) if p.place.summed_over]
        for group in ([p for p in reversed(parameters) if not p.place.summed_over], last):
            filling: list[PlacedParameter] = []
            for parameter in group:
                filling.append(parameter)
                if sum(p.numel() * p.element_size() for p in filling) >= most:
                    self._close(filling, mesh)
                    filling = []
            if filling:
                self._close(filling, mesh)

    def _close(self, parameters: list[PlacedParameter], mesh: Mesh) -> None:
        flat = torch.zeros(sum(p.numel() for p in parameters), device=mesh.device, dtype=parameters[0].dtype)
        over = {"tp": mesh.tp}
        axes = {name for p in parameters for name in p.place.summed_over}
        bucket = _Bucket(flat, len(parameters), tuple(over[name] for name in sorted(axes)))
        self._buckets.append(bucket)
        offset = 0
        for parameter in parameters:
            parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
            if self._replicas.size > 1:
                parameter.when_gradient_arrives(partial(self._arrived, bucket))

    def zero(self) -> None:
        """Begin a step."""
        for bucket in self._buckets:
            bucket.gradients.zero_()

    def gather(self) -> None:
        """Nothing is to be done: every replica holds the parameters whole."""

    def release(self) -> None:
        """Nothing is let go, for the same reason."""

    def arm(self) -> None:
        """The next backward is the last of the step: reduce each bucket as soon as it is complete."""
        self._armed = self._replicas.size > 1
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = bucket.size

    def _arrived(self, bucket: _Bucket) -> None:
        if not self._armed:
            return
        bucket.missing -= 1
        # Always in the order of the list: replicas must issue the same reductions in the same order.
        while self._next < len(self._buckets):
            following = self._buckets[self._next]
            if following.missing > 0 or following.first_over:
                break
            self._start(following)

    def _start(self, bucket: _Bucket) -> None:
        self._next += 1
        for axis in bucket.first_over:
            all_reduce(bucket.gradients, axis)
        bucket.reductions.append(start_all_reduce(bucket.gradients, self._replicas))

    def reduce(self) -> None:
        """Start what has not been started: buckets with a parameter that got no gradient, and partial sums."""
        self._armed = False
        while self._next < len(self._buckets):
            self._start(self._buckets[self._next])

    def wait(self) -> None:
        """Block until all sums are there."""
        for bucket in self._buckets:
            for reduction in bucket.reductions:
                reduction.wait()
            bucket.reductions.clear()
        self._next = 0

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for bucket in self._buckets:
            bucket.gradients.mul_(factor)
