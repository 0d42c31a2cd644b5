"""Arguments of private and fused operators, as a rank calls them on CUDA, against the demands of their kernels.

The demands are not in an operator's schema: strides that a kernel assumes, alignments, dtypes. Each is listed here with
its source, for torch 2.11 to 2.14. A step is run dry (train/dry_steps.py), every call of such an operator is bound to
its schema, and a broken demand is reported with the tensor, its layout and the source. Products in fp8 are those of
Hopper. Attention is one kernel in a dry run, where torch chooses among three: the demands are those that all share.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.config.job import JobSpec
from shardwright.measure.meta_results import MetaResults
from shardwright.train.dry_steps import DrySteps

_NARROW = (torch.float16, torch.bfloat16)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOATS = (torch.float32, *_NARROW)
_WIDE_BYTES = 16  # bytes of one load of a kernel
_LSE_ROWS = 32
_FLOAT8_MULTIPLE, _TILE = 16, 128
_WIDEST_HEAD = 256

Arguments = Mapping[str, Any]  # by name in the schema
_Form = tuple[tuple[int, int], tuple[int | None, int | None]]  # the size of scales, and their strides


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


def _causal_attention(arguments: Arguments) -> Iterator[str]:
    names = ("query", "key", "value")
    yield from _ends_in_rows(arguments, names)
    yield from _alike(arguments, names, _FLOATS)
    query, key, value = (arguments[name] for name in names)
    if key.shape[:3] != value.shape[:3] or query.shape[1] % key.shape[1]:
        yield f"heads of query are no multiple of those of key and value: {_layout('key', key)}"
    if not query.shape[-1] == key.shape[-1] == value.shape[-1] <= _WIDEST_HEAD:
        yield f"heads are wider than {_WIDEST_HEAD}, or of several widths: {_layout('value', value)}"


def _causal_attention_backward(arguments: Arguments) -> Iterator[str]:
    yield from _causal_attention(arguments)
    yield from _ends_in_rows(arguments, ("grad_out", "out"))
    yield from _alike(arguments, ("query", "grad_out", "out"), _FLOATS)


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


def _float8_matrices(arguments: Arguments) -> Iterator[str]:
    """Faults unless self [M, K] lies in rows, mat2 [K, N] or [e, K, N] in columns, and K and N are multiples of 16."""
    a, b = arguments["self"], arguments["mat2"]
    for name, x in (("self", a), ("mat2", b)):
        if x.dtype not in _FLOAT8:
            yield f"no kernel has these numbers: {_layout(name, x)}"
    if a.dtype == b.dtype == torch.float8_e5m2:
        yield f"no kernel has e5m2 on both sides: {_layout('self', a)}"
    if a.stride(-1) != 1 or a.stride(-2) < a.shape[-1]:
        yield f"self does not lie in rows: {_layout('self', a)}"
    if b.stride(-2) != 1 or b.stride(-1) < b.shape[-2]:
        yield f"mat2 does not lie in columns: {_layout('mat2', b)}"
    if b.shape[-2] % _FLOAT8_MULTIPLE or b.shape[-1] % _FLOAT8_MULTIPLE:
        yield f"dims of mat2 are no multiples of {_FLOAT8_MULTIPLE}: {_layout('mat2', b)}"


def _scaled(arguments: Arguments) -> Iterator[str]:
    yield from _float8_matrices(arguments)
    (rows, width), columns = arguments["self"].shape, arguments["mat2"].shape[1]
    tiles = -(-width // _TILE)
    padded_tiles = -(-tiles // 4) * 4
    # The size and the strides of each operand's scales; strides of None are free.
    row, tile = ScalingType.RowWise.value, ScalingType.BlockWise1x128.value
    block, tensor = ScalingType.BlockWise128x128.value, ScalingType.TensorWise.value
    forms: dict[tuple[int, int], tuple[_Form, _Form]] = {
        (row, row): (((rows, 1), (None, None)), ((1, columns), (None, 1))),
        (tile, tile): (((rows, tiles), (1, rows)), ((columns, tiles), (1, columns))),
        (tile, block): (
            ((rows, tiles), (1, rows)),
            ((padded_tiles, -(-columns // _TILE)), (1, padded_tiles)),
        ),
    }
    (recipe_a,), (recipe_b,) = arguments["recipe_a"], arguments["recipe_b"]
    scales = {"scale_a": arguments["scale_a"][0], "scale_b": arguments["scale_b"][0]}
    for name, scale in scales.items():
        if scale.dtype != torch.float32:
            yield f"scales are not float32: {_layout(name, scale)}"
    if recipe_a == recipe_b == tensor:
        for name, scale in scales.items():
            if scale.numel() != 1:
                yield f"a tensor has more than one scale: {_layout(name, scale)}"
    elif (recipe_a, recipe_b) not in forms:
        yield f"no kernel has scales of recipes {recipe_a} and {recipe_b}"
    else:
        for (name, scale), form in zip(scales.items(), forms[recipe_a, recipe_b], strict=True):
            yield from _scales_of_another_form(name, scale, form)
    if tile in (recipe_a, recipe_b) and torch.float8_e5m2 in (arguments["self"].dtype, arguments["mat2"].dtype):
        yield f"tiles are of e4m3 alone: {_layout('self', arguments['self'])}"


def _scales_of_another_form(name: str, scale: Tensor, form: _Form) -> Iterator[str]:
    size, strides = form
    if tuple(scale.shape) != size:
        yield f"scales are not {size}: {_layout(name, scale)}"
        return
    for dim, stride in enumerate(strides):
        is_free = stride is None or (dim == 1 and scale.shape[1] == 1 and scale.stride(1) == 1)
        if not is_free and scale.stride(dim) != stride:
            yield f"scales have not strides {strides}: {_layout(name, scale)}"


def _scaled_grouped(arguments: Arguments) -> Iterator[str]:
    yield from _float8_matrices(arguments)
    a, b, ends = arguments["self"], arguments["mat2"], arguments["offs"]
    if not a.dtype == b.dtype == torch.float8_e4m3fn or arguments["out_dtype"] != torch.bfloat16:
        yield f"groups are of e4m3 alone, and give bf16: {_layout('self', a)}"
    if ends is None or ends.dtype != torch.int32 or ends.shape != b.shape[:1]:
        yield "offs is not int32, one for each matrix" + ("" if ends is None else f": {_layout('offs', ends)}")
    if [*arguments["recipe_a"], *arguments["recipe_b"]] != [ScalingType.RowWise.value] * 2:
        yield f"scales are of recipes {arguments['recipe_a']} and {arguments['recipe_b']}, and not one of each row"
    for name, size in (("scale_a", (len(a),)), ("scale_b", (b.shape[0], b.shape[2]))):
        (scale,) = arguments[name]
        if scale.dtype != torch.float32 or tuple(scale.shape) != size or scale.stride(-1) != 1:
            yield f"scales are not float32 of {size}: {_layout(name, scale)}"
    if not len(a):
        yield f"nobody says that the kernel takes no rows at all: {_layout('self', a)}"


def _norms(arguments: Arguments) -> Iterator[str]:
    """Faults of lists for which torch launches kernels for each tensor, and not for all."""
    tensors = arguments["self"]
    if arguments["ord"] not in (1, 2, math.inf):
        yield f"norms of order {arguments['ord']} have a kernel for each tensor"
    for x in tensors:
        if x.dtype not in _FLOATS or x.dtype != tensors[0].dtype:
            yield f"no kernel for all has these numbers: {_layout('self', x)}"
        if not x.is_contiguous() or not x.numel():
            yield f"a tensor is empty or not dense: {_layout('self', x)}"


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
_CAUSAL = "aten::_scaled_dot_product_flash_attention"
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
    Demand(
        (_CAUSAL,),
        "transformers/cuda/sdp_utils.cpp: check_last_dim_stride_equals_1_dense, check_head_dim_size_flash, "
        "check_batch_size_and_num_heads_dense",
        _causal_attention,
    ),
    Demand(
        (f"{_CAUSAL}_backward",),
        "transformers/cuda/flash_attn/flash_api.cpp, mha_bwd: contiguous last dims, numbers of q",
        _causal_attention_backward,
    ),
    Demand(
        ("aten::_scaled_mm_v2",),
        "native/cuda/ScaledBlas.cpp: _scaled_mm_cuda_v2, _scaled_rowwise_rowwise, _scaled_block1x128_block1x128, "
        "_scaled_block1x128_block128x128",
        _scaled,
    ),
    Demand(
        ("aten::_scaled_grouped_mm_v2",),
        "native/cuda/GroupedBlas.cpp: _scaled_grouped_mm_cuda_v2, _check_scales_fp8_rowwise",
        _scaled_grouped,
    ),
    Demand(
        ("aten::_foreach_norm.Scalar",),
        "native/ForeachUtils.h, can_use_fast_route; native/cuda/ForeachReduceOp.cu, use_slowpath",
        _norms,
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
        self._keep, self._results = keep, MetaResults()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator._schema.name + (f".{operator._overloadname}" if operator._overloadname != "default" else "")
        if name in _BY_OPERATOR:
            arguments = bound(operator, args, kwargs or {})
            self.calls[name] = self.calls.get(name, 0) + 1
            self.faults |= dict.fromkeys(call_faults(name, arguments))
            self._keep(name, arguments)
        return self._results.call(operator, args, kwargs or {})


def checked_step(job: JobSpec, rank: int) -> CheckedCalls:
    """Check the calls of a rank in a step on CUDA against the demands of their kernels."""
    steps = DrySteps(job, rank, "cuda")
    with CheckedCalls() as checked:
        steps.run()
    return checked
