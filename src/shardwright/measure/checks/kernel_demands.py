"""Arguments of private and fused operators, as a rank calls them on CUDA, against the demands of their kernels.

The demands are not in an operator's schema: strides that a kernel assumes, alignments, dtypes. Each is listed here with
its source, for torch 2.11 to 2.14. A step is run dry (train/dry_steps.py), every call of such an operator is bound to
its schema, and a broken demand is reported with the tensor, its layout and the source. Operators that a dry step does
not reach, such as products in fp8, are checked by torch's own checks of shapes (precision/scaled_mm.py).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.config.job import JobSpec
from shardwright.train.dry_steps import DrySteps

_NARROW = (torch.float16, torch.bfloat16)
_FLOATS = (torch.float32, *_NARROW)
_WIDE_BYTES = 16  # bytes of one load of a kernel
_LSE_ROWS = 32

Arguments = Mapping[str, Any]  # by name in the schema


@dataclass(frozen=True)
class Demand:
    """The demands of a kernel on its arguments: `faults` gives the broken ones. `source` is the demands' source
    code."""

    operators: tuple[str, ...]
    source: str
    faults: Callable[[Arguments], Iterator[str]]


def _layout(name: str, x: Tensor) -> str:
    return f"{name} has shape {tuple(x.shape)}, strides {x.stride()} and numbers {str(x.dtype).removeprefix('torch.')}"


def _ends_in_rows(arguments: Arguments, names: tuple[str, ...]) -> Iterator[str]:
    """Faults of tensors whose last dim is not contiguous."""
    for name in names:
        x = arguments[name]
        if x is not None and x.shape[-1] > 1 and x.stride(-1) != 1:
            yield f"the last dim of {name} is not contiguous: {_layout(name, x)}"


def _alike(arguments: Arguments, names: tuple[str, ...], dtypes: tuple[torch.dtype, ...]) -> Iterator[str]:
    """Faults unless all have the same dtype, which is one of these."""
    present = [name for name in names if arguments.get(name) is not None]
    dtype = arguments[present[0]].dtype
    if dtype not in dtypes:
        yield f"no kernel has these numbers: {_layout(present[0], arguments[present[0]])}"
    for name in present[1:]:
        if arguments[name].dtype != dtype:
            yield f"{name} has other numbers than {present[0]}, which has {dtype}: {_layout(name, arguments[name])}"


def _bias(arguments: Arguments) -> Iterator[str]:
    bias = arguments["attn_bias"]
    if bias is None:
        return
    if bias.dtype != arguments["query"].dtype:
        yield f"attn_bias has other numbers than query: {_layout('attn_bias', bias)}"
    if bias.stride(-1) != 1 or bias.stride(-2) * bias.element_size() % _WIDE_BYTES:
        yield f"rows of attn_bias do not begin at multiples of {_WIDE_BYTES} bytes: {_layout('attn_bias', bias)}"


def _attention(arguments: Arguments) -> Iterator[str]:
    names = ("query", "key", "value")
    yield from _ends_in_rows(arguments, names)
    yield from _alike(arguments, names, _FLOATS)
    yield from _bias(arguments)
    if arguments["key"].shape[1] != arguments["query"].shape[1]:
        yield f"key has another number of heads than query: {_layout('key', arguments['key'])}"


def _attention_backward(arguments: Arguments) -> Iterator[str]:
    yield from _attention(arguments)
    yield from _ends_in_rows(arguments, ("grad_out_", "out"))
    yield from _alike(arguments, ("query", "grad_out_", "out"), _FLOATS)
    out, sums = arguments["out"], arguments["logsumexp"]
    _, heads, rows, width = out.shape
    if rows > 1 and out.stride(2) != heads * width:
        yield f"rows of out are not {heads} heads x {width} apart: {_layout('out', out)}"
    if sums.dtype != torch.float32 or sums.shape[-1] != -(-rows // _LSE_ROWS) * _LSE_ROWS or not sums.is_contiguous():
        yield f"logsumexp is not float32 of {rows} rows, padded to {_LSE_ROWS}: {_layout('logsumexp', sums)}"


def _is_aligned(x: Tensor) -> bool:
    """True if one of the last two dims is contiguous, and the other's stride is a multiple of a load."""
    (rows, columns), size = x.stride()[-2:], x.element_size()
    distance = rows if columns == 1 else columns
    return 1 in (rows, columns) and distance * size % _WIDE_BYTES == 0


def _grouped(arguments: Arguments) -> Iterator[str]:
    a, b, ends = arguments["self"], arguments["mat2"], arguments["offs"]
    yield from _alike(arguments, ("self", "mat2"), (torch.bfloat16,))
    for name, x in (("self", a), ("mat2", b)):
        if not _is_aligned(x):
            yield f"rows of {name} do not begin at multiples of {_WIDE_BYTES} bytes: {_layout(name, x)}"
    if ends is None or ends.dtype != torch.int32 or ends.ndim != 1 or ends.shape[0] != b.shape[0] or b.ndim != 3:
        yield "offs is not int32, one for each matrix" + ("" if ends is None else f": {_layout('offs', ends)}")
    if not len(a):
        yield f"nobody says that the kernel takes no rows at all: {_layout('self', a)}"


def _widened(arguments: Arguments) -> Iterator[str]:
    """Faults of products of 16-bit numbers with float32 results."""
    names = ("mat1", "mat2") if "mat1" in arguments else ("self", "mat2")
    yield from _alike(arguments, names, _NARROW)
    if arguments["out_dtype"] != torch.float32:
        yield f"out_dtype is {arguments['out_dtype']}, and the kernel has float32"
    for name in ("out", *(["self"] if "mat1" in arguments else [])):
        x = arguments.get(name)
        if x is not None and x.dtype != torch.float32:
            yield f"{name} is not float32: {_layout(name, x)}"
    for name in names:
        if 1 not in arguments[name].stride()[-2:]:
            yield f"{name} has no contiguous dim, and is copied: {_layout(name, arguments[name])}"


def _fused_update(arguments: Arguments) -> Iterator[str]:
    """Faults unless all lists are of the same length, dtypes and strides as the weights, and dense."""
    lists = {
        name: arguments[name]
        for name in ("grads", "exp_avgs", "exp_avg_sqs", "momentum_buffer_list")
        if name in arguments
    }
    for place, weight in enumerate(arguments["self"]):
        for name, tensors in lists.items():
            if len(tensors) != len(arguments["self"]):
                yield f"{name} has {len(tensors)} tensors, for {len(arguments['self'])} weights"
                continue
            x = tensors[place]
            if x.dtype != weight.dtype or x.stride() != weight.stride() or x.shape != weight.shape:
                yield f"{_layout(name, x)}, and the weight is another: {_layout('self', weight)}"
        if not weight.is_contiguous():
            yield f"the weight is not dense: {_layout('self', weight)}"
    for step in arguments.get("state_steps", ()):
        if step.dtype != torch.float32 or step.numel() != 1:
            yield f"a count of steps is no single float32: {_layout('state_steps', step)}"


def _rms_norm(arguments: Arguments) -> Iterator[str]:
    names = ("dy", "x", "weight") if "dy" in arguments else ("x", "weight")
    yield from _alike(arguments, names, _FLOATS)
    inverse = arguments.get("inverse")
    if inverse is not None and (
        inverse.dtype != torch.float32 or inverse.numel() != math.prod(arguments["x"].shape[:-1])
    ):
        yield f"inverse is not one float32 of each vector: {_layout('inverse', inverse)}"


_ATTENTION = "aten::_scaled_dot_product_efficient_attention"
DEMANDS = (
    Demand(
        (_ATTENTION,),
        "transformers/cuda/attention.cu, _efficient_attention_forward: contiguous last dims, bias strides",
        _attention,
    ),
    Demand(
        (f"{_ATTENTION}_backward",),
        "transformers/cuda/mem_eff_attention/kernel_backward.h: o_strideM, kAlignLSE; attention_backward.cu",
        _attention_backward,
    ),
    Demand(("aten::_grouped_mm",), "native/GroupedMMUtils.h, _grouped_mm_validate_inputs", _grouped),
    Demand(
        tuple(f"aten::{name}.{overload}" for name in ("mm", "addmm", "bmm") for overload in ("dtype", "dtype_out")),
        "native/cuda/Blas.cpp, _mm_dtype_out_cuda and its kin: out_dtype",
        _widened,
    ),
    Demand(
        ("aten::_fused_adamw_", "aten::_fused_adam_", "aten::_fused_sgd_"),
        "native/ForeachUtils.h, check_fast_path_restrictions, which the fused kernels ask",
        _fused_update,
    ),
    Demand(
        ("shardwright::rms_norm", "shardwright::rms_norm_backward"),
        "native/cuda/layer_norm_kernel.cu, _fused_rms_norm_cuda and its backward",
        _rms_norm,
    ),
)
_BY_OPERATOR = {operator: demand for demand in DEMANDS for operator in demand.operators}


def bound(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names in the operator's schema, with its defaults."""
    schema = operator._schema.arguments
    arguments = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return arguments | {argument.name: value for argument, value in zip(schema, args, strict=False)} | dict(kwargs)


def call_faults(name: str, arguments: Arguments) -> list[str]:
    """The demands that a call of an operator breaks."""
    demand = _BY_OPERATOR[name]
    return [f"{name}: {fault} ({demand.source})" for fault in demand.faults(arguments)]


class CheckedCalls(TorchDispatchMode):
    """Checks each call of an operator that has demands. `calls` counts the calls, `faults` has each fault once; `keep`
    is called with each call."""

    def __init__(self, keep: Callable[[str, Arguments], None] = lambda name, arguments: None) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        self.faults: dict[str, None] = {}
        self._keep = keep

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator._schema.name + (f".{operator._overloadname}" if operator._overloadname != "default" else "")
        if name in _BY_OPERATOR:
            arguments = bound(operator, args, kwargs or {})
            self.calls[name] = self.calls.get(name, 0) + 1
            self.faults |= dict.fromkeys(call_faults(name, arguments))
            self._keep(name, arguments)
        return operator(*args, **(kwargs or {}))


def checked_step(job: JobSpec, rank: int) -> CheckedCalls:
    """Check the calls of a rank in a step on CUDA against the demands of their kernels."""
    steps = DrySteps(job, rank, "cuda")
    with CheckedCalls() as checked:
        steps.run()
    return checked
