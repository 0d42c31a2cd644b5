"""The tensors that this runtime keeps for the operators of a layer (layers/layer_operators.py).

Sizes are exact bytes on one rank: whole numbers, or arrays of them if the numbers of a job's plan are arrays with one
entry a plan. A condition on arrays must be the same for all plans (`holds`). Nothing here needs numpy.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.layers.layer_operators import LayerOperator, by_recompute_unit
from shardwright.layers.tensor_sizes import TensorSizes

FLOAT32, INT32, INT64, BOOL = 4, 4, 8, 1
IN_FLOAT8 = "{} in fp8"  # the name of a cast tensor

Bytes = Any  # a whole number, or an array of them


@dataclass(frozen=True)
class KeptTensors:
    """A part of a layer, which is recomputed as a whole or not: the tensors it takes, keeps for its backward and gives.

    `waits` are the operands of its weight gradients, which stay from I to W if the backward is split. `beside` are kept
    tensors that it takes from outside the chain.
    """

    name: str
    takes: str
    keeps: tuple[str, ...]
    gives: str
    waits: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


Chain = tuple[KeptTensors, ...]


def kept_chain(
    operators: Iterable[LayerOperator],
    keeps: Mapping[str, tuple[str, ...]],
    beside: Mapping[str, tuple[str, ...]] | None = None,
    waits_in_float8: bool = False,
) -> Chain:
    """The parts of a chain of operators. Each keeps its input, or the tensors that `keeps` names for it, and its
    further inputs `beside`. Operands of weight gradients are the inputs of products and the gradients of their results,
    in fp8 if `waits_in_float8` and the product is in fp8."""
    chain = []
    for part, part_operators in by_recompute_unit(operators):
        waits = {
            IN_FLOAT8.format(name) if waits_in_float8 and product.matrix.sharded_dim is not None else name: None
            for operator in part_operators
            for product in operator.products
            for name in (product.takes, product.gives)
        }
        part_beside = (beside or {}).get(part, ())
        part_keeps = (*keeps.get(part, (part_operators[0].takes,)), *part_beside)
        chain.append(
            KeptTensors(
                part, part_operators[0].takes, part_keeps, part_operators[-1].gives, tuple(waits), beside=part_beside
            )
        )
    return tuple(chain)


@dataclass(frozen=True)
class Share:
    """A rank's share of a microbatch: `element` bytes of a number, and the size of each tensor."""

    element: int
    is_rmsnorm: bool
    tensors: TensorSizes

    @classmethod
    def of(cls, job: JobSpec, sent: Bytes = 0, arrived: Bytes = 0) -> "Share":
        """The share of any rank of a job, which has `sent` rows for experts and of which `arrived` rows arrive."""
        plan, tokens = job.plan, job.tokens_within * job.plan.microbatch_size
        tokens_here = tokens // plan.tp if plan.sequence_parallel else tokens
        tensors = TensorSizes(
            shape_of(job.model),
            plan.tp,
            plan.expert_tp_size,
            tokens,
            tokens_here,
            routed=tokens_here,
            sent=sent,
            arrived=arrived,
        )
        return cls(job.precision.compute_bytes, job.model.norm == "rmsnorm", tensors)

    def __getitem__(self, tensor: str) -> Bytes:
        """Bytes of a tensor by its name, in the number type of the model."""
        return self.element * self.tensors[tensor]

    def sizes(self, operators: Iterable[LayerOperator]) -> dict[str, Bytes]:
        """Bytes, by name, of all tensors that operators take and give."""
        return {name: self[name] for operator in operators for name in operator.tensors}

    def statistics(self, rows: Bytes) -> Bytes:
        """The bytes that a norm of `rows` vectors keeps besides its input.

        RMSNorm keeps 1 / rms in float32; LayerNorm keeps mean and 1 / deviation, in the number type of x on a CPU.
        """
        return FLOAT32 * rows if self.is_rmsnorm else 2 * self.element * rows


def activation_keeps(job: JobSpec, prefix: str = "") -> tuple[str, ...]:
    """The tensor that an activation keeps: its input, or for relu its result. Biases of experts are added in place,
    others are not."""
    if job.model.activation == "relu" and not job.model.gated_mlp:
        return (f"{prefix}inner",)
    return (f"biased {prefix}up",) if job.model.bias and prefix != "expert " else (f"{prefix}up",)
