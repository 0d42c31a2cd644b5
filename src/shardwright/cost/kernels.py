"""Seconds of a kernel: a roofline whose roof depends on the shape.

A product's roof is its device's rate times how well the shape fills it: whole tiles on whole waves of multiprocessors,
an inner dim long enough to pay for prologue and epilogue, and rows of whole cache lines. Elementwise kernels take the
bytes that they move at the rate of the memory. Each kernel takes a gap besides.
"""

from dataclasses import dataclass
from functools import lru_cache

from shardwright.cost.calibration import Rates
from shardwright.spec.software import SoftwareSpec
from shardwright.workload.operators import HALF, Operator, Scores

# Tiles that libraries choose from, and what share of the best rate one of them reaches: smaller tiles read each
# element more often. Public descriptions of CUTLASS and cuBLAS; NVIDIA's "Matrix multiplication background" guide.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.78), (64, 64, 0.6))
_LINE = 64  # elements of 2 bytes in a cache line of 128
_UNVECTORED = 0.25  # share of the rate without such loads
_VECTOR = 8  # elements of 2 bytes that tensor cores load at once


@lru_cache(maxsize=100_000)
def fill(rows: int, columns: int, batch: int, multiprocessors: int) -> float:
    """Share of the multiprocessors' time that goes into elements which exist, with the best of the tiles.

    1 for an endless matrix. The last wave of tiles runs as long as a full one, whatever it holds.
    """
    best = 0.0
    for height, width, share in _TILES:
        tiles = batch * -(-rows // height) * -(-columns // width)
        waves = -(-tiles // multiprocessors)
        best = max(best, share * batch * rows * columns / (waves * multiprocessors * height * width))
    return best


def product_s(rates: Rates, rows: float, inner: float, columns: float, batch: int, rate: float) -> float:
    """One product, or `batch` of them in one kernel."""
    whole = max(1, round(rows)), max(1, round(columns))
    share = fill(*whole, batch, rates.multiprocessors) * inner / (inner + rates.inner_half)
    for width in (columns, inner):
        if width % _VECTOR:
            share *= _UNVECTORED
        elif width % _LINE:
            share *= rates.misaligned
    flops_s = 2.0 * batch * rows * inner * columns / (rate * share)
    bytes_s = HALF * batch * (rows * inner + inner * columns + rows * columns) / rates.memory
    return max(flops_s, bytes_s)


def scores_s(rates: Rates, scores: Scores, backward: bool) -> float:
    """Attention in one kernel; its backward computes the scores again, 2.5 times the FLOPs of the forward."""
    rate = rates.attention_backward if backward else rates.attention_forward
    share = scores.length / (scores.length + rates.attention_half)
    return scores.flops * (2.5 if backward else 1.0) / (rate * share)


@dataclass(frozen=True)
class KernelTime:
    """Seconds of an operator's kernels: its forward, its input gradient and its weight gradient."""

    forward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0

    def __add__(self, other: "KernelTime") -> "KernelTime":
        return KernelTime(
            self.forward + other.forward, self.input_grad + other.input_grad, self.weight_grad + other.weight_grad
        )


def operator_s(rates: Rates, software: SoftwareSpec, operator: Operator, is_narrow: bool) -> KernelTime:
    """All kernels of an operator. `is_narrow`: its products with weights are computed in fp8 or fp4."""
    forward = operator.forward_bytes / rates.memory
    input_grad = operator.backward_bytes / rates.memory
    weight_grad = 0.0
    for p in operator.products:
        narrow = is_narrow and p.weight
        rate = rates.flops_product if narrow else rates.flops
        forward += product_s(rates, p.rows, p.inner, p.columns, p.batch, rate)
        input_grad += product_s(rates, p.rows, p.columns, p.inner, p.batch, rate)
        weight_grad += product_s(rates, p.inner, p.rows, p.columns, p.batch, rate)
        if p.weight:  # the gradient is added to what other microbatches made
            added = software.gradient_bytes * p.batch * p.inner * p.columns
            weight_grad += added / rates.memory
        if narrow:
            forward += rates.cast * software.float8[0] * p.batch * p.rows * p.inner / rates.memory
            input_grad += rates.cast * software.float8[1] * p.batch * p.rows * p.columns / rates.memory
    if operator.scores:
        forward += scores_s(rates, operator.scores, False)
        input_grad += scores_s(rates, operator.scores, True)
    if not any(p.weight for p in operator.products):
        input_grad, weight_grad = input_grad + weight_grad, 0.0
    return KernelTime(forward, input_grad, weight_grad)
