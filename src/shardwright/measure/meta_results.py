"""Results of operators on tensors without memory (torch's device meta), made once for each set of shapes.

torch computes the shape, strides and dtype of a result anew in each call, for most operators in Python, and a dry run
spends nearly all of its time there. They follow from the shapes, strides and dtypes of the inputs. So an operator that
only reads runs once per set of inputs, and afterwards its results are new tensors of the same form in storages of their
own. An operator that changes an input in place and returns it runs once too, and afterwards the input is returned.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
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
    """An argument whose effect on the result is unknown."""


class MetaResults:
    """Runs operators, or returns what they would return."""

    def __init__(self) -> None:
        # Forms of the results; True for an operator that returns what it changed, False for one that always has to run.
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
        forms_or_flag = self._forms.get(key)
        if forms_or_flag is None:
            return self._call_and_remember(key, func, args, kwargs)
        if forms_or_flag is False:
            return func(*args, **kwargs)
        if forms_or_flag is True:
            return _first(args, kwargs)
        is_one, forms = forms_or_flag
        results = [form.made() if type(form) is _Form else form for form in forms]
        return results[0] if is_one else tuple(results)

    def _call_and_remember(self, key: Key, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and remember the forms of its results, or that they can't be known."""
        returns = func._schema.returns
        if func._schema.is_mutable:
            changed = _first(args, kwargs)
            form = None if changed is None else _Form.of(changed)
            result = func(*args, **kwargs)
            gives_back = changed is not None and result is changed and len(returns) == 1 and _Form.of(changed) == form
            self._forms[key] = gives_back and _changes_the_first_alone(func)
            return result
        result = func(*args, **kwargs)
        is_one = isinstance(result, Tensor)
        results = (result,) if is_one else result
        is_known = isinstance(results, tuple) and all(returned.alias_info is None for returned in returns)
        forms = tuple(_Form.of(r) if isinstance(r, Tensor) else r for r in results) if is_known else ()
        self._forms[key] = (is_one, forms) if is_known and _are_new(results, (args, kwargs)) else False
        return result


class MadeOnce(TorchDispatchMode):
    """While it lasts, operators on tensors without memory run once for each set of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self._results = MetaResults()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self._results.call(func, args, kwargs or {})


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tensor that an operator changes if it changes only one: `out`, or its first argument."""
    changed = kwargs.get("out", args[0] if args else None)
    return changed if isinstance(changed, Tensor) else None


def _gives_views(func: Any) -> bool:
    """True if an operator only returns a view, which torch makes without Python."""
    return not func._schema.is_mutable and any(returned.alias_info is not None for returned in func._schema.returns)


def _key(value: Any) -> Any:
    """The part of an argument that results depend on. A number has its type with it, because 1 == 1.0 == True."""
    kind = type(value)
    if kind in _SCALARS:
        return kind, value
    if kind is list or kind is tuple:
        return tuple(map(_key, value))
    if isinstance(value, Tensor) and (kind is Tensor or issubclass(kind, torch.nn.Parameter)) and value.is_meta:
        return value.size(), value.stride(), value.dtype
    raise _UnknownError


def _are_new(results: tuple[Any, ...], inputs: Any) -> bool:
    """True if each result is a plain value, or a tensor in a storage of its own, as large as its form needs."""
    tensors = [result for result in results if isinstance(result, Tensor)]
    if not all(type(tensor) is Tensor and tensor.is_meta and not tensor.storage_offset() for tensor in tensors):
        return False
    if not all(type(result) in _SCALARS for result in results if not isinstance(result, Tensor)):
        return False
    storages = [tensor.untyped_storage() for tensor in tensors]
    input_storages = {id(leaf.untyped_storage()) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
    if len({id(storage) for storage in storages} | input_storages) != len(storages) + len(input_storages):
        return False
    forms = [_Form.of(tensor).made() for tensor in tensors]
    return all(new.untyped_storage().nbytes() == s.nbytes() for new, s in zip(forms, storages, strict=True))


def _changes_the_first_alone(func: Any) -> bool:
    """True if the only argument that is written is `out`, or else the first."""
    written = [
        argument
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return len(written) == 1 and (written[0].name == "out" or written[0] == func._schema.arguments[0])
