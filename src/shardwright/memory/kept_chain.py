"""The parts of a layer that are recomputed as a whole or not, with the tensors that this runtime keeps for each.

Parts follow the operators of the layer (layers/layer_operators.py); sizes are bytes on one rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.config.adapter import AdapterSpec
from shardwright.config.job import JobSpec
from shardwright.layers.layer_operators import LayerOperator, RecomputeUnit, by_recompute_unit
from shardwright.layers.layer_tensors import LabelledTensor, LayerTensor, MlpTensors
from shardwright.memory.kept_tensors import Share, TensorBytes, Tensors, input_of_ups


@dataclass(frozen=True)
class LayerPart:
    """A part of a layer, which is recomputed as a whole or not: the tensors it takes, keeps for its backward and gives.

    `waits` are the operands of its weight gradients, which stay from I to W if the backward is split. `beside` are kept
    tensors that it takes from outside the chain, and `always` those that it keeps even if its input is recomputed.
    """

    name: RecomputeUnit
    takes: LayerTensor
    keeps: Tensors
    gives: LayerTensor
    waits: Tensors = ()
    beside: Tensors = ()
    always: Tensors = ()

    @property
    def tensors(self) -> Tensors:
        """All tensors of the part."""
        return (self.takes, *self.keeps, self.gives, *self.waits, *self.always)


_NO_ADAPTER = AdapterSpec()

Chain = tuple[LayerPart, ...]
UnitTensors = dict[RecomputeUnit, Tensors]


def kept_chain(
    operators: Iterable[LayerOperator],
    keeps: UnitTensors,
    beside: UnitTensors | None = None,
    waits_in_float8: bool = False,
    adapter: AdapterSpec = _NO_ADAPTER,
) -> Chain:
    """The parts of a chain of operators. Each keeps its input, or the tensors that `keeps` names for it, and its
    further inputs `beside`. A product with a frozen weight keeps its input only if an `adapter` of its maps needs it.
    Operands of weight gradients are the inputs of products and the gradients of their results, in fp8 if
    `waits_in_float8` and the product is in fp8."""
    chain = []
    for part, part_operators in by_recompute_unit(operators):
        waits = {
            tensor.in_float8 if waits_in_float8 and product.matrix.sharded_dim is not None else tensor: None
            for operator in part_operators
            for product in operator.products
            for tensor in (product.takes, product.gives)
        }
        part_beside = (beside or {}).get(part, ())
        always: Tensors = ()
        part_keeps = keeps.get(part, (part_operators[0].takes,))
        products = [operator for operator in part_operators if operator.products]
        if adapter.rank and products:
            (operator,) = products
            matrix = operator.products[0].matrix
            is_target = bool(adapter.targets_of(matrix))
            always, waits = ((input_of_ups(operator.name, matrix),), waits) if is_target else ((), {})
            # Others, such as routers, are listed without their input.
            part_keeps = part_keeps if is_target or not adapter.maps(matrix) else ()
        first, last = part_operators[0], part_operators[-1]
        chain.append(
            LayerPart(
                name=part,
                takes=first.takes,
                keeps=(*part_keeps, *part_beside),
                gives=last.gives,
                waits=tuple(waits),
                beside=part_beside,
                always=always,
            )
        )
    return tuple(chain)


def chain_bytes(share: Share, chain: Chain, in_float8: TensorBytes) -> TensorBytes:
    """Bytes of all tensors of a chain, by tensor; those of casts to fp8 are given."""
    tensors = dict.fromkeys(tensor for part in chain for tensor in part.tensors)
    return share.bytes_of(tensor for tensor in tensors if tensor not in in_float8) | in_float8


def activation_keeps(job: JobSpec, mlp: MlpTensors, biased_up: LabelledTensor | None = None) -> Tensors:
    """The tensor that the activation of an MLP keeps: its input, or for relu its result. Biases are added to a copy,
    `biased_up`, or in place."""
    if job.model.activation == "relu" and not job.model.gated_mlp:
        return (mlp.inner,)
    return (biased_up,) if job.model.has_mlp_bias and biased_up else (mlp.up,)
