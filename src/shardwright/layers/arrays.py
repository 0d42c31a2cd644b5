"""Many plans at once: a number of a plan may be an array with one entry per plan, and formulas are elementwise.

A result that depends on few of a plan's numbers is computed once for each distinct combination of them (`distinct`) and
looked up by plan, so that pricing a plan takes about as long as a few hundred additions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Array = npt.NDArray[Any]
Numbers = Any  # a float or an Array: a union has no use, because numpy has no type for results computed from it

_CODES = 2**62  # most combinations that an int64 can tell apart


def distinct(columns: Iterable[Array]) -> tuple[Array, Array]:
    """(the first row of each distinct combination of integers, the number of its combination for each row).

    `columns` have one length. With firsts, which = distinct(columns): each column equals column[firsts][which].
    """
    code, num_codes = np.zeros(1, np.int64), 1
    for column in columns:
        if len(column) == 1:  # one row, as of one plan, is distinct
            return code, code
        low = int(column.min())
        span = int(column.max()) - low + 1
        if num_codes > _CODES // span:
            code = np.unique(code, return_inverse=True)[1]
            num_codes = int(code.max()) + 1
        if span > 1:
            code, num_codes = code * span + (column - low), num_codes * span
    _, firsts, which = np.unique(np.broadcast_to(code, column.shape), return_index=True, return_inverse=True)
    return firsts, which


def as_bytes(columns: Sequence[Array]) -> list[bytes]:
    """Each row of some columns of integers as one key of a dictionary."""
    rows = np.stack(columns, axis=1, dtype=np.int64)
    row_bytes, all_bytes = rows.itemsize * rows.shape[1], rows.tobytes()
    return [all_bytes[start : start + row_bytes] for start in range(0, len(all_bytes), row_bytes)]


def stacked_rows(values: Sequence[Numbers], num_plans: int) -> Array:
    """A table (values, plans): each value is one number, or one number per plan."""
    table = np.empty((len(values), num_plans))
    for row, value in zip(table, values, strict=True):
        row[...] = value
    return table


Record = TypeVar("Record", bound="DataclassInstance")


def picked(record: Record, index: Any) -> Record:
    """The entries `index` of each field of a dataclass of arrays."""
    return replace(record, **{f.name: getattr(record, f.name)[index] for f in fields(record)})


def entries(record: Record) -> list[Record]:
    """A dataclass of arrays of one length, as a dataclass of floats for each entry."""
    columns = [np.asarray(getattr(record, f.name), float).tolist() for f in fields(record)]
    return [type(record)(*values) for values in zip(*columns, strict=True)]


def only(record: Record) -> Record:
    """A dataclass of arrays with one entry, as a dataclass of floats."""
    return replace(record, **{f.name: float(getattr(record, f.name)[0]) for f in fields(record)})
