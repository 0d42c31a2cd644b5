"""Results of operators on tensors without memory (torch's device meta), made once for each set of shapes.

torch computes the shape, strides and number type of a result anew in each call, for most operators in Python, which is
nearly all that a dry run takes. They follow from those of what comes in, so an operator that only reads is asked once,
and afterwards its results are tensors of the same form in storages of their own. One that changes what it takes in
place, and gives that back, is asked once too, and afterwards gives it back.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_SCALARS = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
Key = tuple[Any, ...]


class _Form(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "_Form":
        return cls(tuple(tensor.size()), tensor.stride(), tensor.dtype)

    def made(self) -> Tensor:
        """A new tensor of this form."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


class _UnknownError(Exception):
    """An argument whose part in the result is not known."""


class MetaResults:
    """Calls operators, or gives what they would."""

    def __init__(self) -> None:
        # Results, tensors by their forms; True for one that gives back what it changed, False for what is always asked.
        self._forms: dict[Key, tuple[bool, tuple[Any, ...]] | bool] = {}
        self._is_view: dict[Any, bool] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results of `func`."""
        if (is_view := self._is_view.get(func)) is None:
            is_view = self._is_view[func] = _gives_views(func)
        if is_view:
            return func(*args, **kwargs)
        try:
            key = func, *map(_key, args), *((name, _key(value)) for name, value in kwargs.items())
        except _UnknownError:
            return func(*args, **kwargs)
        known = self._forms.get(key)
        if known is None:
            return self._call_and_remember(key, func, args, kwargs)
        if known is False:
            return func(*args, **kwargs)
        if known is True:
            return _first(args, kwargs)
        is_one, forms = known
        results = [form.made() if type(form) is _Form else form for form in forms]
        return results[0] if is_one else tuple(results)

    def _call_and_remember(self, key: Key, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator, and remember the forms of its results, or that they can't be known."""
        returns = func._schema.returns
        if func._schema.is_mutable:
            before = _first(args, kwargs)
            form = None if before is None else _Form.of(before)
            result = func(*args, **kwargs)
            gives_back = before is not None and result is before and len(returns) == 1 and _Form.of(before) == form
            self._forms[key] = gives_back and _changes_the_first_alone(func)
            return result
        result = func(*args, **kwargs)
        is_one = isinstance(result, Tensor)
        results = (result,) if is_one else result
        is_known = isinstance(results, tuple) and all(of.alias_info is None for of in returns)
        forms = tuple(_Form.of(r) if isinstance(r, Tensor) else r for r in results) if is_known else ()
        self._forms[key] = (is_one, forms) if is_known and _are_new(results, (args, kwargs)) else False
        return result


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tensor that an operator changes if it changes one alone: `out`, or its first argument."""
    changed = kwargs.get("out", args[0] if args else None)
    return changed if isinstance(changed, Tensor) else None


def _gives_views(func: Any) -> bool:
    """True if it only looks at a tensor in another way, which torch does without Python."""
    return not func._schema.is_mutable and any(of.alias_info is not None for of in func._schema.returns)


def _key(value: Any) -> Any:
    """An argument as far as results depend on it. A number stands with its type, for 1, 1.0 and True are equal."""
    kind = type(value)
    if kind in _SCALARS:
        return kind, value
    if kind is list or kind is tuple:
        return tuple(map(_key, value))
    if isinstance(value, Tensor) and (kind is Tensor or issubclass(kind, torch.nn.Parameter)) and value.is_meta:
        return value.size(), value.stride(), value.dtype
    raise _UnknownError


def _are_new(results: tuple[Any, ...], inputs: Any) -> bool:
    """True if each is a plain value, or a tensor in a storage of its own, as large as its form needs."""
    tensors = [result for result in results if isinstance(result, Tensor)]
    if not all(type(of) is Tensor and of.is_meta and not of.storage_offset() for of in tensors):
        return False
    if not all(type(result) in _SCALARS for result in results if not isinstance(result, Tensor)):
        return False
    storages = [tensor.untyped_storage() for tensor in tensors]
    taken = {id(leaf.untyped_storage()) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
    if len({id(storage) for storage in storages} | taken) != len(storages) + len(taken):
        return False
    forms = [_Form.of(tensor).made() for tensor in tensors]
    return all(of.untyped_storage().nbytes() == s.nbytes() for of, s in zip(forms, storages, strict=True))


def _changes_the_first_alone(func: Any) -> bool:
    """True if the one argument that is written is `out`, or else the first."""
    written = [of for of in func._schema.arguments if of.alias_info is not None and of.alias_info.is_write]
    return len(written) == 1 and (written[0].name == "out" or written[0] == func._schema.arguments[0])
