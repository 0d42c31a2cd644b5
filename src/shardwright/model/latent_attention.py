"""Multi-head latent attention. DeepSeek-V2 (arXiv 2405.04434, section 2.1); DeepSeek-V3 (arXiv 2412.19437, 2.1.1).

A token is projected to a latent for queries, a latent for keys and values, and a rotary part of the key that all heads
share. Each head's query, key and value are products of the latents. Heads are split over tp, but latents are not: every
rank computes the down product and the norms. So under sequence parallel ranks gather the latents before the heads, and
not the wider residual stream.

The tensors that its backward keeps are listed in memory/attention_activations.py; their sizes are in
memory/kept_tensors.py (InnerLatent) and layers/layer_tensors.py (LatentTensors).

Shape suffixes: S sequence, B batch, H hidden, N heads of this rank, R width of the queries' latent, C width of the
latent of keys and values, P width of the rotary part of a head, D width of a head's query and key (nope + P), E width
of a head's value, L = R + C + P, M = D - P + E; s is S / tp under sequence parallel.
"""

from typing import Any

import torch
from torch import Tensor, nn

from shardwright.config.model import ModelSpec
from shardwright.model.attention_core import dot_product_attention
from shardwright.model.forward_pass import ForwardPass
from shardwright.model.norm import Norm
from shardwright.model.rotary import turn
from shardwright.parallel.context.attention_rule import AttentionRule
from shardwright.parallel.tensor.column_products import Part, column_products
from shardwright.parallel.tensor.linear import ColumnLinear, LayerSharding, ReplicatedLinear, RowLinear, local_product
from shardwright.parallel.tensor.product_input import ProductInput
from shardwright.sharding.stage_parameters import residual_std


class LatentAttention(nn.Module):
    """The operators of ordinary attention: `project` computes the latents, `attend` all larger tensors, and `out` takes
    [S, B, N x E] to [s, B, H].

    So a block that recomputes `attend` keeps the latents of a token, and no query, key or value (DeepSeek-V3, section
    3.2.3). `down` is one matrix for both latents and the rotary key, in this order.

    Without low-rank queries (R = 0) `project` computes the heads' queries too, from the whole sequence. Then `down`
    shares their collective: each rank computes the latents of all tokens, for its own heads.
    """

    def __init__(self, spec: ModelSpec, sharding: LayerSharding) -> None:
        super().__init__()
        latent = spec.latent
        self.sharding = sharding
        self.rule = AttentionRule(spec.softmax_scale)
        self.widths = (latent.q_rank, latent.kv_rank, latent.rope_dim)
        self.query_width, self.nope_width = spec.query_width, latent.nope_dim
        heads = spec.heads
        # Without low-rank queries each tp rank has a part of the gradients of the weights that all ranks hold whole.
        sum_axis = None if latent.q_rank else sharding.tp
        self.down = ReplicatedLinear(spec.hidden, sum(self.widths), sharding, spec.init_std, summed_over=sum_axis)
        normed = spec.model_copy(update={"norm_epsilon": latent.norm_epsilon or spec.norm_epsilon})
        self.q_norm = Norm(normed, sharding, latent.q_rank) if latent.q_rank else None
        self.kv_norm = Norm(normed, sharding, latent.kv_rank, summed_over=sum_axis)
        self.q_up = ColumnLinear(
            latent.q_rank or spec.hidden, (heads, self.query_width), 0, sharding, std=spec.init_std
        )
        kv_shape = (heads, latent.nope_dim + latent.value_dim)
        self.kv_up = ColumnLinear(latent.kv_rank, kv_shape, 0, sharding, std=spec.init_std)
        std = residual_std(spec.init_std, spec.layers)
        self.out = RowLinear(heads * latent.value_dim, spec.hidden, False, sharding, std=std, owns_input=False)

    def project(self, x_sBH: ProductInput) -> Tensor:
        """[s, B, H] to latents, [s, B, L]; without low-rank queries to queries and latents, [S, B, N x D + L]."""
        if self.q_norm is not None:
            return self.down(x_sBH)
        hidden = self.q_up.weight.shape[-1]
        parts = (Part(0, hidden, self.q_up.weight), Part(0, hidden, self.down.weight))
        return torch.cat(column_products(x_sBH, parts, self.sharding), dim=-1)

    def attend(self, projected: Tensor, run: ForwardPass) -> Tensor:
        """From the result of `project` to [S, B, N x E]: norms, the up products of the heads, rotary positions and
        softmax."""
        q, kv, k_rope_SBP = self._heads(projected, run)
        S, B, _ = q.shape
        rotary_tables = run.tables.turned
        assert rotary_tables is not None, "latent attention has rotary positions"
        cosine, sine = (table[:, :, 0] for table in rotary_tables)  # all heads of a token have the same angles
        q, kv = q.view(S, B, -1, self.query_width), kv.view(S, B, q.shape[-1] // self.query_width, -1)
        q_SBND, k_SBND, v_SBNE = _RotateAndSpread.apply(q, kv, k_rope_SBP, cosine, sine)
        return dot_product_attention(q_SBND, k_SBND, v_SBNE, self.rule, sharding=self.sharding, run=run).reshape(
            S, B, -1
        )

    def _heads(self, projected: Tensor, run: ForwardPass) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [S, B, N x D], keys without position and values [S, B, N x (D - P + E)], the rotary key [S, B, P]."""
        R, C, P = self.widths
        if self.q_norm is not None:
            q_sBR, kv_sBC, k_sBP = projected.split(self.widths, dim=-1)
            latents_sBL = torch.cat((self.q_norm(q_sBR), self.kv_norm(kv_sBC), k_sBP), dim=-1)
            parts = (Part(0, R, self.q_up.weight), Part(R, R + C, self.kv_up.weight), Part(R + C, R + C + P))
            q, kv, k_rope_SBP = column_products(latents_sBL, parts, self.sharding)
            return q, kv, k_rope_SBP
        q, kv_SBC, k_rope_SBP = projected.split((projected.shape[-1] - C - P, C, P), dim=-1)
        # A copy, since the norm would keep the whole tensor of which this is a view.
        latent_SBC = self.kv_norm(kv_SBC.clone(memory_format=torch.contiguous_format))
        return q, local_product(latent_SBC, self.kv_up.weight, self.sharding), k_rope_SBP


class _RotateAndSpread(torch.autograd.Function):
    """Forward: turns the rotary part of queries and of the shared key, which every head gets beside its own part of the
    key; copies values, since a view would keep the keys alive. Backward: turns the gradients back, into the tensors
    that the backwards of the products need; the rotary key's gradient is the sum over heads. Keeps nothing."""

    @staticmethod
    def forward(
        ctx: Any, q_SBND: Tensor, kv_SBNM: Tensor, k_rope_SBP: Tensor, cosine: Tensor, sine: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.cosine, ctx.sine = cosine, sine
        ctx.nope = nope = q_SBND.shape[-1] - k_rope_SBP.shape[-1]
        q = torch.empty(q_SBND.shape, dtype=q_SBND.dtype, device=q_SBND.device)
        k = torch.empty_like(q)
        turned_SB1P = torch.empty_like(k_rope_SBP.unsqueeze(2))
        turn(k_rope_SBP.unsqueeze(2), cosine, sine, turned_SB1P, interleaved=True)
        q[..., :nope].copy_(q_SBND[..., :nope])
        turn(q_SBND[..., nope:], cosine, sine, q[..., nope:], interleaved=True)
        k[..., :nope].copy_(kv_SBNM[..., :nope])
        k[..., nope:].copy_(turned_SB1P)
        return q, k, kv_SBNM[..., nope:].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        dq, dk, dv = grads
        nope, cosine, sine = ctx.nope, ctx.cosine, -ctx.sine
        dq_SBND = torch.empty(dq.shape, dtype=dq.dtype, device=dq.device)
        dq_SBND[..., :nope].copy_(dq[..., :nope])
        turn(dq[..., nope:], cosine, sine, dq_SBND[..., nope:], interleaved=True)
        dkv_SBNM = torch.cat((dk[..., :nope], dv), dim=-1)
        dk_rope = dk[..., nope:].sum(dim=2, keepdim=True, dtype=torch.float32)
        dk_rope_SB1P = torch.empty(dk_rope.shape, dtype=dk.dtype, device=dk.device)
        turn(dk_rope, cosine, sine, dk_rope_SB1P, interleaved=True)
        return dq_SBND, dkv_SBNM, dk_rope_SB1P.squeeze(2), None, None
