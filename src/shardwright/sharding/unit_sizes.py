"""The sizes of a unit of ZeRO, on which its events (zero_events.py) depend."""

from dataclasses import dataclass


@dataclass(frozen=True)
class UnitSizes:
    """The sizes of a unit: its stage of ZeRO; elements of its whole buffer and of one shard, with padding; bytes per
    element of its values, of an accumulated gradient, of a gradient in a reduction and of the weights that the
    optimizer updates; its parameters, and how many get their gradient in W. A frozen unit has values alone."""

    zero: int
    size: int
    shard_size: int
    compute_bytes: int
    gradient_bytes: int
    reduce_bytes: int
    master_bytes: int
    num_parameters: int
    num_put_off: int
    is_frozen: bool = False
