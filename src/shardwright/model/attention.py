"""Causal self-attention with grouped queries. Vaswani et al. 2017; Ainslie et al. 2023 (arXiv 2305.13245).

Heads are split over tp: each rank attends with its own, and the output projection sums over all. Tokens are split over
cp: parallel/context.py brings keys to queries.

Shape suffixes: S sequence of this rank, B batch, H hidden, G key/value heads of this rank, Q query heads of a key/value
head, N = G x Q query heads of this rank, D head width; s is S / tp under sequence parallel. Where ranks have traded
tokens for heads, S is the whole sequence, and G, Q and N are fewer.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.model.forward_pass import ForwardPass
from shardwright.model.rotary import split_and_rotate
from shardwright.parallel.context import gathered_attention, ring_attention, trade_for_heads, trade_for_tokens
from shardwright.parallel.parameter import sharded
from shardwright.parallel.recipe import Recipe
from shardwright.parallel.tensor import ColumnLinear, Cut, RowLinear
from shardwright.spec.model import ModelSpec
from shardwright.spec.parameters import residual_std


class Attention(nn.Module):
    """Query, key and value are one matrix of full shape [kv_heads, Q + 2, D, H].

    Each group along its first dim holds the queries that share a key/value head, then that key and that value. So a
    range of the first dim is all that a tp rank needs.

    The operators are called one by one, for a block may compute some of them twice: `project`, `attend`, `leave`.
    """

    def __init__(self, spec: ModelSpec, cut: Cut) -> None:
        super().__init__()
        self.head_dim = spec.head_size
        self.queries_per_group = spec.heads // spec.num_kv_heads
        self.is_rotary = spec.positions == "rotary"
        self.trades_heads = cut.trades_heads
        self.across_ranks = gathered_attention if cut.cp_method == "all-gather" else ring_attention
        groups = (spec.num_kv_heads, self.queries_per_group + 2, self.head_dim)
        self.qkv = ColumnLinear(spec.hidden, groups, 0, cut, spec.init_std)
        self.qkv_bias = sharded(groups, 0, cut.tp, "zeros") if spec.bias else None
        self.out = RowLinear(
            spec.heads * self.head_dim, spec.hidden, spec.bias, cut,
            residual_std(spec.init_std, spec.layers),
        )  # fmt: skip

    def project(self, x_sBH: Tensor, run: ForwardPass, recipe: Recipe | None = None) -> Tensor:
        """[s, B, H] to queries, keys and values, [S, B, G x (Q + 2) x D]."""
        return self.qkv(x_sBH, run.tp, recipe)

    def attend(self, qkv: Tensor, run: ForwardPass) -> Tensor:
        """[S, B, G x (Q + 2) x D] to [S, B, N x D]: biases, rotary positions and softmax(QK^T / sqrt(D)) V."""
        S, B, _ = qkv.shape
        qkv_SBGRD = qkv.view(S, B, -1, self.queries_per_group + 2, self.head_dim)
        if self.qkv_bias is not None:
            qkv_SBGRD = qkv_SBGRD + self._bias(self.qkv_bias)
        if self.trades_heads:
            qkv_SBGRD = trade_for_heads(qkv_SBGRD, run.cp)
        if run.angles is not None:
            q_SBGQD, k_SBG1D, v_SBG1D = split_and_rotate(qkv_SBGRD, *run.angles)
        else:
            q_SBGQD, k_SBG1D, v_SBG1D = qkv_SBGRD.split((qkv_SBGRD.shape[3] - 2, 1, 1), dim=3)
        q_SBND = q_SBGQD.reshape(qkv_SBGRD.shape[0], B, -1, self.head_dim)
        out_SBND = self._attend(q_SBND, k_SBG1D.squeeze(3), v_SBG1D.squeeze(3), run)
        out_SBE = out_SBND.reshape(qkv_SBGRD.shape[0], B, -1)
        return trade_for_tokens(out_SBE, run.cp) if self.trades_heads else out_SBE

    def _attend(self, q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, run: ForwardPass) -> Tensor:
        cp = run.cp.alone("cp") if self.trades_heads else run.cp
        if cp.size > 1 or run.documents is not None:
            return self.across_ranks(q_SBND, k_SBGD, v_SBGD, cp, run.documents)
        q_BNSD, k_BGSD, v_BGSD = (x.permute(1, 2, 0, 3) for x in (q_SBND, k_SBGD, v_SBGD))
        out_BNSD = functional.scaled_dot_product_attention(
            q_BNSD, k_BGSD, v_BGSD, is_causal=True, enable_gqa=q_SBND.shape[2] > k_SBGD.shape[2]
        )
        return out_BNSD.permute(2, 0, 1, 3)

    def leave(self, attended_SBH: Tensor, run: ForwardPass, recipe: Recipe | None = None) -> Tensor:
        """[S, B, N x D] to [s, B, H]."""
        return self.out(attended_SBH, run.tp, recipe)

    def _bias(self, bias_GRD: Tensor) -> Tensor:
        if self.is_rotary:
            return bias_GRD
        # Without rotary a key bias adds the same number to all scores of a query, which softmax cancels. Its gradient
        # is zero; left to autograd it would be rounding noise, and Adam makes steps of that.
        q_bias, k_bias, v_bias = bias_GRD.split((self.queries_per_group, 1, 1), dim=1)
        return torch.cat((q_bias, k_bias.detach(), v_bias), dim=1)
