"""Tensors of a model's folder as plain numbers, from files of any format: 16 or 32 bits, quantised, or pickled.

A quantised weight has a tensor of values and a tensor of scales:

    W, W_scale_inv      fp8 with a float32 scale for each block of 128 x 128 elements (DeepSeek-V3, section 3.3)
    W, W_scale          fp8 with a scale for each row, or one scale for all
    W_blocks, W_scales  MXFP4: pairs of 4-bit numbers, low half first, and for each 32 numbers an exponent of 2 with a
                        bias of 127 (OCP microscaling formats 1.0, section 5.3). Rows and columns are transposed against
                        the plain tensor, as in the experts of gpt-oss.

Values are read in parts along the first dim, so that one part is in memory at a time.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shardwright.config.base import PlanError, error_text, shortened
from shardwright.config.phrase import say
from shardwright.config.units import MIB, counted_phrase
from shardwright.train.checkpoint.pickled_weights import PICKLED, PICKLED_INDEX, PickledFiles
from shardwright.train.checkpoint.released_files import ReleasedFiles, listed
from shardwright.train.checkpoint.safetensors_folder import INDEX, ONE_FILE
from shardwright.train.checkpoint.safetensors_format import StoredTensor

_PART_ELEMENTS = 4 * MIB
_FP8 = ("F8_E4M3", "F8_E5M2")
_PLAIN = {"F64": "F32", "F32": "F32", "F16": "F16", "BF16": "BF16"}  # plain number types: as read, and as written
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes: two bits of exponent, one of mantissa; a bit is the sign
_EXPONENT_BIAS = 127
_BLOCK = 32


class StoredFiles(Protocol):
    """The tensors of a folder by name, as its files store them."""

    tensors: dict[str, StoredTensor]

    def view(self, name: str) -> Tensor:
        """A tensor as a view of the mapped file."""
        ...

    def forget(self) -> None:
        """Tell the system that pages which have been read are not needed again."""
        ...


@dataclass(frozen=True)
class PlainTensor:
    """A tensor as plain numbers. `dtype` is its own number type, or bf16 if it is quantised; `rows` returns its values
    of rows [start, stop)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_weight: bool  # False for integers, such as positions
    rows: Callable[[int, int], Tensor]

    def parts(self) -> Iterator[Tensor]:
        """The values in their order, some rows at a time."""
        num_rows, row_size = (self.shape[0], math.prod(self.shape[1:])) if self.shape else (1, 1)
        step = max(1, _PART_ELEMENTS // max(1, row_size))
        for start in range(0, num_rows, step):
            yield self.rows(start, min(start + step, num_rows))


def stored_files(folder: Path) -> StoredFiles:
    """The files of a folder: safetensors, or else pickled ones. Raises PlanError."""
    is_plain = (folder / ONE_FILE).exists() or (folder / INDEX).exists()
    has_pickled = (folder / PICKLED).exists() or (folder / PICKLED_INDEX).exists()
    return ReleasedFiles(folder) if is_plain or not has_pickled else PickledFiles(folder)


def plain_tensors(files: StoredFiles) -> list[PlainTensor]:
    """All tensors of a folder as plain numbers, in the order of its files. Raises PlanError with every tensor that
    can't be read as plain numbers."""
    plain, faults = list[PlainTensor](), list[str]()
    packed = {
        name: None
        for name, stored in files.tensors.items()
        if stored.dtype not in (*_PLAIN, *_FP8) and _is_packed(name) and not _is_mxfp4(name, files.tensors)
    }
    if packed:
        faults.append(
            say(
                "{tensors} of integers stand for weights, of a quantisation that is not read here (GPTQ and AWQ have "
                "such): {names}; name a folder of plain weights",
                tensors=counted_phrase(len(packed), "tensor"),
                names=listed(list(packed)),
            )
        )
    for name, stored in files.tensors.items():
        if name in packed:
            continue
        try:
            tensor = _plain(files, name, stored)
        except ValueError as error:
            faults.append(say("{reason}; fetch it again, or name a folder of plain weights", reason=error_text(error)))
        else:
            plain += [tensor] if tensor is not None else []
    if faults:
        raise PlanError("weights", faults)
    return plain


def _plain(files: StoredFiles, name: str, stored: StoredTensor) -> PlainTensor | None:
    """A tensor as plain numbers; None if it holds the scales of another. Raises ValueError."""
    tensors = files.tensors
    if _is_scale(name, tensors):
        return None
    if _is_mxfp4(name, tensors):
        return _from_mxfp4(files, name.removesuffix("_blocks"))
    if stored.dtype in _FP8:
        return _from_fp8(files, name)
    if stored.dtype in _PLAIN:
        return PlainTensor(name, stored.shape, _PLAIN[stored.dtype], True, lambda a, b: _rows(files.view(name), a, b))
    return PlainTensor(name, stored.shape, stored.dtype, False, lambda a, b: _rows(files.view(name), a, b))


def _rows(values: Tensor, start: int, stop: int) -> Tensor:
    return values[start:stop] if values.dim() else values


def _is_scale(name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """True if a tensor holds the scales of another."""
    for suffix in ("_scale_inv", "_scale"):
        if name.endswith(suffix):
            scaled = tensors.get(name.removesuffix(suffix))
            return scaled is not None and scaled.dtype in _FP8
    return name.endswith("_scales") and name.removesuffix("scales") + "blocks" in tensors


def _is_mxfp4(name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """True if a tensor holds the pairs of 4-bit numbers of an MXFP4 weight."""
    return name.endswith("_blocks") and name.removesuffix("blocks") + "scales" in tensors


def _is_packed(name: str) -> bool:
    """True if the name of a tensor of integers says that it stands for weights, as in GPTQ and AWQ."""
    return name.endswith(("qweight", "qzeros", "weight", "weight_packed", "_blocks"))


def _from_fp8(files: StoredFiles, name: str) -> PlainTensor:
    """A tensor of 8 bits, multiplied by its scales. Raises ValueError."""
    tensors = files.tensors
    shape = tensors[name].shape
    scales = next((name + suffix for suffix in ("_scale_inv", "_scale") if name + suffix in tensors), "")
    if not scales:
        raise ValueError(
            say(
                "{tensor} is of {dtype}, and no tensor beside it says its scales",
                tensor=shortened(name),
                dtype=tensors[name].dtype,
            )
        )
    grid = tensors[scales].shape
    if tensors[scales].dtype not in _PLAIN:
        raise ValueError(
            say(
                "{scales} is of {dtype}, which are no scales that are read here",
                scales=shortened(scales),
                dtype=tensors[scales].dtype,
            )
        )
    has_one_scale, block_sizes = grid in ((), (1,)), list[int]()
    if not has_one_scale:
        block_sizes = [_block_size(size, num_blocks) for size, num_blocks in zip(shape, grid, strict=False)]
        if len(grid) != len(shape) or not all(block_sizes):
            raise ValueError(
                say(
                    "{scales} is {grid}, which are no blocks of {name} {shape}",
                    scales=shortened(scales),
                    grid=list(grid),
                    name=name,
                    shape=list(shape),
                )
            )

    def rows(start: int, stop: int) -> Tensor:
        values, factors = files.view(name)[start:stop].float(), files.view(scales).float()
        if has_one_scale:
            return values.mul_(factors.reshape(()))
        block_of_row = torch.arange(start, stop) // block_sizes[0]
        factors = factors[block_of_row]
        for dim, block_size in enumerate(block_sizes[1:], 1):
            factors = factors.repeat_interleave(block_size, dim).narrow(dim, 0, shape[dim])
        return values.mul_(factors)

    return PlainTensor(name, shape, "BF16", True, rows)


def _block_size(size: int, num_blocks: int) -> int:
    """Elements of a block along a dim of `size` elements; 0 if no size fits. A block has all elements, one, or a power
    of two of them; the last block may be shorter."""
    if num_blocks in (1, size):
        return size if num_blocks == 1 else 1
    return next((block for block in (2**k for k in range(1, 16)) if -(-size // block) == num_blocks), 0)


def _from_mxfp4(files: StoredFiles, name: str) -> PlainTensor:
    """A tensor of 4-bit numbers [E, rows, blocks, 16 bytes] as plain numbers [E, 32 x blocks, rows]. Raises
    ValueError."""
    blocks, scales = files.tensors[name + "_blocks"], files.tensors[name + "_scales"]
    if blocks.dtype != "U8" or scales.dtype != "U8" or len(blocks.shape) != 4 or blocks.shape[3] != _BLOCK // 2:
        raise ValueError(
            say(
                "{tensor}_blocks {blocks} of {dtype} is no tensor of MXFP4",
                tensor=shortened(name),
                blocks=list(blocks.shape),
                dtype=blocks.dtype,
            )
        )
    if scales.shape != blocks.shape[:3]:
        raise ValueError(
            say(
                "{tensor}_scales is {shape} beside blocks {blocks}",
                tensor=shortened(name),
                shape=list(scales.shape),
                blocks=list(blocks.shape),
            )
        )
    num_experts, num_rows, num_blocks, _ = blocks.shape
    # The two numbers of a byte, by the value of the byte.
    numbers = torch.tensor([_FP4[code & 7] * (-1) ** (code >> 3) for code in range(16)])
    table = torch.stack([numbers.repeat(16), numbers.repeat_interleave(16)], dim=1)

    def experts(start: int, stop: int) -> Tensor:
        bytes_ERNB = files.view(name + "_blocks")[start:stop]
        exponents = files.view(name + "_scales")[start:stop].int() - _EXPONENT_BIAS
        values = table[bytes_ERNB.int()].flatten(3)
        values = torch.ldexp(values, exponents[..., None])
        return values.reshape(stop - start, num_rows, num_blocks * _BLOCK).transpose(1, 2).contiguous()

    return PlainTensor(name, (num_experts, num_blocks * _BLOCK, num_rows), "BF16", True, experts)
