"""Sums of gradients in the memory of a parameter: of matrix products, of blocks of rows, and of rows of a table.

Shape suffixes: T tokens, N outputs, H inputs; V rows of a table, H their width, h some of it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

import shardwright.parallel.tensor.added_on_meta  # noqa: F401 - registers what dry runs under torch 2.11 lack
from shardwright.sharding.block_sizes import rows_at_once


def add_product(sum_NH: Tensor, dy_TN: Tensor, x_TH: Tensor, has_sum: bool, kind: str) -> None:
    """Add dy^T x to a sum, or write it if there is no sum yet, with the kernels of a kind of device."""
    dy_NT = dy_TN.t()
    is_one_kernel = kind == "cuda" and sum_NH.dtype == torch.float32
    if sum_NH.dtype == dy_TN.dtype:
        sum_NH.addmm_(dy_NT, x_TH) if has_sum else torch.mm(dy_NT, x_TH, out=sum_NH)
    elif is_one_kernel and has_sum:
        torch.addmm(sum_NH, dy_NT, x_TH, out_dtype=sum_NH.dtype, out=sum_NH)
    elif is_one_kernel:
        torch.mm(dy_NT, x_TH, out_dtype=sum_NH.dtype, out=sum_NH)
    else:
        num_rows = rows_at_once(x_TH.shape[1], x_TH.element_size())
        for sum_RH, dy_RT in zip(sum_NH.split(num_rows), dy_NT.split(num_rows), strict=True):
            sum_RH.add_(dy_RT @ x_TH) if has_sum else sum_RH.copy_(dy_RT @ x_TH)


def add_blocks(sum_NH: Tensor, blocks: Iterable[tuple[slice, Tensor]], has_sum: bool) -> None:
    """Add blocks of rows to a sum, or write them if there is no sum yet."""
    for rows, block in blocks:
        sum_NH[rows].add_(block) if has_sum else sum_NH[rows].copy_(block)


# The number of rows that one thread sums in sequence: a token with thousands of rows is summed in two rounds.
_PIECE = 64


_ELEMENTS = 1 << 22  # of a block of columns, 16 MiB


def add_rows_in_order(table_VH: Tensor, rows_T: Tensor, dy_TH: Tensor) -> None:
    """Add row t of dy to row `rows_T[t]` of a table, each sum in a fixed order.

    On CUDA `index_add_` adds with atomics, in any order, so that two passes differ. In 16 bits it also rounds after
    each addition, so that a frequent token loses nearly all of its gradient. Here the rows of one token become
    neighbours, are summed in float32 in their order, and are added to the table once.

    Only the device knows how many different tokens there are, and the host does not wait for the number: there are as
    many sums as rows, and the surplus sums are of no rows. Each row then writes the new table row of its token; rows of
    the same token write the same values.
    """
    if not len(rows_T):
        return
    row_T, order_T = rows_T.sort(stable=True)
    number_T = torch.arange(len(rows_T), device=rows_T.device)
    is_new_T = torch.ones_like(row_T, dtype=torch.bool)
    is_new_T[1:] = row_T[1:] != row_T[:-1]
    token_T = is_new_T.cumsum(0) - 1
    piece_T = (is_new_T | (number_T % _PIECE == 0)).cumsum(0) - 1
    starts = torch.arange(len(rows_T) + 1, device=rows_T.device)
    rows_of_piece_T = torch.searchsorted(piece_T, starts).diff()
    # After the last row there is one more piece: there the surplus tokens begin, which have no rows.
    first_pieces = torch.cat((piece_T, piece_T[-1:] + 1))
    pieces_of_token_T = first_pieces[torch.searchsorted(token_T, starts)].diff()
    for columns in _column_blocks(dy_TH):
        dy_Th = dy_TH[:, columns].index_select(0, order_T).float()
        pieces_Th = torch.segment_reduce(dy_Th, "sum", lengths=rows_of_piece_T, unsafe=True)
        sums_Th = torch.segment_reduce(pieces_Th, "sum", lengths=pieces_of_token_T, unsafe=True)
        del dy_Th, pieces_Th
        table_Vh = table_VH[:, columns]
        sum_Th = sums_Th.index_select(0, token_T).add_(table_Vh.index_select(0, row_T))
        table_Vh.index_copy_(0, row_T, sum_Th.to(table_Vh.dtype))


def _column_blocks(x_TH: Tensor) -> list[slice]:
    """The columns of x, in blocks."""
    num_columns = max(1, _ELEMENTS // len(x_TH))
    return [slice(first, first + num_columns) for first in range(0, x_TH.shape[1], num_columns)]
