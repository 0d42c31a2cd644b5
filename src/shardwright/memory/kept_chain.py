"""The parts of a layer that are recomputed as a whole or not, with the tensors that this runtime keeps for each.

Parts follow the operators of the layer (layers/layer_operators.py); sizes are bytes on one rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.config.job import JobSpec
from shardwright.layers.layer_operators import LayerOperator, RecomputeUnit, by_recompute_unit
from shardwright.layers.layer_tensors import LabelledTensor, LayerTensor, MlpTensors
from shardwright.memory.kept_tensors import Share, TensorBytes, Tensors


@dataclass(frozen=True)
class LayerPart:
    """A part of a layer, which is recomputed as a whole or not: the tensors it takes, keeps for its backward and gives.

    `waits` are the operands of its weight gradients, which stay from I to W if the backward is split. `beside` are kept
    tensors that it takes from outside the chain.
    """

    name: RecomputeUnit
    takes: LayerTensor
    keeps: Tensors
    gives: LayerTensor
    waits: Tensors = ()
    beside: Tensors = ()

    @property
    def tensors(self) -> Tensors:
        """All tensors of the part."""
        return (self.takes, *self.keeps, self.gives, *self.waits)


Chain = tuple[LayerPart, ...]
UnitTensors = dict[RecomputeUnit, Tensors]


def kept_chain(
    operators: Iterable[LayerOperator],
    keeps: UnitTensors,
    beside: UnitTensors | None = None,
    waits_in_float8: bool = False,
) -> Chain:
    """The parts of a chain of operators. Each keeps its input, or the tensors that `keeps` names for it, and its
    further inputs `beside`. Operands of weight gradients are the inputs of products and the gradients of their results,
    in fp8 if `waits_in_float8` and the product is in fp8."""
    chain = []
    for part, part_operators in by_recompute_unit(operators):
        waits = {
            tensor.in_float8 if waits_in_float8 and product.matrix.sharded_dim is not None else tensor: None
            for operator in part_operators
            for product in operator.products
            for tensor in (product.takes, product.gives)
        }
        part_beside = (beside or {}).get(part, ())
        first, last = part_operators[0], part_operators[-1]
        chain.append(
            LayerPart(
                name=part,
                takes=first.takes,
                keeps=(*keeps.get(part, (first.takes,)), *part_beside),
                gives=last.gives,
                waits=tuple(waits),
                beside=part_beside,
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
