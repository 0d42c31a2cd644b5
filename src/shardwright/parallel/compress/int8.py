"""Gradients in 8 bits on the wire, with error feedback for gradients and for sums.

Each block of 256 elements is divided by its largest absolute value and rounded to whole 127ths (blocks as in Dettmers
et al. 2021, arXiv 2110.02861, with even steps). The sum is the compressed all-reduce of 1-bit Adam (Tang et al. 2021,
arXiv 2102.02888): every rank quantises its gradient plus its error of the last step, and sends each rank its share;
that rank sums the shares in float32, adds its error of quantising the last sum, quantises, and all-gathers.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from shardwright.config.plan import PlanSpec
from shardwright.parallel.comm.collectives import Pending
from shardwright.parallel.compress.bucket import Bucket, ErrorFeedback, ErrorKind, ErrorSpan, error_spans
from shardwright.parallel.compress.compressor import Method
from shardwright.parallel.compress.wire import Wire, pack, unpack
from shardwright.sharding.compressions.int8 import BLOCK, SCALE_BYTES, int8_bytes, whole_blocks

# Shapes: d ranks of the axis; C elements of a rank's share, whole blocks; M bytes of its message: C codes, then scales.


class Int8(Method):
    """Sums in 8 bits and a scale for each block, with the errors of quantising gradients and of quantising sums."""

    def __init__(self) -> None:
        self._gradient_error = ErrorFeedback()
        self._sum_error = ErrorFeedback()

    def sum_over(self, tensors: list[Tensor], wire: Wire) -> Iterator[Pending]:
        """All-to-all of quantised shares, then all-gather of their quantised sums."""
        d = wire.axis.size
        share = whole_blocks(-(-sum(tensor.numel() for tensor in tensors) // d))
        gradient_dC = pack(tensors, torch.float32, d * share).view(d, share)
        message_dM = _quantise_with_feedback(gradient_dC, self._gradient_error)
        received_dM = torch.empty_like(message_dM)
        yield wire.all_to_all(received_dM, message_dM)
        sum_C = _dequantise(received_dM).sum(0)
        yield wire.all_gather(message_dM, _quantise_with_feedback(sum_C.view(1, share), self._sum_error))
        unpack(_dequantise(message_dM).view(-1), tensors)

    def scatter_over(self, flat: Tensor, tensors: list[Tensor], out: Tensor, wire: Wire) -> Iterator[Pending]:
        """All-to-all of quantised shares. The sum itself is not quantised."""
        d, length = wire.axis.size, out.numel()
        gradient_dC = flat.new_zeros(d, whole_blocks(length), dtype=torch.float32)
        gradient_dC[:, :length] = flat.view(d, length)
        message_dM = _quantise_with_feedback(gradient_dC, self._gradient_error)
        received_dM = torch.empty_like(message_dM)
        yield wire.all_to_all(received_dM, message_dM)
        out.copy_(_dequantise(received_dM).sum(0)[:length])

    def state_tensors(self) -> list[Tensor]:
        """Both errors."""
        return [*self._gradient_error.state_tensors(), *self._sum_error.state_tensors()]

    def error_kinds(self, is_scattered: bool) -> tuple[ErrorKind, ...]:
        """The error of the gradients, and the error of the sums if these are quantised."""
        return ("lost",) if is_scattered else ("lost", "served")

    def errors(self, bucket: Bucket, device: torch.device) -> Iterator[ErrorSpan]:
        """The errors of quantising gradients; and of the sums of this rank's share, if these are quantised too."""
        d = bucket.num_ranks
        if bucket.is_scattered:
            error_dC = self._gradient_error.lost_or_zeros((d, whole_blocks(bucket.share)), device)
            for i, error_C in enumerate(error_dC):
                yield from error_spans("lost", bucket, i * bucket.share, error_C[: bucket.share])
            return
        share, packed = whole_blocks(-(-bucket.num_elements // d)), bucket.packed()
        yield from error_spans("lost", packed, 0, self._gradient_error.lost_or_zeros((d, share), device).view(-1))
        yield from error_spans(
            "served", packed, bucket.index * share, self._sum_error.lost_or_zeros((1, share), device).view(-1)
        )


def of_plan(plan: PlanSpec) -> Int8:
    """The method of a plan."""
    return Int8()


def _quantise_with_feedback(x_dC: Tensor, error: ErrorFeedback) -> Tensor:
    """The message of `x_dC` plus the error; `x_dC` becomes the new error."""
    error.add_to(x_dC)
    message_dM = _quantise(x_dC)
    error.keep(x_dC.sub_(_dequantise(message_dM)))
    return message_dM


def _quantise(x_dC: Tensor) -> Tensor:
    """Codes of 8 bits and float32 scales, as bytes.

    A block with an element that is not finite gets a scale that is not finite, and dequantises to such values.
    """
    d, share = x_dC.shape
    blocks = x_dC.view(d, -1, BLOCK)
    scales = blocks.abs().amax(2) / 127
    # Division, since the inverse of the smallest scales is infinite. Clamping beyond 127 is an error like rounding.
    codes = (blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(2)).round_().clamp_(-127, 127)
    message_dM = torch.empty(d, int8_bytes(share), dtype=torch.uint8, device=x_dC.device)
    message_dM[:, :share] = codes.nan_to_num_(0.0).to(torch.int8).view(d, share).view(torch.uint8)
    message_dM[:, share:] = scales.view(torch.uint8)
    return message_dM


def _dequantise(message_dM: Tensor) -> Tensor:
    """The values of a message, [d, C] in float32."""
    d, length = message_dM.shape
    share = length // (BLOCK + SCALE_BYTES) * BLOCK
    codes = message_dM[:, :share].contiguous().view(torch.int8).view(d, -1, BLOCK)
    scales = message_dM[:, share:].contiguous().view(torch.float32)
    return (codes * scales.unsqueeze(2)).view(d, share)
