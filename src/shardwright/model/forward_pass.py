"""Values that all layers of a stage share in one forward pass."""

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import functional

from shardwright.model.position_tables import PositionTables
from shardwright.parallel.context.document_mask import follows, is_real
from shardwright.parallel.device_streams import DeviceStreams
from shardwright.parallel.expert.counting import HostNumbers
from shardwright.parallel.pipeline.microbatch import Microbatch
from shardwright.parallel.recompute.offload import Convoy


@dataclass(frozen=True)
class RealTokens:
    """The tokens of a microbatch that belong to documents, [B, S]; others fill samples up, and no expert computes them.
    `counts_B` says how many each sample has, on all ranks that hold parts of it, and `total`, on the host, all."""

    mask_BS: Tensor
    counts_B: Tensor
    total: HostNumbers

    @classmethod
    def of(cls, marked_BT: Tensor, distance: int = 0, streams: DeviceStreams | None = None) -> "RealTokens":
        """The tokens of documents among all but the last of tokens with marks, T = S + 1; and where there is a
        `distance`, those of them whose document goes on so much further."""
        mask_BS = is_real(marked_BT[:, :-1])
        if distance:
            mask_BS = mask_BS.logical_and_(functional.pad(follows(marked_BT, distance), (0, distance - 1)))
        counts_B = mask_BS.sum(dim=1)
        return cls(mask_BS, counts_B, HostNumbers(counts_B.sum(dim=0, keepdim=True), streams))

    def num_tokens(self) -> int:
        """How many they are, for which the host waits. In a dry run no token has a value: all are taken for real."""
        return self.total.read([self.mask_BS.numel()] if self.mask_BS.is_meta else None)[0]


@dataclass(frozen=True)
class ForwardPass:
    """`tables` are what layers look up by position. There is no `microbatch` where nothing is trained, and then
    nothing is dropped out. A `convoy` takes inputs of recomputed layers to the host.

    Where documents are separate, `documents` [P, B, s] are the numbers of those that the tokens of each rank of cp are
    in; or of the whole sequence, P = 1, where attention sees that. `chunks` are those of the chunks that documents are
    cut into, in a model that has chunks. Without `real` tokens all of them are. `streams` are the device's.
    """

    tables: PositionTables
    microbatch: Microbatch | None
    convoy: Convoy | None = None
    documents: Tensor | None = None
    chunks: Tensor | None = None
    real: RealTokens | None = None
    streams: DeviceStreams | None = None

    def ahead(self, marked_BT: Tensor | None, distance: int) -> "ForwardPass":
        """The pass of a module that sees the tokens so much further: those whose document has ended before it are as
        filling to it."""
        if self.real is None or marked_BT is None:
            return self
        return replace(self, real=RealTokens.of(marked_BT, distance, self.streams))
