"""The product of two fp8 matrices, by the device's instructions if it has them, else by emulation.

The emulation is exact except for the order of the sum. The values of e4m3 and e5m2 are numbers of bf16 too, also after
multiplication by a power of two. The product of two of them has at most 8 bits of fraction and is exact in float32, in
which both the device and the emulation sum. DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) sums in full float32 only
every 128 elements, because the sums of the tensor core keep about 14 bits; here every sum is in float32.

Shape suffixes: M and N rows of the operands, C the dim that is contracted.
"""

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.precision.float8 import E4M3, Granularity, Quantised, spread, transposed
from shardwright.precision.fused_operator import fused_operator
from shardwright.precision.scaled_mm import has_scaled_product, scaled_product

_SIGN_AND_E4M3_AS_BF16 = -0x8000 | 0x07F0
_BIAS_OF_BF16_OVER_E4M3 = 127 - 7


def product(a: Quantised, b: Quantised, out_dtype: torch.dtype) -> Tensor:
    """a b^T: [M, C] and [N, C] to [M, N], summed in float32 and rounded once to `out_dtype`."""
    if has_scaled_product(a, b, out_dtype):
        return scaled_product(a, b, out_dtype)
    if a.values.is_meta:  # no emulation in a dry run: it stands for a device, which needs memory only for the result
        return a.values.new_empty((a.values.shape[0], b.values.shape[0]), dtype=out_dtype)
    return emulated_product(a, b, out_dtype)


def plain_product(a: Quantised, b: Quantised, out_dtype: torch.dtype) -> Tensor:
    """a b: [M, C] and [C, N] to [M, N], for a `b` whose scales serve both directions. Devices need b transposed first,
    which is a pass over its bytes; the emulation does not."""
    if a.values.device.type != "cpu":
        return product(a, transposed(b), out_dtype)
    operand_dtype = _operand_dtype(out_dtype)
    return (dequantise(a, operand_dtype) @ dequantise(b, operand_dtype)).to(out_dtype)


def emulated_product(a: Quantised, b: Quantised, out_dtype: torch.dtype) -> Tensor:
    """The product on any device, of the dequantised operands.

    They are in bf16 if the result is bf16: such a product sums in float32 too, and is the fastest one on a CPU.
    """
    operand_dtype = _operand_dtype(out_dtype)
    return functional.linear(dequantise(a, operand_dtype), dequantise(b, operand_dtype)).to(out_dtype)


def _operand_dtype(out_dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32


def dequantise(matrix: Quantised, dtype: torch.dtype) -> Tensor:
    """The exact values of a quantised matrix, in float32 or bf16."""
    out = torch.empty_like(matrix.values, dtype=dtype)
    _dequantise(matrix.values, matrix.scales, matrix.granularity, out)
    return out


def _dequantise_in_turn(values: Tensor, scales: Tensor, granularity: Granularity, out: Tensor) -> None:
    out.copy_(_cast_to_wide(values, out.dtype))
    spread_out, spread_scales = spread(out, scales, granularity)
    spread_out.mul_(spread_scales)


def _dequantise_at_once(values: Tensor, scales: Tensor, granularity: Granularity, out: Tensor) -> None:
    spread_out, spread_scales = spread(values.float(), scales, granularity)
    out.copy_((spread_out * spread_scales).view(out.shape))


_dequantise = fused_operator(
    "dequantise(Tensor values, Tensor scales, str granularity, Tensor(a!) wide) -> ()",
    _dequantise_in_turn,
    _dequantise_at_once,
)


def _cast_to_wide(values: Tensor, dtype: torch.dtype) -> Tensor:
    if values.dtype != E4M3:
        return values.to(dtype)
    # PyTorch's own cast of e4m3 takes 3 to 5 ns an element on a CPU, this takes 0.3. The bits of e4m3, shifted to their
    # places in bf16, are the same number except for the exponent's bias, also for subnormals. Only nan becomes a
    # number, 480, but then the scale is nan.
    bits = values.view(torch.int8).to(torch.int16).bitwise_left_shift_(4).bitwise_and_(_SIGN_AND_E4M3_AS_BF16)
    return bits.view(torch.bfloat16).to(dtype).mul_(2.0**_BIAS_OF_BF16_OVER_E4M3)
