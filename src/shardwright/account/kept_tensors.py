"""The tensors that our runtime keeps of a layer's operators, laid over the one list of operators
(workload/layer_operators.py).

Sizes are bytes on one rank, whole numbers, exact; or arrays of them, where the numbers of a job's plan are arrays with
one entry a plan. Conditions on these must hold of all plans (`holds`). Nothing here needs numpy.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.workload.layer_operators import LayerOperator, by_part
from shardwright.workload.tensor_sizes import TensorSizes

FLOAT32, INT32, INT64, BOOL = 4, 4, 8, 1
IN_FLOAT8 = "{} in fp8"  # what a tensor is called that was cast

Bytes = Any  # a whole number, or an array of them


@dataclass(frozen=True)
class KeptTensors:
    """A part of a layer, which runs again as a whole or not: the tensors it takes, keeps for its backward and gives.

    `waits` are those that its weight gradients are made from, and so stay from I to W where the backward is split.
    `beside` are tensors from outside the chain that it takes too, of those that it keeps.
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
    """The parts of a chain of operators. Each keeps what it takes, if `keeps` does not name other tensors, and what it
    takes `beside` that; weight gradients are made from what products take, and from the gradients of what they give, in
    fp8 where that is said and the product itself is."""
    chain = []
    for part, some in by_part(operators):
        waits = {
            IN_FLOAT8.format(name) if waits_in_float8 and product.matrix.cut is not None else name: None
            for o in some
            for product in o.products
            for name in (product.takes, product.gives)
        }
        also = (beside or {}).get(part, ())
        kept = (*keeps.get(part, (some[0].takes,)), *also)
        chain.append(KeptTensors(part, some[0].takes, kept, some[-1].gives, tuple(waits), beside=also))
    return tuple(chain)


@dataclass(frozen=True)
class Share:
    """A rank's share of a microbatch: `element` bytes of a number, and the size of each tensor."""

    element: int
    is_rmsnorm: bool
    tensors: TensorSizes

    @classmethod
    def of(cls, job: JobSpec, sent: Bytes = 0, arrived: Bytes = 0) -> "Share":
        """The share of any rank of a job, whose rows for experts are so many."""
        plan, tokens = job.plan, job.tokens_within * job.plan.microbatch_size
        here = tokens // plan.tp if plan.sequence_parallel else tokens
        tensors = TensorSizes(
            shape_of(job.model), plan.tp, plan.expert_tp_size, tokens, here, routed=here, sent=sent, arrived=arrived
        )
        return cls(job.precision.compute_bytes, job.model.norm == "rmsnorm", tensors)

    def __getitem__(self, tensor: str) -> Bytes:
        """Bytes of a tensor of the list, in the number type of the model."""
        return self.element * self.tensors[tensor]

    def sizes(self, operators: Iterable[LayerOperator]) -> dict[str, Bytes]:
        """Bytes of all tensors that operators take and give."""
        return {name: self[name] for operator in operators for name in operator.tensors}

    def statistics(self, rows: Bytes) -> Bytes:
        """The bytes that a norm of so many vectors keeps besides its input.

        RMSNorm keeps 1 / rms in float32; LayerNorm keeps mean and 1 / deviation, in the number type of x on a CPU.
        """
        return FLOAT32 * rows if self.is_rmsnorm else 2 * self.element * rows


def activation_keeps(job: JobSpec, prefix: str = "") -> tuple[str, ...]:
    """The tensor that an activation by itself keeps: what it takes, or of relu what it gives. Biases of experts are
    added in place, others are not."""
    if job.model.activation == "relu" and not job.model.gated_mlp:
        return (f"{prefix}inner",)
    return (f"biased {prefix}up",) if job.model.bias and prefix != "expert " else (f"{prefix}up",)
