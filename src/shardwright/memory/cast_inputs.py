"""Operands of products in fp8, if weight gradients are in fp8 too: inputs that are kept in fp8 instead of 16 bits, if
no other operator keeps them, and both operands from I to W if a backward is split (parallel/tensor/product_input.py).

Sizes are bytes on one rank.
"""

from collections.abc import Iterable

from shardwright.config.array_math import holds
from shardwright.config.float8_facts import FLOAT8_RECIPES, num_scales_of
from shardwright.config.job import JobSpec
from shardwright.config.matrix import Matrix
from shardwright.layers.layer_operators import LayerOperator, RecomputeUnit
from shardwright.layers.layer_tensors import GatheredTensor, LayerTensor
from shardwright.memory.kept_chain import UnitTensors
from shardwright.memory.kept_tensors import FLOAT32, Bytes, Share, TensorBytes

# Parts whose product does not share its input: both of an MLP; its last; that before attention.
BOTH: tuple[RecomputeUnit, ...] = ("up", "down")
LAST: tuple[RecomputeUnit, ...] = ("down",)
FIRST: tuple[RecomputeUnit, ...] = ("qkv",)


def cast_inputs(
    job: JobSpec,
    share: Share,
    operators: Iterable[LayerOperator],
    parts: tuple[RecomputeUnit, ...],
    num_groups: Bytes = 1,
) -> tuple[TensorBytes, UnitTensors]:
    """(sizes of the cast tensors, tensors that parts keep instead of their inputs), for the `parts` of a chain whose
    product does not share its input. Each of `num_groups` groups of rows has a scale."""
    sizes: TensorBytes = {}
    keeps: UnitTensors = {}
    for operator in operators if job.precision.float8_weight_gradients else ():
        for product in operator.products if operator.recompute_unit in parts else ():
            tensor, width = _before_gather(product.takes), product.matrix.inner_on(_cut(job, product.matrix))
            sizes[tensor.in_float8] = _cast_bytes(job.precision.float8, share.tensors[tensor], width, num_groups)
            keeps[operator.recompute_unit] = (tensor.in_float8,)
    return sizes, keeps


def _before_gather(tensor: LayerTensor) -> LayerTensor:
    """The shards of a gathered tensor; else the tensor itself."""
    return tensor.shards if isinstance(tensor, GatheredTensor) else tensor


def _cut(job: JobSpec, matrix: Matrix) -> Bytes:
    """The number of ranks that share a matrix."""
    return job.plan.expert_tp_size if matrix.experts else job.plan.tp


def waiting_operands(
    job: JobSpec, share: Share, operators: Iterable[LayerOperator], num_groups: Bytes = 1
) -> TensorBytes:
    """Sizes of the operands of weight gradients in fp8. An operand that tp ranks gather is in 16 bits."""
    if not job.precision.float8_weight_gradients:
        return {}
    plan, sizes = job.plan, TensorBytes()
    gathers = plan.sequence_parallel and holds(plan.tp > 1)
    for product in (product for operator in operators for product in operator.products):
        matrix = product.matrix
        tp, groups = _cut(job, matrix), num_groups if matrix.experts else 1
        for tensor, width in ((product.takes, matrix.inner_on(tp)), (product.gives, matrix.columns_on(tp))):
            size = _cast_bytes(job.precision.float8, share.tensors[tensor], width, groups)
            is_gathered = gathers and tensor is product.takes and isinstance(tensor, GatheredTensor)
            sizes[tensor.in_float8] = share[tensor] if is_gathered else size
    return sizes


def _cast_bytes(recipe: str, elements: Bytes, width: Bytes, num_groups: Bytes) -> Bytes:
    granularity = FLOAT8_RECIPES[recipe].activation
    is_by_group = granularity == "tensor"  # experts have a scale each
    num_scales = num_groups if is_by_group else num_scales_of(granularity, elements // width, width)
    return elements + FLOAT32 * num_scales
