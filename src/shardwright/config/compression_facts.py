"""The registry of gradient compressions by name. The facts of each method are a file in sharding/compressions, and its
arithmetic is a file of the same name in parallel/compress."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from shardwright.config.registry import NameOf, Registry


@dataclass(frozen=True)
class BucketCollective:
    """One collective over the replicas, by its name in the ledger. Bytes may be an array with one entry per plan."""

    kind: str
    num_bytes: Any


@dataclass(frozen=True, kw_only=True)
class CompressionFacts:
    """The facts of a method that are known without computing anything. Numbers may be arrays with one entry per plan.

    - `place` orders lists of methods. `method` makes its arithmetic for a plan, as "module:function"; it is empty if
      gradients are not compressed, and then the facts below are not used.
    - `summed(plan, num_elements, rows, columns, num_ranks)` are the collectives that leave the sum of a bucket on every
      rank. `rows` and `columns` are totals over the matrices of the bucket.
    - `scattered(num_elements, num_ranks)` are the collectives that leave a share of the sum on each rank; None if the
      method leaves the full sum on every rank.
    - `kept_elements(plan, num_elements, columns, num_ranks, shard_size)` are the float32 elements that a rank keeps of
      a bucket from step to step; `shard_size` is 0 if each rank has the whole sum. None if it keeps nothing.
    - `device_bytes` are read and written on the device per element of a float32 gradient: casts, the sum of the shares,
      and with error feedback the addition of the last step's error and the storing of the new error.
    - `takes(plan, num_elements, columns)` is True for a matrix that the method compresses; None if it compresses
      tensors of any shape.
    - `is_of_buckets`: the method works on all tensors of a bucket together.
    - `reads` are fields of [plan] that only this method reads, each with a word for it.
    """

    name: str
    place: int
    method: str = ""
    summed: Callable[[Any, Any, Any, Any, Any], list[BucketCollective]] = lambda *_: []
    scattered: Callable[[Any, Any], list[BucketCollective]] | None = None
    kept_elements: Callable[[Any, int, int, int, int], int] | None = None
    device_bytes: float = 0.0
    takes: Callable[[Any, Any, int], bool] | None = None
    is_of_buckets: bool = False
    reads: Mapping[str, str] = field(default_factory=dict)


COMPRESSIONS: Registry[CompressionFacts] = Registry(
    "a compression", "shardwright.sharding.compressions", CompressionFacts
)
CompressName = Annotated[str, NameOf(COMPRESSIONS)]
