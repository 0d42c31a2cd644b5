"""Bytes that the kernels of a dry run read and write, counted operator by operator from torch's own schemas.

An operator is taken for one kernel that reads each of its arguments and writes each of its results once. A view is
none, a fill or a copy does not read what it overwrites, what a reduction or a lookup leaves out is not counted.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright
from shardwright.config.load import load_job
from shardwright.measure.meta_results import MetaResults
from shardwright.train.dry_steps import DrySteps

_SOURCE = str(Path(shardwright.__file__).parent)
_ROOF = str(Path(_SOURCE, "measure"))
# These give memory without values, or another form of what there is, and launch nothing.
_NO_KERNEL = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh")
_OVERWRITE = ("copy_", "fill_", "zero_")  # what was there is not read
_LOOK_UP = ("embedding", "index_select", "gather", "index")  # read of a table what they give
_SCATTER = ("index_add_", "scatter_add_", "index_copy_")  # touch of a table what they are given
# Of ours (precision/fused_operator.py): what each is given it reads or writes, once.
_TO_LAST = (
    "gate", "gate_backward", "activate", "activate_backward", "weigh", "weigh_backward", "weigh_gated_backward",
    "expert_bias_of_weights", "turn", "split_and_turn", "turn_back", "exponential_sums", "softmax_gradient", "quantise",
    "cast", "dequantise", "numbers_of_nf4",
)  # fmt: skip
_BACKWARD = ("_backward",)  # functions of the executor in which a backward runs


@dataclass(frozen=True)
class Kernel:
    """One kernel: torch's name of its operator, the file of ours that asked for it ("" is autograd by itself) and the
    function there, whether in a backward, and the bytes that it reads and writes."""

    operator: str
    file: str
    function: str
    backward: bool
    num_bytes: int


class KernelTraffic(TorchDispatchMode):
    """While it lasts, counts what operators read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[Kernel] = Counter()
        self._results = MetaResults()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One operator."""
        result = self._results.call(func, args, kwargs or {})
        if (num_bytes := moved_bytes(func, args, kwargs or {}, result)) is not None:
            name = func.overloadpacket.__name__
            self.kernels[Kernel(name, *_asked_by(), num_bytes)] += 1
        return result


def moved_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int | None:
    """Bytes that an operator reads and writes; None for one that launches no kernel."""
    name, schema = func.overloadpacket.__name__, func._schema
    gives_views = schema.returns and all(r.alias_info and not r.alias_info.is_write for r in schema.returns)
    if name in _NO_KERNEL or gives_views:
        return None
    results = [t for r, of in zip(schema.returns, _listed(result, schema), strict=True) if not r.alias_info
               for t in _tensors(of)]  # fmt: skip
    written = sum(map(_num_bytes, results))
    if name in _LOOK_UP:
        indices = [t for t in _tensors((args, kwargs)) if t.dtype in (torch.int32, torch.int64)]
        return 2 * written + sum(map(_num_bytes, indices))
    if name in _SCATTER:
        _, *rest = _tensors((args, kwargs))
        times_table = 1 if name == "index_copy_" else 2
        return sum(map(_num_bytes, rest)) + times_table * _num_bytes(rest[-1])
    if name in _TO_LAST:
        return sum(map(_num_bytes, _tensors(args)))
    total = written
    for at, argument in enumerate(schema.arguments):
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        size = sum(map(_num_bytes, _tensors(value)))
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        is_read = not (is_written and (argument.is_out or name in _OVERWRITE))
        total += size * (is_written + is_read)
    return total


def _listed(result: Any, schema: Any) -> Sequence[Any]:
    return result if len(schema.returns) > 1 else (result,) if schema.returns else ()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _num_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor in memory: what is expanded is there once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else min(size, 1)
    return elements * tensor.element_size()


def _asked_by() -> tuple[str, str, bool]:
    """The file and the function of ours that called the operator, and whether a backward runs."""
    result, backward = None, False
    frame: Any = sys._getframe(2)
    while frame is not None:
        name, function = frame.f_code.co_filename, frame.f_code.co_name
        if name.startswith(_SOURCE) and not name.startswith(_ROOF):
            file = name[len(_SOURCE) + 1 :]
            is_executor = file == "parallel/pipeline/executor.py"
            backward |= is_executor and function in _BACKWARD
            result = result or (("", "") if is_executor else (file, function))
        frame = frame.f_back
    return *(result or ("", "")), backward


def step_kernels(*fields: str, layers: int, num_microbatches: int) -> Counter[Kernel]:
    """The kernels of one step of rank 0 of a job, as it would be on CUDA. `fields` are overrides of its fields."""
    batch = f"batch.global_batch_size={num_microbatches}"
    job = load_job("quickstart", [*fields, f"model.layers={layers}", batch])
    steps = DrySteps(job, 0, "cuda")
    steps.run()  # the first one allocates
    with KernelTraffic() as traffic:
        steps.run()
    return traffic.kernels


def layer_kernels(*fields: str, first: int = 1) -> Counter[Kernel]:
    """The kernels of one layer for one microbatch, one that adds its gradients to those of others: what a step has more
    with a layer and a microbatch more. The layer is number `first` of the model."""
    apart = Counter[Kernel]()
    for layers, num_microbatches in ((1, 2), (1, 1), (0, 2), (0, 1)):
        sign = 1 if layers == num_microbatches - 1 else -1
        for kernel, count in step_kernels(
            *fields, layers=first + layers, num_microbatches=1 + num_microbatches
        ).items():
            apart[kernel] += sign * count
    return Counter({kernel: count for kernel, count in apart.items() if count})
