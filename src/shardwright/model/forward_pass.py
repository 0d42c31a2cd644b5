"""What all layers of a stage share in one forward pass."""

from dataclasses import dataclass

from torch import Tensor

from shardwright.model.position_tables import PositionTables
from shardwright.parallel.pipeline.microbatch import Microbatch
from shardwright.parallel.recompute.offload import Convoy


@dataclass(frozen=True)
class ForwardPass:
    """`tables` are what layers look up by position. There is no `microbatch` where nothing is trained, and then
    nothing is dropped out. A `convoy` takes inputs of recomputed layers to the host.

    Where documents are separate, `documents` [P, B, s] are the numbers of those that the tokens of each rank of cp are
    in; or of the whole sequence, P = 1, where attention sees that.
    """

    tables: PositionTables
    microbatch: Microbatch | None
    convoy: Convoy | None = None
    documents: Tensor | None = None
