"""Seconds of a piece of a model (a layer, the embedding or the head) for one microbatch on one rank, by their kinds."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import add

import numpy as np

from shardwright.config.software import SoftwareSpec
from shardwright.cost.calibration import Rates
from shardwright.layers.arrays import Array, Numbers


def beside(rates: Rates, seconds: Numbers, compute_s: Numbers) -> Numbers:
    """Exposed seconds of communication that overlaps with computation: its excess, and the slowdown of the work."""
    return np.maximum(0.0, seconds - compute_s) + rates.leak * np.minimum(seconds, compute_s)


@dataclass(frozen=True)
class PieceTime:
    """Seconds of a piece (a layer, the embedding, the head, or several) for one microbatch on one rank.

    `tensor`, `context`, `expert` and `shard` are exposed collectives of those axes, and `host` exposed copies to host
    memory and back, of forward and backward together; `exposed_forward` is the forward's part of all of them.
    `again` is recompute. FLOPs are of the forward. `put_off` is the further part of `tensor` that is exposed if the
    weight gradients, which hide it, are computed later. `launched_forward` and `launched_backward` are the seconds that
    the host takes to launch the kernels of a pass, beside the device (`waiting_for_host`).
    """

    forward: Numbers = 0.0
    input_grad: Numbers = 0.0
    weight_grad: Numbers = 0.0
    again: Numbers = 0.0
    tensor: Numbers = 0.0
    context: Numbers = 0.0
    expert: Numbers = 0.0
    shard: Numbers = 0.0
    host: Numbers = 0.0
    exposed_forward: Numbers = 0.0
    flops: Numbers = 0.0
    flops_again: Numbers = 0.0
    put_off: Numbers = 0.0
    launched_forward: Numbers = 0.0
    launched_backward: Numbers = 0.0

    def __add__(self, other: "PieceTime") -> "PieceTime":
        return PieceTime(*map(add, self.values(), other.values()))

    def times(self, count: Numbers) -> "PieceTime":
        """`count` such pieces."""
        return PieceTime(*(count * value for value in self.values()))

    def values(self) -> tuple[Numbers, ...]:
        """All fields, in their order: dataclasses.astuple takes fifty times as long."""
        return (
            self.forward, self.input_grad, self.weight_grad, self.again, self.tensor, self.context, self.expert,
            self.shard, self.host, self.exposed_forward, self.flops, self.flops_again, self.put_off,
            self.launched_forward, self.launched_backward,
        )  # fmt: skip

    def gathered(
        self, rates: Rates, software: SoftwareSpec, shard_s: Sequence[Numbers], counts: Sequence[Numbers]
    ) -> "PieceTime":
        """The piece under ZeRO-3, with the exposed gathers of its parameters and scatters of its gradients, and with
        copies. `shard_s`: seconds of (a gather, a scatter, copies behind a gather, copies before a scatter); `counts`:
        how many gathers and scatters a pass takes."""
        gather, scatter, hidden = shard_s[0] * counts[0], shard_s[1] * counts[1], float(software.shard_overlap)
        gather_copies, scatter_copies = shard_s[2] * counts[0], shard_s[3] * counts[1]
        forward_s = beside(rates, gather, hidden * self.forward)
        backward_s = beside(rates, gather + scatter, hidden * self.backward)
        exposed_forward = self.exposed_forward + forward_s
        return replace(
            self,
            forward=self.forward + gather_copies,
            input_grad=self.input_grad + gather_copies + scatter_copies,
            shard=self.shard + forward_s + backward_s,
            exposed_forward=exposed_forward,
        )

    def hooked(self, forward_s: Numbers, backward_s: Numbers, is_hooked: Numbers) -> "PieceTime":
        """The piece with so many further seconds of the host in each pass, where `is_hooked`."""
        return replace(
            self,
            launched_forward=self.launched_forward + forward_s * is_hooked,
            launched_backward=self.launched_backward + backward_s * is_hooked,
        )

    def waiting_for_host(self) -> "PieceTime":
        """The piece with the device's waits for its host, where that launches kernels slower than they run.

        The host goes ahead of the device through the layers of a pass, so a pass takes the longer of both.
        """
        ahead = np.maximum(0.0, self.launched_forward - self.forward - self.exposed_forward)
        behind = np.maximum(0.0, self.launched_backward - self.backward - (self.exposed - self.exposed_forward))
        return replace(self, forward=self.forward + ahead, input_grad=self.input_grad + behind)

    def where_split(self, is_split: Numbers) -> "PieceTime":
        """The piece in a schedule that defers weight gradients if `is_split` is 1, else unchanged."""
        return replace(self, tensor=self.tensor + self.put_off * is_split, put_off=0.0 * self.put_off)

    @property
    def without_dispatch(self) -> Numbers:
        """Seconds of forward and backward without the exchanges of experts, gathers of parameters and copies to host
        memory."""
        return self.forward + self.input_grad + self.weight_grad + self.again + self.tensor + self.context

    @property
    def exposed(self) -> Numbers:
        """Seconds of all exposed communication."""
        return self.tensor + self.context + self.expert + self.shard + self.host

    @property
    def backward(self) -> Numbers:
        """Seconds of computation in the backward, with recompute."""
        return self.input_grad + self.weight_grad + self.again

    @property
    def total(self) -> Numbers:
        """Seconds of forward and backward, with exposed communication."""
        return self.forward + self.input_grad + self.weight_grad + self.again + self.exposed


@dataclass(frozen=True)
class Forward:
    """Seconds of an operator's forward, which recompute takes once more, and its FLOPs."""

    compute: Numbers
    tensor: Numbers
    context: Numbers
    expert: Numbers
    flops: Numbers


@dataclass(frozen=True)
class Repeatable:
    """A piece without recompute, and the forwards of its operators in their order, which may be recomputed."""

    once: PieceTime
    forwards: tuple[Forward, ...]

    def __add__(self, other: "Repeatable") -> "Repeatable":
        return Repeatable(self.once + other.once, self.forwards + other.forwards)

    def values(self) -> tuple[Numbers, ...]:
        """All numbers in a row; `of_values` is the inverse."""
        return self.once.values() + tuple(
            value for f in self.forwards for value in (f.compute, f.tensor, f.context, f.expert, f.flops)
        )

    @staticmethod
    def num_values(num_operators: int) -> int:
        """The number of values of a piece with so many operators."""
        return len(fields(PieceTime)) + num_operators * len(fields(Forward))

    @classmethod
    def of_values(cls, values: Array) -> "Repeatable":
        """The inverse of `values`, from an array of shape (values, plans)."""
        num_once, num_each = len(fields(PieceTime)), len(fields(Forward))
        ends = range(num_once, len(values), num_each)
        return cls(PieceTime(*values[:num_once]), tuple(Forward(*values[end : end + num_each]) for end in ends))
