"""Methods of gradient compression by name. The facts of each are a file in sharding/compressions, and its arithmetic is
a file of the same name in parallel/compress. Here one asks for the facts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from shardwright.config.registry import NameOf, Registry


@dataclass(frozen=True)
class BucketCollective:
    """One collective over the replicas, by its name in the ledger. Bytes may be an array with one entry a plan."""

    kind: str
    num_bytes: Any


@dataclass(frozen=True, kw_only=True)
class CompressionFacts:
    """The facts of a method, known without computing anything. Numbers may be arrays with one entry a plan.

    - `place` is its place in lists. `method` makes its arithmetic for a plan, as "module:function"; it is empty if
      gradients travel as they are, and the facts below are not asked for then.
    - `summed(plan, num_elements, rows, columns, num_ranks)` are the collectives that leave the sum of a bucket on every
      rank. The bucket has matrices of so many rows and columns together.
    - `scattered(num_elements, num_ranks)` are those that leave a share of the sum on each rank; None if the method sums
      whole tensors on every rank.
    - `kept_elements(plan, num_elements, columns, num_ranks, shard_size)` are the float32 elements that a rank keeps of
      a bucket from step to step; `shard_size` is 0 if each rank has the whole sum. None if it keeps nothing.
    - `device_bytes` are read and written on the device for each element of a float32 gradient: casts, the sum of the
      shares, and with error feedback adding the error of the last step and keeping the new one.
    - `takes(plan, num_elements, columns)` is True for a matrix that the method makes smaller; None if it takes tensors
      of any shape.
    - `is_of_buckets`: the method looks at all tensors of a bucket together.
    - `reads` are fields of [plan] that this method alone reads, and what each is called.
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
