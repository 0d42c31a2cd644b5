"""The gradients that a method of compression takes, and the collectives of one bucket of them; parallel/compress runs
these collectives. The facts of each method are in sharding/compressions.

Bytes of a collective are counted as in the ledger of a run: the operand of an all-reduce or all-to-all, the result of
an all-gather. Bytes on the wire are the bytes that all d ranks of the axis send together (`wire_bytes`).
"""

import math
from collections.abc import Sequence
from typing import Any

from shardwright.config.compression_facts import COMPRESSIONS, BucketCollective
from shardwright.config.phrase import say
from shardwright.config.plan import PlanSpec
from shardwright.sharding.groups import zero_stage
from shardwright.sharding.mesh import expert_axis_sizes
from shardwright.sharding.parameter_shard import ParameterShard


def reduced_bucket(
    plan: PlanSpec, places: Sequence[ParameterShard], num_ranks: int, itemsize: int = 4
) -> list[BucketCollective]:
    """Collectives that leave the sum of a bucket on every rank. `itemsize` is bytes of an uncompressed element."""
    if num_ranks == 1:
        return []
    facts = COMPRESSIONS[plan.compress]
    if not facts.method:
        return _as_they_are(places, itemsize)
    large, small = _split(plan, places)
    rows, columns = (sum(lengths) for lengths in zip(*map(_sides, large), strict=True)) if large else (0, 0)
    num_large = sum(place.num_elements for place in large)
    return _as_they_are(small, itemsize) + (facts.summed(plan, num_large, rows, columns, num_ranks) if large else [])


def scattered_bucket(
    plan: PlanSpec, places: Sequence[ParameterShard], num_ranks: int, num_elements: int, itemsize: int = 4
) -> list[BucketCollective]:
    """Collectives that leave a share of the sum on each rank. `num_elements` is the size of the bucket with padding.
    ValueError if the bucket does not split into equal shares."""
    if num_elements % num_ranks:
        raise ValueError(
            say(
                "a bucket of {elements} elements has no equal shares for {ranks} ranks ({elements} / {ranks} = "
                "{quotient:.2f}); pad it to a multiple of {ranks}",
                elements=num_elements,
                ranks=num_ranks,
                quotient=num_elements / num_ranks,
            )
        )
    facts = COMPRESSIONS[plan.compress]
    if not facts.method and num_ranks > 1:
        return [BucketCollective("reduce_scatter", itemsize * num_elements)]
    if facts.scattered is None:
        return reduced_bucket(plan, places, num_ranks, itemsize)
    if num_ranks == 1:
        return []
    large, small = _split(plan, places)
    return _as_they_are(small, itemsize) + (facts.scattered(num_elements, num_ranks) if large else [])


def compressed(plan: PlanSpec, places: Sequence[ParameterShard]) -> list[ParameterShard]:
    """The tensors of a bucket that the method compresses; all others travel as they are."""
    return _split(plan, places)[0] if COMPRESSIONS[plan.compress].method else []


def wire_bytes(collectives: Sequence[BucketCollective], num_ranks: Any) -> Any:
    """Bytes that all ranks send together, by bandwidth-optimal algorithms (a ring, for example).

    Each of the d ranks sends (d - 1) / d of the bytes of a gathered or exchanged tensor, and twice that of a reduced
    tensor (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms"). The sum is an integer.
    """
    times = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
    return (num_ranks - 1) * sum(times[collective.kind] * collective.num_bytes for collective in collectives)


def _as_they_are(small: Sequence[ParameterShard], itemsize: int) -> list[BucketCollective]:
    return [BucketCollective("all_reduce", itemsize * sum(place.num_elements for place in small))] if small else []


def _split(plan: PlanSpec, places: Sequence[ParameterShard]) -> tuple[list[ParameterShard], list[ParameterShard]]:
    """(tensors that the method compresses, tensors that it does not)."""
    large = [place for place in places if is_compressed(plan, place)]
    return large, [place for place in places if not is_compressed(plan, place)]


def is_compressed(plan: PlanSpec, place: ParameterShard) -> bool:
    """True if the method compresses a tensor: it is large enough and, for a method of matrices, a matrix that the
    method makes smaller. A method that looks at whole buckets takes no tensor that ranks with other buckets hold too,
    because these copies must stay equal."""
    num_elements = place.mean_elements  # the mean, so that all parts of a tensor are compressed or none
    if num_elements < plan.compress_least:
        return False
    facts = COMPRESSIONS[plan.compress]
    if facts.is_of_buckets and _is_among_others_elsewhere(plan, place):
        return False
    return facts.takes is None or (len(place.shape) > 1 and facts.takes(plan, num_elements, place.shape[-1]))


def _is_among_others_elsewhere(plan: PlanSpec, place: ParameterShard) -> bool:
    """True if ranks that do not sum gradients with this one hold the tensor too, in a bucket with different tensors: tp
    ranks, which have other parts of the matrices around it; or the ranks with the other end of a tied table, if it is
    gathered with its neighbours."""
    tp = expert_axis_sizes(plan)["etp"] if place.is_expert else plan.tp
    is_whole = tp > 1 and not {"tp", "etp"} & set(place.sharded_over)
    return is_whole or (place.is_tied and plan.pp > 1 and zero_stage(plan) == 3)


def _sides(place: ParameterShard) -> tuple[int, int]:
    """Rows and columns of a matrix; all leading dims are rows."""
    return math.prod(place.shape[:-1]), place.shape[-1]
