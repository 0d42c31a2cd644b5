"""Values that all layers of a stage share in one forward pass."""

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import functional

from shardwright.model.position_tables import PositionTables
from shardwright.parallel.context.document_mask import follows, is_real
from shardwright.parallel.device_streams import DeviceStreams, HostNumbers
from shardwright.parallel.pipeline.pipeline_stage import Microbatch
from shardwright.parallel.recompute.offload import Convoy


@dataclass(frozen=True)
class RealTokens:
    """The mask [B, S] of the tokens of a microbatch that belong to documents; the others fill samples up, and no expert
    computes them. `counts_B` is the number of real tokens of each sample, over all ranks that hold parts of it, and
    `total` their sum, on the host."""

    mask_BS: Tensor
    counts_B: Tensor
    total: HostNumbers

    @classmethod
    def of(cls, marked_BT: Tensor, distance: int = 0, streams: DeviceStreams | None = None) -> "RealTokens":
        """The real tokens among the first S of T = S + 1 tokens with marks. With a `distance`, only the tokens whose
        document goes on for that many tokens."""
        mask_BS = is_real(marked_BT[:, :-1])
        if distance:
            mask_BS = mask_BS.logical_and_(functional.pad(follows(marked_BT, distance), (0, distance - 1)))
        counts_B = mask_BS.sum(dim=1)
        return cls(mask_BS, counts_B, HostNumbers(counts_B.sum(dim=0, keepdim=True), streams))

    def num_tokens(self) -> int:
        """The number of real tokens; the host waits for it. In a dry run tokens have no values, and all count as
        real."""
        return self.total.read([self.mask_BS.numel()] if self.mask_BS.is_meta else None)[0]


@dataclass(frozen=True)
class ForwardPass:
    """Values of one forward pass. Layers look up `tables` by position. `microbatch` is None without training; then
    there is no dropout. A `convoy` offloads the inputs of recomputed layers to the host.

    With separate documents, `documents` [P, B, s] has the document number of each token, for each rank of cp; P = 1 if
    attention sees the whole sequence. `chunks` has the chunk number alike, in a model whose attention is limited to
    chunks of a document. `real` is None if all tokens are real. `streams` are the streams of the device.
    """

    tables: PositionTables
    microbatch: Microbatch | None
    convoy: Convoy | None = None
    documents: Tensor | None = None
    chunks: Tensor | None = None
    real: RealTokens | None = None
    streams: DeviceStreams | None = None

    def ahead(self, marked_BT: Tensor | None, distance: int) -> "ForwardPass":
        """The pass of a module that sees tokens `distance` further: a token whose document ends before that counts as
        filling."""
        if self.real is None or marked_BT is None:
            return self
        return replace(self, real=RealTokens.of(marked_BT, distance, self.streams))
