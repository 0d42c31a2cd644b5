"""Errors of compressed gradients in a checkpoint: by parameter and replica, so that a run of any plan can resume.

    compression.lost.NAME [n, ...]      the error of each of n replicas: the part of its gradient that is not sent yet
    compression.served.NAME [n, ...]    int8: the error of the sums, one for each of n groups that share a sum
    compression.query.ROWS.NAME [M, R]  PowerSGD: Q of a matrix, of these rows of the parameter (0-8, or 2-4x0-8)

The next steps compensate for the sum of all errors (Karimireddy et al. 2019, arXiv 1901.09847). So if the number of
replicas changes, each new replica takes an equal share of the sum; if not, each takes its own error, bit for bit. Q is
a warm start only: if the checkpoint has none for the rows of a rank, the rank starts without one.
"""

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from shardwright.config import largest
from shardwright.config.phrase import say
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.compress.bucket import ErrorKind, ErrorSpan
from shardwright.parallel.compress.compressor import Compressor
from shardwright.parallel.tensor.parameter import PlacedParameter
from shardwright.parallel.zero.flat_unit import FlatUnit
from shardwright.parallel.zero.unit_setting import Sharding
from shardwright.sharding.row_boxes import RowBox, cut_rows
from shardwright.train.checkpoint.boxes import HeldBox, WantedBox, copy_on_host
from shardwright.train.checkpoint.manifest import BrokenCheckpointError
from shardwright.train.checkpoint.state_part import (
    MOST_ELEMENTS,
    Shapes,
    StateOwner,
    StatePart,
    StoredState,
    units_of,
)
from shardwright.train.gradient_norm import is_first_of_line

_KINDS: tuple[ErrorKind, ...] = ("lost", "served")


class CompressionState(StatePart):
    """The errors and queries of compressed gradients. Errors of parameters that are not compressed any more are
    ignored."""

    def held(self) -> Iterator[HeldBox]:
        for unit, compressor in _compressed_units(self.owner):
            for parameter, span in _error_spans(unit, compressor):
                if self._is_written(parameter):
                    yield from _held_errors(unit.sharding, parameter, span, self.mesh)
            if unit.sharding.shards.index == unit.sharding.copies.index == 0:
                warm_starts = compressor.method.warm_starts()
                for parameter, query_MR in zip(_matrices(unit, compressor), warm_starts, strict=False):
                    if query_MR is not None and self._is_written(parameter):
                        columns, rank = parameter.place.box[-1], query_MR.shape[1]
                        full_shape, box = (parameter.place.full_shape[-1], rank), (columns, (0, rank))
                        yield HeldBox(_query_name(parameter), full_shape, box, copy_on_host(query_MR, self.mesh))

    def _is_written(self, parameter: PlacedParameter) -> bool:
        """True if this rank writes what belongs to a parameter, if any of its replicas does."""
        return parameter is not self.owner.tied.last and is_first_of_line(parameter, self.mesh)

    def wanted(self, stored: StoredState) -> Iterator[WantedBox]:
        if stored.weights_alone:
            return
        for unit, compressor in _compressed_units(self.owner):
            kinds = compressor.method.error_kinds(unit.bucket().is_scattered)
            for parameter, span in _error_spans(unit, compressor):
                span.values.zero_()  # a run that rolls back has old errors here
                # Errors of a kind that the method does not have are added to "lost": gradients that are not sent yet.
                stored_kinds = [span.kind, *(k for k in _KINDS if k not in kinds and span.kind == "lost")]
                for kind in stored_kinds:
                    yield from _wanted_errors(unit.sharding, parameter, span, kind, stored)
            if compressor.method.has_warm_starts:
                yield from _wanted_queries(unit, compressor, stored.shapes)

    def take_up(self, stored: StoredState) -> None:
        """Nothing: values are complete once they are read."""


def _compressed_units(owner: StateOwner) -> Iterator[tuple[FlatUnit, Compressor]]:
    yield from ((unit, unit.compressor) for unit in units_of(owner) if unit.compressor is not None)


def _error_spans(unit: FlatUnit, compressor: Compressor) -> Iterator[tuple[PlacedParameter, ErrorSpan]]:
    for span in compressor.errors(unit.bucket(), unit.parameters[0].device):
        yield unit.parameters[span.number], span


def _error_count_and_index(sharding: Sharding, kind: ErrorKind) -> tuple[int, int]:
    """The number of errors of an element, and the index of this rank's error: one error per replica, or, of kind
    "served", one per group that shares a sum."""
    copies, shards = sharding.copies, sharding.shards
    if kind == "served":
        return copies.size, copies.index
    return copies.size * shards.size, copies.index * shards.size + shards.index


def _element_boxes(parameter: PlacedParameter, span: ErrorSpan, most_elements: int) -> Iterator[RowBox]:
    """The boxes of a span of elements. They have an additional last dim of 1, so that each element is a row."""
    box = (*parameter.place.box, (0, 1))
    return cut_rows(box, span.first, span.first + span.values.numel(), most_elements)


def _name(kind: ErrorKind, parameter: PlacedParameter) -> str:
    return f"compression.{kind}.{parameter.place.name}"


def _held_errors(sharding: Sharding, parameter: PlacedParameter, span: ErrorSpan, mesh: Mesh) -> Iterator[HeldBox]:
    """Copies, in host memory, of this replica's errors of a span of elements."""
    num_errors, index = _error_count_and_index(sharding, span.kind)
    full_shape = (num_errors, *parameter.place.full_shape)
    for part in _element_boxes(parameter, span, 2**62):
        values = copy_on_host(span.values[part.first - span.first : part.end - span.first], mesh)
        box = ((index, index + 1), *part.box[:-1])
        yield HeldBox(_name(span.kind, parameter), full_shape, box, values.view(1, *part.shape[:-1]))


def _wanted_errors(
    sharding: Sharding, parameter: PlacedParameter, span: ErrorSpan, kind: ErrorKind, stored: StoredState
) -> Iterator[WantedBox]:
    """The stored errors, of one kind, of a span of elements: this replica's own error, or its share of all errors."""
    name = _name(kind, parameter)
    if name not in stored.shapes:
        return
    num_errors, index = _error_count_and_index(sharding, span.kind)
    num_stored = _num_stored(name, stored.shapes[name], parameter)
    is_own = kind == span.kind and num_stored == num_errors
    share = stored.scaled_by if is_own else stored.scaled_by / num_errors

    def add(target: Tensor, values: Tensor) -> None:
        target.add_(values.view(-1).to(target.device), alpha=share)

    for part in _element_boxes(parameter, span, MOST_ELEMENTS):
        target = span.values[part.first - span.first : part.end - span.first]
        for number in [index] if is_own else range(num_stored):
            box = ((number, number + 1), *part.box[:-1])
            yield WantedBox(name, (num_stored, *parameter.place.full_shape), box, partial(add, target))


def _num_stored(name: str, shape: tuple[int, ...], parameter: PlacedParameter) -> int:
    """The number of errors of each element in a checkpoint. Raises BrokenCheckpointError."""
    full_shape = parameter.place.full_shape
    if shape[1:] != full_shape or not 0 < shape[0] <= largest.RANKS:
        raise BrokenCheckpointError(
            say(
                "{name} has shape {shape} in it, and should have [n, *{rest}]",
                name=name,
                shape=list(shape),
                rest=list(full_shape),
            )
        )
    return shape[0]


def _matrices(unit: FlatUnit, compressor: Compressor) -> list[PlacedParameter]:
    """The parameters that are compressed."""
    return [unit.parameters[i] for i in compressor.compressed_indices]


def _query_name(parameter: PlacedParameter) -> str:
    rows = "x".join(f"{start}-{stop}" for start, stop in parameter.place.box[:-1])
    return f"compression.query.{rows}.{parameter.place.name}"


def _wanted_queries(unit: FlatUnit, compressor: Compressor, shapes: Shapes) -> Iterator[WantedBox]:
    matrices, method = _matrices(unit, compressor), compressor.method
    names = [_query_name(parameter) for parameter in matrices]
    queries: list[Tensor | None] = [None] * len(names)
    method.start_from(queries)

    def take(number: int, values: Tensor) -> None:
        queries[number] = values.to(unit.parameters[0].device, copy=True)

    for number, (parameter, name) in enumerate(zip(matrices, names, strict=True)):
        if len(shapes.get(name, ())) == 2:
            rank = shapes[name][1]
            full_shape = (parameter.place.full_shape[-1], rank)
            yield WantedBox(name, full_shape, (parameter.place.box[-1], (0, rank)), partial(take, number))
