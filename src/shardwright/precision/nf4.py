"""NF4: numbers of 4 bits whose 16 levels are quantiles of a normal distribution (QLoRA: Dettmers et al. 2023, arXiv
2305.14314, section 3 and appendix E). The rows are described in config/nf4_rows.py.

Quantising is that of bitsandbytes: an element divided by its block's scale becomes the nearest level; of two codes in a
byte the first is in the upper bits. Scales in 8 bits take the nearest of bitsandbytes' 256 dynamic levels above 0. It
also subtracts a mean of all scales of a matrix, which ranks that hold parts of it do not know.

Making numbers is an operator that CUDA computes in one kernel (precision/fused_operator.py): each element is shifted
out of its word, its level looked up, and the two scales multiplied. A CPU makes some rows at a time.

Shape suffixes: R rows, C columns (elements of a row), B blocks of a row, G groups of a whole row, W words.
"""

from functools import lru_cache

import torch
from torch import Tensor

from shardwright.config.nf4_rows import BLOCK, CODES, GROUP, WORD_BYTES, Nf4Row
from shardwright.precision.fused_operator import fused_operator

LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

# Elements that a CPU makes numbers at once; each needs 10 bytes more, while its block is at work.
_AT_ONCE = 1 << 20
_GROUP_BITS = GROUP.bit_length() - 1


def quantise(values_RC: Tensor, row: Nf4Row) -> Tensor:
    """Rows in NF4, [R, W] in int32, from whole rows in float32 if scales are quantised, else from the part of each that
    `row` is."""
    blocks_RBE = values_RC.unflatten(-1, (-1, BLOCK))
    scales_RB = blocks_RBE.abs().amax(-1)
    if row.is_double:
        greatest_RG, bytes_RB = _quantise_scales(scales_RB)
        own = slice(row.first // BLOCK, row.stop // BLOCK)
        blocks_RBE, scales_RB, bytes_RB = blocks_RBE[:, own], scales_RB[:, own], bytes_RB[:, own]
        padded = torch.nn.functional.pad(bytes_RB, (0, WORD_BYTES * row.scale_words - row.num_blocks))
        parts = [padded.contiguous().view(torch.int32), greatest_RG.view(torch.int32)]
    else:
        parts = [scales_RB.contiguous().view(torch.int32)]
    scaled_RC = (blocks_RBE / torch.where(scales_RB > 0, scales_RB, 1.0).unsqueeze(-1)).flatten(1)
    codes_RC = _nearest(scaled_RC, levels("nf4", values_RC.device))
    packed = codes_RC[:, 0::2] * 16 + codes_RC[:, 1::2]
    return torch.cat((packed.to(torch.uint8).contiguous().view(torch.int32), *parts), dim=1)


def dequantise(words_RW: Tensor, row: Nf4Row, dtype: torch.dtype) -> Tensor:
    """The elements of rows in NF4, [R, C] in a dtype: levels times scales, computed in float32."""
    values_RC = torch.empty(len(words_RW), row.num_elements, dtype=dtype, device=words_RW.device)
    _numbers(words_RW, *_tables(row.is_double, words_RW.device), row.first // BLOCK, values_RC)
    return values_RC


@lru_cache(maxsize=16)
def _tables(is_double: bool, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The levels of codes and of scales in 8 bits, each a row of a matrix, whose width is fixed in a kernel: it then
    needs no checks of what it looks up."""
    return levels("nf4", device).unsqueeze(0), levels("scales", device).unsqueeze(0) if is_double else None


def _numbers_in_turn(
    words_RW: Tensor, levels_1L: Tensor, scale_levels_1L: Tensor | None, first: int, out_RC: Tensor
) -> None:
    rows_at_once = max(1, _AT_ONCE // out_RC.shape[1])
    pairs_P2 = levels("nf4 pairs", words_RW.device)
    for row in range(0, len(words_RW), rows_at_once):
        part = slice(row, row + rows_at_once)
        codes, scales_RB = _codes_and_scales(words_RW[part], scale_levels_1L, first, out_RC.shape[1])
        pairs = pairs_P2.index_select(0, codes.view(torch.uint8).int().flatten())
        out_RBE = out_RC[part].view(*scales_RB.shape, BLOCK)
        torch.mul(pairs.view(out_RBE.shape), scales_RB.unsqueeze(-1), out=out_RBE)


def _numbers_at_once(
    words_RW: Tensor, levels_1L: Tensor, scale_levels_1L: Tensor | None, first: int, out_RC: Tensor
) -> None:
    codes_RW, scales_RB = _codes_and_scales(words_RW, scale_levels_1L, first, out_RC.shape[1])
    number_8 = torch.arange(CODES, dtype=torch.int32, device=words_RW.device)
    values_RC = levels_1L[0, ((codes_RW.unsqueeze(-1) >> 4 * (number_8 ^ 1)) & 15).flatten(1)]
    out_RC.copy_(values_RC * scales_RB.unsqueeze(-1).expand(-1, -1, BLOCK).flatten(1))


def _codes_and_scales(
    words_RW: Tensor, scale_levels_1L: Tensor | None, first: int, num_elements: int
) -> tuple[Tensor, Tensor]:
    """The words of codes, [R, C / 8], and the scales of blocks from number `first` of their rows on, [R, B] in float32,
    in 8 bits if there are levels of scales."""
    num_blocks, code_words = num_elements // BLOCK, num_elements // CODES
    if scale_levels_1L is None:
        return words_RW[:, :code_words], words_RW[:, code_words : code_words + num_blocks].view(torch.float32)
    stop = code_words + -(-num_blocks // WORD_BYTES)
    number_4 = torch.arange(WORD_BYTES, dtype=torch.int32, device=words_RW.device)
    bytes_RB = ((words_RW[:, code_words:stop].unsqueeze(-1) >> 8 * number_4) & 255).flatten(1)[:, :num_blocks]
    greatest_RG = words_RW[:, stop:].view(torch.float32)
    group_B = (torch.arange(num_blocks, dtype=torch.int32, device=words_RW.device) + first) >> _GROUP_BITS
    return words_RW[:, :code_words], scale_levels_1L[0, bytes_RB] * greatest_RG[:, group_B]


# numbers_of_nf4(words_RW, levels_1L, scale_levels_1L, first, out_RC): put the elements of rows in NF4 into `out_RC`.
# The rows are parts of rows, from block `first` on. `levels_1L` are those of codes, `scale_levels_1L` those of scales
# in 8 bits, None if scales are in float32.
_numbers = fused_operator(
    "numbers_of_nf4(Tensor words, Tensor levels, Tensor? scale_levels, int first, Tensor(a!) numbers) -> ()",
    _numbers_in_turn,
    _numbers_at_once,
)


def _quantise_scales(scales_RB: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest scale of each group, [R, G], and scales in 8 bits, [R, B]."""
    groups = scales_RB.split(GROUP, dim=1)
    greatest_RG = torch.stack([group.amax(1) for group in groups], dim=1)
    scaled_RB = scales_RB / _of_blocks(torch.where(greatest_RG > 0, greatest_RG, 1.0), 0, scales_RB.shape[1])
    return greatest_RG, _nearest(scaled_RB, levels("scales", scales_RB.device)).to(torch.uint8)


def _of_blocks(by_group_RG: Tensor, first: int, num_blocks: int) -> Tensor:
    """The numbers of the groups of some blocks, [R, B]."""
    return by_group_RG.repeat_interleave(GROUP, dim=1)[:, first : first + num_blocks]


def _nearest(values: Tensor, levels_L: Tensor) -> Tensor:
    """The number of the level nearest to each value, the lower of two that are as near, int64."""
    return torch.bucketize(values, (levels_L[1:] + levels_L[:-1]) / 2)


@lru_cache(maxsize=16)
def levels(kind: str, device: torch.device) -> Tensor:
    """Levels in float32: of "nf4", [16]; of both codes in a byte, "nf4 pairs", [256, 2]; or of "scales", [256]."""
    if kind == "scales":
        return torch.tensor(_dynamic_levels(), device=device)
    nf4 = torch.tensor(LEVELS, device=device)
    if kind == "nf4":
        return nf4
    codes = torch.arange(256, device=device)
    return torch.stack((nf4[codes // 16], nf4[codes % 16]), dim=1)


def _dynamic_levels() -> list[float]:
    """The 256 levels of bitsandbytes' dynamic type of 8 bits without sign, ascending: 0, 1, and in each of seven powers
    of ten twice as many levels, evenly spread, as in the power below (Dettmers 2016, arXiv 1511.04561)."""
    between = []
    for power in range(7):
        num, scale = 2 ** (power + 1), 10.0 ** (power - 6)
        between += [scale * (0.1 + 0.9 * (i + 0.5) / num) for i in range(num)]
    return sorted([0.0, *between, 1.0])
