"""Tensors of a model's folder as plain numbers, whatever they are stored as: 16 and 32 bits, quantised, or pickled.

Quantised weights have the values of a block, and its scale beside them:

    W, W_scale_inv      fp8 with a float32 scale for each block of 128 x 128 elements (DeepSeek-V3, section 3.3)
    W, W_scale          fp8 with a scale for each row, or one for all
    W_blocks, W_scales  MXFP4: pairs of 4-bit numbers, low half first, and an exponent of 2, with a bias of 127, for
                        each 32 of them (OCP microscaling formats 1.0, section 5.3); rows and columns lie the other way
                        round than in the plain tensor, as gpt-oss has its experts

Values come in parts along the first dim, so that memory is that of a part.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shardwright.config.base import PlanError, shortened
from shardwright.config.units import MIB, counted
from shardwright.train.checkpoint.pickled_weights import PICKLED, PICKLED_INDEX, PickledFiles
from shardwright.train.checkpoint.released_files import ReleasedFiles, StoredTensor, listed
from shardwright.train.checkpoint.safetensors_folder import INDEX, ONE_FILE

_PART_ELEMENTS = 4 * MIB
_FP8 = ("F8_E4M3", "F8_E5M2")
_PLAIN = {"F64": "F32", "F32": "F32", "F16": "F16", "BF16": "BF16"}  # a safetensors file's number types, as written
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and these negative: a sign, two bits of exponent, one of mantissa
_EXPONENT_BIAS = 127
_BLOCK = 32


class StoredFiles(Protocol):
    """The tensors of a folder by name, as they lie in its files."""

    tensors: dict[str, StoredTensor]

    def view(self, name: str) -> Tensor:
        """A tensor as a view of the mapped file."""
        ...

    def forget(self) -> None:
        """Tell the system that pages which were read are not needed again."""
        ...


@dataclass(frozen=True)
class PlainTensor:
    """A tensor that can be written: `dtype` it has, bf16 where it is quantised, and its values from and to a row."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_weight: bool  # else numbers that are counted with, such as positions
    rows: Callable[[int, int], Tensor]

    def parts(self) -> Iterator[Tensor]:
        """The values, in their order, some at a time."""
        num_rows, row = (self.shape[0], math.prod(self.shape[1:])) if self.shape else (1, 1)
        step = max(1, _PART_ELEMENTS // max(1, row))
        for start in range(0, num_rows, step):
            yield self.rows(start, min(start + step, num_rows))


def stored_files(folder: Path) -> StoredFiles:
    """The files of a folder: safetensors, or else pickled ones. Raises PlanError."""
    is_plain = (folder / ONE_FILE).exists() or (folder / INDEX).exists()
    has_pickled = (folder / PICKLED).exists() or (folder / PICKLED_INDEX).exists()
    return ReleasedFiles(folder) if is_plain or not has_pickled else PickledFiles(folder)


def plain_tensors(files: StoredFiles) -> list[PlainTensor]:
    """All tensors of a folder as plain numbers, in the order of its files. Raises PlanError with every tensor that
    can't be read as such."""
    found, faults = list[PlainTensor](), list[str]()
    packed = {
        name: None for name, stored in files.tensors.items()
        if stored.dtype not in (*_PLAIN, *_FP8) and _is_packed(name) and not _is_mxfp4(name, files.tensors)
    }  # fmt: skip
    if packed:
        faults.append(
            f"{counted(len(packed), 'tensor')} of integers stand for weights, of a quantisation that is not read here "
            f"(GPTQ and AWQ have such): {listed(list(packed))}; name a folder of plain weights"
        )
    for name, stored in files.tensors.items():
        if name in packed:
            continue
        try:
            tensor = _plain(files, name, stored)
        except ValueError as error:
            faults.append(f"{error}; fetch it again, or name a folder of plain weights")
        else:
            found += [tensor] if tensor is not None else []
    if faults:
        raise PlanError("weights", faults)
    return found


def _plain(files: StoredFiles, name: str, stored: StoredTensor) -> PlainTensor | None:
    """A tensor as plain numbers; None of one that is the scale of another. Raises ValueError."""
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
    """True if a tensor says how another is scaled."""
    for end in ("_scale_inv", "_scale"):
        if name.endswith(end):
            scaled = tensors.get(name.removesuffix(end))
            return scaled is not None and scaled.dtype in _FP8
    return name.endswith("_scales") and name.removesuffix("scales") + "blocks" in tensors


def _is_mxfp4(name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """True if a tensor is the pairs of 4-bit numbers of a weight."""
    return name.endswith("_blocks") and name.removesuffix("blocks") + "scales" in tensors


def _is_packed(name: str) -> bool:
    """True if a tensor of integers stands for weights, as those of GPTQ and AWQ do."""
    return name.endswith(("qweight", "qzeros", "weight", "weight_packed", "_blocks"))


def _from_fp8(files: StoredFiles, name: str) -> PlainTensor:
    """A tensor of 8 bits with its scales. Raises ValueError."""
    tensors = files.tensors
    shape, scales = tensors[name].shape, next((name + e for e in ("_scale_inv", "_scale") if name + e in tensors), "")
    if not scales:
        raise ValueError(f"{shortened(name)} is of {tensors[name].dtype}, and no tensor beside it says its scales")
    grid = tensors[scales].shape
    if tensors[scales].dtype not in _PLAIN:
        raise ValueError(f"{shortened(scales)} is of {tensors[scales].dtype}, which are no scales that are read here")
    is_one, blocks = grid in ((), (1,)), list[int]()
    if not is_one:
        blocks = [_block(size, num) for size, num in zip(shape, grid, strict=False)]
        if len(grid) != len(shape) or not all(blocks):
            raise ValueError(f"{shortened(scales)} is {list(grid)}, which are no blocks of {name} {list(shape)}")

    def rows(start: int, stop: int) -> Tensor:
        values, factors = files.view(name)[start:stop].float(), files.view(scales).float()
        if is_one:
            return values.mul_(factors.reshape(()))
        at = torch.arange(start, stop) // blocks[0]
        factors = factors[at]
        for dim, block in enumerate(blocks[1:], 1):
            factors = factors.repeat_interleave(block, dim).narrow(dim, 0, shape[dim])
        return values.mul_(factors)

    return PlainTensor(name, shape, "BF16", True, rows)


def _block(size: int, num: int) -> int:
    """Elements of a block along a dim that has so many blocks, the last of which may be short; 0 where none fits. One
    block is all, and one for each element is that; others are powers of two."""
    if num in (1, size):
        return size if num == 1 else 1
    return next((block for block in (2**k for k in range(1, 16)) if -(-size // block) == num), 0)


def _from_mxfp4(files: StoredFiles, name: str) -> PlainTensor:
    """A tensor of 4-bit numbers [E, rows, blocks, 16 bytes] as [E, 32 x blocks, rows]. Raises ValueError."""
    blocks, scales = files.tensors[name + "_blocks"], files.tensors[name + "_scales"]
    if blocks.dtype != "U8" or scales.dtype != "U8" or len(blocks.shape) != 4 or blocks.shape[3] != _BLOCK // 2:
        raise ValueError(f"{shortened(name)}_blocks {list(blocks.shape)} of {blocks.dtype} is no tensor of MXFP4")
    if scales.shape != blocks.shape[:3]:
        raise ValueError(f"{shortened(name)}_scales is {list(scales.shape)} beside blocks {list(blocks.shape)}")
    num, of_rows, across, _ = blocks.shape
    # Both numbers of a byte, by its value.
    pair = torch.tensor([_FP4[low & 7] * (-1) ** (low >> 3) for low in range(16)])
    table = torch.stack([pair.repeat(16), pair.repeat_interleave(16)], dim=1)

    def experts(start: int, stop: int) -> Tensor:
        bytes_ERNB = files.view(name + "_blocks")[start:stop]
        exponents = files.view(name + "_scales")[start:stop].int() - _EXPONENT_BIAS
        values = table[bytes_ERNB.int()].flatten(3)
        values = torch.ldexp(values, exponents[..., None])
        return values.reshape(stop - start, of_rows, across * _BLOCK).transpose(1, 2).contiguous()

    return PlainTensor(name, (num, across * _BLOCK, of_rows), "BF16", True, experts)
