"""Seconds of a kernel: a roofline whose roof depends on the shape.

A product's roof is its device's rate times the share that the shape fills: whole tiles on whole waves of
multiprocessors, an inner dim long enough to pay for prologue and epilogue, and rows of whole cache lines. The time of
an elementwise kernel is its bytes over the rate of the memory. After each kernel comes a gap.
"""

from dataclasses import dataclass, replace

import numpy as np

from shardwright.config.software import SoftwareSpec
from shardwright.cost.calibration import Rates
from shardwright.layers.arrays import Numbers
from shardwright.layers.operators import Operator, Scores

# Tiles from which libraries choose, and the share of the best rate that each reaches: smaller tiles read each element
# more often. Public descriptions of CUTLASS and cuBLAS; NVIDIA's "Matrix multiplication background" guide.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.78), (64, 64, 0.6))
_LINE = 64  # elements of 2 bytes in a cache line of 128
_ADDED_APART = 3 * 4  # bytes to add an element to a sum in float32: two reads and a write
_VECTOR = 8  # elements of 2 bytes that tensor cores load at once


def fill(rows: Numbers, columns: Numbers, batch: Numbers, multiprocessors: int) -> Numbers:
    """Share of the multiprocessors' time that computes elements of the result, with the best tile.

    1 for an infinite matrix. The last wave of tiles takes as long as a full one, even if it is not full.
    """
    best: Numbers = 0.0
    for height, width, share in _TILES:
        tiles = batch * np.ceil(rows / height) * np.ceil(columns / width)
        waves = np.ceil(tiles / multiprocessors)
        best = np.maximum(best, share / (waves * (multiprocessors * height * width)))
    return best * (batch * rows * columns)


def product_s(rates: Rates, rows: Numbers, inner: Numbers, columns: Numbers, batch: Numbers, rate: Numbers) -> Numbers:
    """Seconds of one product, or of `batch` of them in one kernel. Sizes may be arrays of one shape."""
    rounded = np.maximum(1, np.round(rows)), np.maximum(1, np.round(columns))
    share = fill(*rounded, batch, rates.multiprocessors) * inner / (inner + rates.inner_half)
    share = share * _lines(rates, columns) * _lines(rates, inner)
    flops_s = 2.0 * batch * rows * inner * columns / (rate * share)
    bytes_s = rates.element_bytes * batch * (rows * inner + inner * columns + rows * columns) / rates.memory_bytes_per_s
    return np.maximum(flops_s, bytes_s)


def _lines(rates: Rates, width: Numbers) -> Numbers:
    """Share of its rate that a product reaches, given the length of its rows in memory."""
    return np.where(width % _VECTOR, rates.unaligned, np.where(width % _LINE, rates.misaligned, 1.0))


# FLOPs of attention's forward over length squared and heads, as measured: causal, with heads 64 wide. Other widths and
# masks count as more heads, or as parts of a head.
_HEAD_FLOPS = 128.0


def scores_s(rates: Rates, scores: Scores, backward: bool) -> Numbers:
    """Seconds of attention in one kernel: its products, and an exponential for each score. Its backward recomputes the
    scores: 2.5 times the FLOPs of the forward.

    Public figures of FlashAttention 3 on H100 (arXiv 2407.08608, figure 5: 497, 648 and 756 TFLOP/s with heads of 64,
    128 and 256) are, within 3 %, products at 0.955 of the peak and exponentials at the rate of the hardware, one after
    the other. Kernels for Blackwell hide most of the shorter behind the longer: FlashAttention 4's 1,613 TFLOP/s on
    B200 with heads of 128 (arXiv 2603.05451) and cuDNN's 1,157 on GB200 with heads of 64 (github.com/Dao-AILab/
    flash-attention, pull request 2605) are products at 0.79 of the peak, as cuBLAS reaches, and 0.87 hidden.
    """
    scores = replace(scores, pairs=scores.pairs + scores.unseen) if backward else scores
    if rates.measured is not None and rates.measured.knows("attention", rates.attention_number):
        heads = scores.flops / (_HEAD_FLOPS * scores.length**2)
        return rates.measured.seconds("attention", rates.attention_number, rates.busy, scores.length, heads)[backward]
    rate = rates.attention_backward if backward else rates.attention_forward
    share = scores.length / (scores.length + rates.attention_half)
    products_s = scores.flops * (2.5 if backward else 1.0) / rate
    exponentials_s = scores.pairs / rates.exponentials
    hidden_s = rates.exponentials_hidden * np.minimum(products_s, exponentials_s)
    return (products_s + exponentials_s - hidden_s) / share


@dataclass(frozen=True)
class KernelTime:
    """Seconds of an operator's kernels: its forward, its input gradient and its weight gradient."""

    forward: Numbers
    input_grad: Numbers
    weight_grad: Numbers

    def times(self, factor: Numbers) -> "KernelTime":
        """The kernels' seconds times a factor."""
        return KernelTime(factor * self.forward, factor * self.input_grad, factor * self.weight_grad)

    def in_backward(self) -> "KernelTime":
        """The kernels' seconds, all counted as input gradient."""
        return KernelTime(0.0 * self.forward, self.forward + self.input_grad + self.weight_grad, 0.0 * self.forward)


def operator_s(rates: Rates, software: SoftwareSpec, operator: Operator, is_narrow: bool) -> KernelTime:
    """Seconds of all kernels of an operator. `is_narrow`: its products with weights are computed in fp8 or fp4."""
    forward, input_grad = _elementwise_s(rates, software, operator)
    weight_grad: Numbers = 0.0
    for p in operator.products:
        if p.nf4_bytes:  # one kernel reads what is stored, and writes numbers (precision/nf4.py)
            numbers_s = (p.nf4_bytes + rates.element_bytes) * p.batch * p.inner * p.columns / rates.memory_bytes_per_s
            forward, input_grad = forward + numbers_s, input_grad + numbers_s
        narrow = is_narrow and p.weight and not p.is_wide
        rate = rates.flops_product if narrow else rates.flops_wide
        r, i, c, batch = np.broadcast_arrays(p.rows, p.inner, p.columns, p.batch)
        if not narrow and rates.measured is not None and rates.measured.knows("product", rates.number):
            table_s = rates.measured.seconds("product", rates.number, rates.busy, r, i, c)
            pass_s = [batch * seconds for seconds in table_s]
            forward, input_grad = forward + pass_s[0], input_grad + pass_s[1]
            weight_grad = weight_grad + pass_s[2] * (not p.is_frozen)
            continue
        # Y = X W, then dX = dY W' and dW = X' dY.
        passes = product_s(rates, np.stack((r, r, i)), np.stack((i, c, r)), np.stack((c, i, c)), batch=batch, rate=rate)
        weight_s = passes[2]
        if narrow and not software.float8_weight_gradients:
            weight_s = product_s(rates, i, r, c, batch=batch, rate=rates.flops_wide)
        forward, input_grad = forward + passes[0], input_grad + passes[1]
        weight_grad = weight_grad + weight_s * (not p.is_frozen)
        if p.weight and not p.is_frozen:
            weight_grad = (
                weight_grad + _added_bytes(rates, software) * p.batch * p.inner * p.columns / rates.memory_bytes_per_s
            )
        if narrow:
            cast = rates.cast if software.float8_fused else 1.0
            forward = forward + cast * software.float8[0] * p.batch * p.rows * p.inner / rates.memory_bytes_per_s
            input_grad = (
                input_grad + cast * software.float8[1] * p.batch * p.rows * p.columns / rates.memory_bytes_per_s
            )
            if software.float8_weight_gradients and not p.is_frozen:
                elements = p.batch * p.rows * (p.inner + p.columns)
                weight_grad = weight_grad + software.float8_gradient * elements / rates.memory_bytes_per_s
                if software.float8_gradient:  # the product is a separate tensor, added later
                    weight_grad = weight_grad + _ADDED_APART * p.batch * p.inner * p.columns / rates.memory_bytes_per_s
    if operator.scores:
        forward = forward + scores_s(rates, operator.scores, False)
        input_grad = input_grad + scores_s(rates, operator.scores, True)
    if not any(p.weight for p in operator.products):
        input_grad, weight_grad = input_grad + weight_grad, 0.0
    return KernelTime(forward, input_grad, weight_grad)


def _elementwise_s(rates: Rates, software: SoftwareSpec, operator: Operator) -> tuple[Numbers, Numbers]:
    """Seconds of an operator's elementwise work, (forward, backward): as measured for this runtime's own kernels, or at
    the rate of the memory."""
    measured, kernel = rates.measured, operator.kernel
    if software.is_own and kernel and measured is not None and measured.knows(kernel, rates.number):
        forward, backward = measured.seconds(kernel, rates.number, rates.busy, operator.elements)
        is_there = np.asarray(operator.elements) > 0
        return np.where(is_there, forward, 0.0), np.where(is_there, backward, 0.0)
    return operator.forward_bytes / rates.memory_bytes_per_s, operator.backward_bytes / rates.memory_bytes_per_s


def _added_bytes(rates: Rates, software: SoftwareSpec) -> int:
    """Bytes moved for each element of a weight, beyond its product, to add its gradient to those of earlier
    microbatches."""
    gradient_bytes = software.gradient_bytes
    # Apart, the product's result is read, and the sum is read and written; shards are a part of all.
    return {"product": gradient_bytes, "apart": rates.element_bytes + 2 * gradient_bytes, "shards": 0}[software.adds]
