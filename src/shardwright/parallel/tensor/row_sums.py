"""Rows that are added to the rows of a table, each sum in one order.

`index_add_` adds on CUDA with atomics: in whatever order they come, so that two passes differ; and in 16 bits it rounds
after each of them, so that a token which is often there loses nearly all of what it should learn. Here rows of one
token are made neighbours, summed in float32 in their order, and added to the table once.

Nobody but the device knows how many tokens there are, and the host doesn't ask: there are as many sums as rows, and
those behind the last one are of nothing. Each row then writes what its token's row is to be, as often as it has rows:
all write the same.

Shape suffixes: T rows to add, V rows of the table, H their width, h some of it.
"""

import torch
from torch import Tensor

# Rows that one thread sums one after the other: a token that has thousands is summed in two turns.
_PIECE = 64
_ELEMENTS = 1 << 22  # of some columns, 16 MiB


def add_rows_in_order(into_VH: Tensor, rows_T: Tensor, dy_TH: Tensor) -> None:
    """Add row t of dy to row `rows_T[t]` of a table."""
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
    # Behind the last row there is another piece, where tokens begin that there are none of.
    first_pieces = torch.cat((piece_T, piece_T[-1:] + 1))
    pieces_of_token_T = first_pieces[torch.searchsorted(token_T, starts)].diff()
    for columns in _some_columns(dy_TH):
        dy_Th = dy_TH[:, columns].index_select(0, order_T).float()
        pieces_Th = torch.segment_reduce(dy_Th, "sum", lengths=rows_of_piece_T, unsafe=True)
        sums_Th = torch.segment_reduce(pieces_Th, "sum", lengths=pieces_of_token_T, unsafe=True)
        del dy_Th, pieces_Th
        into_Vh = into_VH[:, columns]
        sum_Th = sums_Th.index_select(0, token_T).add_(into_Vh.index_select(0, row_T))
        into_Vh.index_copy_(0, row_T, sum_Th.to(into_Vh.dtype))


def _some_columns(x_TH: Tensor) -> list[slice]:
    """The columns of x, some at a time."""
    num_columns = max(1, _ELEMENTS // len(x_TH))
    return [slice(first, first + num_columns) for first in range(0, x_TH.shape[1], num_columns)]
