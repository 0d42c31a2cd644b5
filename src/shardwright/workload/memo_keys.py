"""From which numbers and words of a plan follows what its layers cost: what a memo (memo.py) tells them apart by."""

from typing import Any

import numpy as np

from shardwright.workload.arrays import Array
from shardwright.workload.query import PlanGrid


def layer_words(cut: PlanGrid) -> tuple[Any, ...]:
    """What of a plan beside its numbers says what a layer computes, sends and keeps, but for what it recomputes."""
    return cut.precision, cut.cp_method, cut.dispatch


def plain_columns(cut: PlanGrid) -> tuple[Array, ...]:
    """The whole numbers from which follows what a piece without experts computes, sends and keeps. `cut` is of
    arrays."""
    flags = (cut.sequence_parallel, cut.offload_activations)
    return cut.tp, cut.cp, cut.microbatch, *(flag.astype(np.int64) for flag in flags)


def layer_columns(cut: PlanGrid) -> tuple[Array, ...]:
    """The numbers of a plan that determine what a layer of any kind costs."""
    return *plain_columns(cut), cut.ep, cut.expert_tp


def shard_words(cut: PlanGrid) -> tuple[Any, ...]:
    """What beside its numbers says how the parameters of a layer come together under ZeRO-3."""
    return cut.precision, cut.reduce_bytes


def shard_columns(cut: PlanGrid) -> tuple[Array, ...]:
    """The numbers that determine how the parameters of a layer come together under ZeRO-3. `cut` is of arrays."""
    is_sharded = cut.zero == 3
    return (
        cut.tp, cut.ep, cut.expert_tp, is_sharded * cut.cp, is_sharded * cut.dp, is_sharded * (1 + cut.zero_ranks),
        cut.offload_parameters.astype(np.int64), is_sharded * cut.num_copies,
    )  # fmt: skip
