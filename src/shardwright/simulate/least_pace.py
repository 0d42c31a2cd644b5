"""The least time that the slowest pipeline rank takes for a microbatch, over all layouts of layers over stages."""

from dataclasses import dataclass

import numpy as np

from shardwright.layers.arrays import Array, Numbers

_ROUNDING = 1e-9  # of a layer: tolerance for a quotient that is an integer except for rounding


@dataclass(frozen=True)
class MicrobatchPieces:
    """Seconds of one microbatch, by plan: of a layer of the shortest kind, the embedding, the head, and of everything
    together; and the number of layers."""

    layer_s: Numbers
    embedding_s: Numbers
    head_s: Numbers
    whole_s: Numbers
    num_layers: int


def least_pace_s(pp: Array, num_copies: Numbers, pieces: MicrobatchPieces, has_ends_apart: Array) -> Array:
    """Least seconds of the slowest rank, by plan; with `num_copies` of each stage a microbatch meets one of them.

    No rank is faster than the mean, the fullest rank has its part of the layers, rounded up, and one rank has the head.
    If the embedding and the head lie on different ranks (`has_ends_apart`), each rank takes as many whole layers as fit
    into its time, and all ranks together must have room for all layers.
    """
    layer_s = np.maximum(np.asarray(pieces.layer_s, dtype=float), 1e-30)  # no division by zero
    fullest_layers = -(-num_copies * pieces.num_layers // pp) / num_copies
    least_s = np.maximum(np.maximum(pieces.whole_s / pp, fullest_layers * layer_s), pieces.head_s / num_copies)
    least_apart_s = least_s + layer_s  # with one layer more there is always room
    ends = pieces.embedding_s, pieces.head_s
    # Room grows only at paces at which some rank is exactly full: of whole layers, alone or with one of the ends.
    for begin_s in (0.0 * layer_s, *ends):
        num_layers = np.ceil((least_s - begin_s) / layer_s - _ROUNDING)
        for count in (num_layers, num_layers + 1):
            pace_s = np.maximum(least_s, begin_s + count * layer_s)
            room = sum(np.floor((pace_s - end_s) / layer_s + _ROUNDING) for end_s in ends)
            room = room + (pp - 2) * np.floor(pace_s / layer_s + _ROUNDING)
            is_less = (room >= pieces.num_layers) & (pace_s < least_apart_s)
            least_apart_s = np.where(is_less, pace_s, least_apart_s)
    return np.asarray(np.where(has_ends_apart & (pp > 1), least_apart_s, least_s))
