"""The state that an optimizer keeps for a parameter, with the names that torch's optimizers and checkpoints use.

    adamw, adam   exp_avg, exp_avg_sq                  means of gradients and of their squares, by element
    lion          exp_avg                              by element
    sgd           momentum_buffer                      by element, if there is momentum
    adafactor     exp_avg_sq_row, exp_avg_sq_col       of matrices: by row, and by column of each matrix
                  exp_avg_sq                           of norms and biases: by element
    muon          momentum_buffer                      of the layers' matrices: by element
                  exp_avg, exp_avg_sq                  of all other parameters: AdamW's

A state's name means the same for every optimizer that has it.
"""

import math

from shardwright.config.optimizer import OptimizerSpec
from shardwright.config.precision import PrecisionSpec

FACTORS = ("exp_avg_sq_row", "exp_avg_sq_col")  # always float32, because they are small
STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer", *FACTORS)

Shape = tuple[int, ...]


def is_matrix(name: str, full_shape: Shape) -> bool:
    """True if a parameter is one matrix or several. Biases, norms of all heads and sinks are vectors whatever their
    shape: their leading dims only say how ranks share the heads."""
    *_, module, kind = ["", *name.split(".")]
    return len(full_shape) > 1 and not (kind.endswith("bias") or module.endswith("norm") or kind == "sinks")


def is_by_matrix(optimizer: OptimizerSpec, name: str, full_shape: Shape) -> bool:
    """True if the update of a parameter looks at whole matrices, and not at each element alone.

    Muon leaves to AdamW embeddings and the head, whose rows change rarely, and single rows, which are no matrices.
    """
    facts = optimizer.facts
    if facts.matrix_update == "none" or not is_matrix(name, full_shape):
        return False
    return not facts.layers_alone or (name.startswith(("layers.", "mtp.")) and math.prod(full_shape[:-1]) > 1)


def moments_of(optimizer: OptimizerSpec, by_matrix: bool) -> tuple[str, ...]:
    """The states that have a number for each element of a parameter."""
    return optimizer.facts.matrix_moments if by_matrix else optimizer.facts.moments(optimizer)


def states_of(optimizer: OptimizerSpec, name: str, full_shape: Shape) -> tuple[str, ...]:
    """All states of a parameter."""
    by_matrix = is_by_matrix(optimizer, name, full_shape)
    is_factored = by_matrix and optimizer.facts.matrix_update == "factored"
    return moments_of(optimizer, by_matrix) + (FACTORS if is_factored else ())


def moment_bytes(optimizer: OptimizerSpec, precision: PrecisionSpec, by_matrix: bool) -> int:
    """Bytes of the moments of one element."""
    return len(moments_of(optimizer, by_matrix)) * precision.moment_bytes
