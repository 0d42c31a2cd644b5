"""The matrices of a parameter, for optimizers that look at whole matrices, and the places of their rows.

A parameter of a layer may be several matrices: queries, keys and values lie in one tensor, as gate and up do, and all
experts of a layer do (config/model_shape.py). Each is a linear map of its own, and is updated separately; so are the
two halves of latent attention's tensors: the latents of queries and keys, and keys and values.
"""

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from shardwright.config.matrix import Matrix
from shardwright.config.model_shape import ModelShape
from shardwright.sharding.optimizer_state import is_matrix
from shardwright.sharding.parameter_shard import ParameterShard

Range = tuple[int, int]


@dataclass(frozen=True)
class UpdateMatrix:
    """One matrix of a parameter, as one rank of a tensor-parallel line has it.

    Its rows lie in `ranges` of the rows of the rank's part, each row of `columns` elements. `split` says if the ranks
    that share the matrix split its "rows" or its "columns", or each has it "whole". A vector is a matrix of one column.
    """

    ranges: tuple[Range, ...]
    columns: int
    full_rows: int
    full_columns: int
    split: Literal["whole", "rows", "columns"]

    @property
    def rows(self) -> int:
        """Rows that the rank's part has."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def num_elements(self) -> int:
        """Elements that the rank's part has."""
        return self.rows * self.columns

    @property
    def full_elements(self) -> int:
        """Elements of the whole matrix."""
        return self.full_rows * self.full_columns

    def rows_within(self, begin: int, end: int) -> list[Range]:
        """The ranges of its rows that lie within rows [begin, end) of the part."""
        clipped = [(max(begin, start), min(end, stop)) for start, stop in self.ranges]
        return [(start, stop) for start, stop in clipped if start < stop]


def elements_within(matrix: UpdateMatrix, start: int, stop: int) -> list[Range]:
    """The ranges of a matrix's elements among elements [start, stop), counted from `start`; its parameter begins at
    element 0. All ranges end between rows, as shards do."""
    columns = matrix.columns
    rows = matrix.rows_within(-(-max(0, start) // columns), -(-max(0, stop) // columns))
    return [(low * columns - start, high * columns - start) for low, high in rows]


def update_matrices(shape: ModelShape, place: ParameterShard) -> tuple[UpdateMatrix, ...]:
    """The matrices of a parameter, one expert after the other."""
    full_shape, local_shape = place.full_shape, place.shape
    kind_of_cut: Literal["whole", "rows", "columns"]
    lead = int(place.is_expert)
    if not is_matrix(place.name, full_shape):
        kind_of_cut = "rows" if local_shape[lead:] != full_shape[lead:] else "whole"
        num, num_full = math.prod(local_shape[lead:]), math.prod(full_shape[lead:])
        num_vectors = local_shape[0] if lead else 1
        return tuple(UpdateMatrix(((n * num, (n + 1) * num),), 1, num_full, 1, kind_of_cut) for n in range(num_vectors))
    outputs, full_outputs = local_shape[lead:-1], full_shape[lead:-1]
    dim, widths = _side_by_side(shape, place.name)
    edges = list(accumulate(widths or outputs[:1], initial=0))
    assert edges[-1] == outputs[dim], "ranks share each matrix, and not which of them they have"
    # For one expert: elements of its outputs; elements between two indices of the dims before `dim`, and of `dim`.
    expert_size, stride, block = (math.prod(dims) for dims in (outputs, outputs[dim:], outputs[dim + 1 :]))
    kind_of_cut = "columns" if local_shape[-1] != full_shape[-1] else "rows" if outputs != full_outputs else "whole"
    matrices = []
    for expert in range(local_shape[0] if lead else 1):
        begins = range(expert * expert_size, (expert + 1) * expert_size, stride)
        for start, stop in pairwise(edges):
            ranges = _joined([(begin + start * block, begin + stop * block) for begin in begins])
            full_rows = math.prod(full_outputs) * (stop - start) // edges[-1] if widths else math.prod(full_outputs)
            matrices.append(UpdateMatrix(ranges, local_shape[-1], full_rows, full_shape[-1], kind_of_cut))
    return tuple(matrices)


def _joined(ranges: list[Range]) -> tuple[Range, ...]:
    """The ranges in order, with adjacent ranges merged."""
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return tuple(joined)


def _side_by_side(shape: ModelShape, name: str) -> tuple[int, tuple[int, ...]]:
    """The dim of a parameter's outputs along which its matrices lie side by side, and the width of each."""
    matrix = next((matrix for key, matrix in _by_key(shape).items() if f".{key}" in name), None)
    return (matrix.side_by_side, matrix.widths) if matrix is not None else (0, ())


def _by_key(shape: ModelShape) -> dict[str, Matrix]:
    """Matrices that may hold several side by side, by the part of a parameter's name that identifies them."""
    by_key = {f"attention.{matrix.name}.": matrix for matrix in shape.attention_matrices}
    by_key |= {f"mlp.{matrix.name}.": matrix for matrix in shape.mlp_matrices}
    if shape.experts is not None:
        by_key |= {f"experts.{matrix.name}": matrix for matrix in shape.routed_matrices}
    if shape.experts is not None and shape.experts.shared_ffn:
        by_key |= {f"shared.{matrix.name}.": matrix for matrix in shape.shared_matrices}
    return by_key
