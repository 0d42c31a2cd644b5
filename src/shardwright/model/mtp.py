"""Multi-token prediction: modules after the last layer that each predict one token further.

DeepSeek-V3 (arXiv 2412.19437, section 2.2). Module k takes the hidden states h of module k - 1, or for k = 1 those of
the last layer before its final norm, and the embeddings e of the tokens k further. It computes P [norm(e) ; norm(h)],
then a block like the last layer, then its own norm and the head of the model. The target of position i is token
i + k + 1. The embedding comes first in the product, as in the released weights and inference code; equation 21 of the
paper has the opposite order.

The last k positions of a sequence have no such target. There module k sees id 0 in place of a token; no earlier
position sees that id.

The tensors that its backward keeps before the block are listed in memory/layer_memory.py; their sizes are in
memory/kept_tensors.py (InnerEnds).

Shape suffixes: S sequence, s tokens of this rank between layers, B batch, H hidden, T = S + 1.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.config.model import ModelSpec
from shardwright.config.recompute_policy import Policy
from shardwright.model.embedding import look_up
from shardwright.model.forward_pass import ForwardPass
from shardwright.model.norm import Norm
from shardwright.model.position_tables import pick
from shardwright.model.recomputed_block import make_block
from shardwright.parallel.context.document_mask import has_target
from shardwright.parallel.tensor.linear import LayerSharding, ReplicatedLinear
from shardwright.parallel.tensor.parameter import PlacedParameter


class FurtherToken(nn.Module):
    """One module of multi-token prediction. `norm` precedes the head, and belongs to the head's region.

    The projection is whole on every tp rank: each computes the tokens that it has between the layers.
    """

    def __init__(self, spec: ModelSpec, number: int, sharding: LayerSharding, policy: Policy) -> None:
        """`number` is the number of the module's block, counted on from the layers of the model."""
        super().__init__()
        self.spec, self.sharding = spec, sharding
        self.distance = number - spec.layers + 1
        self.hidden_norm = Norm(spec, sharding)
        self.embedding_norm = Norm(spec, sharding)
        self.project = ReplicatedLinear(2 * spec.hidden, spec.hidden, sharding, spec.init_std)
        self.block = make_block(spec, number, sharding, policy)
        self.norm = Norm(spec, sharding)

    def before_head(self) -> list[nn.Module]:
        """The modules before the head, in order."""
        return [self.hidden_norm, self.embedding_norm, self.project, self.block]

    def forward(self, x_sBH: Tensor, targets_BS: Tensor, table: PlacedParameter, run: ForwardPass) -> Tensor:
        """[s, B, H] to [s, B, H]. `targets_BS` are the next tokens, `table` the embedding table."""
        ids_BS = further_ids(targets_BS, self.distance - 1)
        rows_SB = pick(ids_BS, self.sharding.held(self.spec.sequence)).t()
        e_sBH = look_up(rows_SB, table, self.spec.vocab, self.sharding, scale=self.spec.embedding_scale)
        hidden_sBH = self.hidden_norm(x_sBH)
        joined_sB2H = torch.cat((self.embedding_norm(e_sBH), hidden_sBH), dim=-1)
        return self.block(self.project(joined_sB2H), run)


def further_ids(ids_BS: Tensor, distance: int) -> Tensor:
    """The ids `distance` positions further, and 0 past the end of the sequence, [B, S]. The argument itself if the
    distance is 0."""
    return functional.pad(ids_BS[:, distance:], (0, distance)) if distance else ids_BS


def skipped_targets(ids_BS: Tensor, marked_BT: Tensor | None, distance: int) -> Tensor:
    """A mask of the positions whose target, `distance` after the next token, has no loss, [B, S]: the target is past
    the end of the sequence, in another document, or marked as one that does not count."""
    if marked_BT is not None:
        return functional.pad(~has_target(marked_BT, distance + 1), (0, distance), value=True)
    skipped_BS = torch.zeros_like(ids_BS, dtype=torch.bool)
    skipped_BS[:, ids_BS.shape[1] - distance :] = True
    return skipped_BS
