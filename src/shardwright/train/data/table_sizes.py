"""Sizes of the rows of Arrow tables as Python objects. A value of a dictionary counts each time it is referenced."""

from collections.abc import Callable
from typing import Any

from shardwright.config.phrase import say

# The size of a Python object beside its contents: of a number, and of a text or a container.
_VALUE_BYTES, _HOLDER_BYTES = 32, 64


def written_bytes(column: Any) -> int:
    """About the bytes that the values of a column (pyarrow.Array) would take as Python objects; none is made. Raises
    ValueError for a type whose values may share memory in other ways, since few bytes could hold any number of them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, is_a = column.type, pa.types
    if is_a.is_dictionary(kind) and _is_one_of(kind.value_type, _TEXTS):
        lengths = pc.binary_length(column.dictionary).take(column.indices)
        return len(column) * _HOLDER_BYTES + _sum(lengths)
    if _is_one_of(kind, _TEXTS):
        return len(column) * _HOLDER_BYTES + _sum(pc.binary_length(column))
    if _is_one_of(kind, _LISTS):
        return len(column) * _HOLDER_BYTES + written_bytes(column.flatten())
    if is_a.is_map(kind):
        begin, end = (column.offsets[index].as_py() for index in (0, -1))
        parts = [part.slice(begin, end - begin) for part in (column.keys, column.items)]
        return len(column) * _HOLDER_BYTES + sum(map(written_bytes, parts))
    if is_a.is_struct(kind):
        return len(column) * _HOLDER_BYTES + sum(map(written_bytes, column.flatten()))
    plain = kind.value_type if is_a.is_dictionary(kind) else kind
    if not _is_one_of(plain, _PLAIN):
        raise ValueError(say("values of the type {kind} are not read here", kind=str(kind)[:100]))
    return len(column) * (_VALUE_BYTES + plain.bit_width // 8 if not is_a.is_null(plain) else _VALUE_BYTES)


_TEXTS = ("string", "large_string", "binary", "large_binary")
_LISTS = ("list", "large_list", "fixed_size_list")
_PLAIN = ("null", "boolean", "integer", "floating", "decimal", "temporal", "fixed_size_binary")


def _is_one_of(kind: Any, names: tuple[str, ...]) -> bool:
    import pyarrow as pa

    checks: list[Callable[[Any], bool]] = [getattr(pa.types, f"is_{name}") for name in names]
    return any(is_kind(kind) for is_kind in checks)


def _sum(lengths: Any) -> int:
    import pyarrow.compute as pc

    return int(pc.sum(lengths.cast("int64")).as_py() or 0)
