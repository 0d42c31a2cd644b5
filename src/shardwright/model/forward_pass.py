"""What all layers of a stage share in one forward pass."""

from dataclasses import dataclass, replace

from torch import Tensor

from shardwright.memory.offload import Convoy
from shardwright.parallel.collectives import Axis
from shardwright.parallel.microbatch import Microbatch


@dataclass(frozen=True)
class ForwardPass:
    """`tp`, `cp`, `ep` and `expert_tp` carry the collectives of this pass. `angles` are cosine and sine of the rotary
    positions, if there are any. There is no `microbatch` where nothing is trained, and then nothing is dropped out. A
    `convoy` takes inputs of recomputed layers to the host.

    Where documents are separate, `documents` [P, B, s] are the numbers of those that the tokens of each rank of cp are
    in; or of the whole sequence, P = 1, where attention sees that.
    """

    tp: Axis
    cp: Axis
    ep: Axis
    expert_tp: Axis
    angles: tuple[Tensor, Tensor] | None
    microbatch: Microbatch | None
    convoy: Convoy | None = None
    documents: Tensor | None = None

    @property
    def in_backward(self) -> "ForwardPass":
        """The same pass, made again during a backward: another forward may run beside it, on the forward's
        communicator."""
        return replace(
            self, tp=self.tp.for_backward, cp=self.cp.for_backward, ep=self.ep.for_backward,
            expert_tp=self.expert_tp.for_backward,
        )  # fmt: skip
