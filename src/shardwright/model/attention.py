"""Causal self-attention with grouped queries. Vaswani et al. 2017; Ainslie et al. 2023 (arXiv 2305.13245).

Heads are split over tp: each rank attends with its own, and the output projection sums over all.

Shape suffixes: S sequence, B batch, H hidden, G key/value heads of this rank, Q query heads of a key/value head,
N = G x Q query heads of this rank, D head width; s is S / tp under sequence parallel.
"""

import torch
from torch import Tensor, nn

from shardwright.config.model import ModelSpec
from shardwright.model.attention_core import dot_product_attention
from shardwright.model.forward_pass import ForwardPass
from shardwright.model.norm import Norm
from shardwright.model.rotary import rotate, split_and_rotate
from shardwright.parallel.context.ring_attention import trade_for_heads, trade_for_tokens
from shardwright.parallel.tensor.linear import ColumnLinear, LayerSharding, RowLinear
from shardwright.parallel.tensor.parameter import sharded
from shardwright.parallel.tensor.recomputed_input import ProductInput
from shardwright.sharding.stage_parameters import residual_std


class Attention(nn.Module):
    """Query, key and value are one matrix of full shape [kv_heads, Q + 2, D, H].

    Each group along its first dim holds the queries that share a key/value head, then that key and that value. So a
    range of the first dim is all that a tp rank needs.

    The operators are called one by one, for a block may compute some of them twice: `project`, `attend`, and
    `out`, [S, B, N x D] to [s, B, H].
    """

    def __init__(self, spec: ModelSpec, cut: LayerSharding) -> None:
        super().__init__()
        self.head_dim = spec.head_size
        self.queries_per_group = spec.heads // spec.num_kv_heads
        self.scale, self.cut = spec.softmax_scale, cut
        groups = (spec.num_kv_heads, self.queries_per_group + 2, self.head_dim)
        self.qkv = ColumnLinear(spec.hidden, groups, 0, cut, std=spec.init_std)
        self.qkv_bias = sharded(groups, 0, cut.tp, "zeros") if spec.bias else None
        std = residual_std(spec.init_std, spec.layers)
        # Attention's backward keeps what it gave.
        self.out = RowLinear(spec.heads * self.head_dim, spec.hidden, spec.bias, cut, std=std, owns_input=False)
        # What is added to the keys of all positions alike adds the same number to all scores of a query, and softmax
        # cancels it: a bias that no rotary follows, of the product if no norm follows either, or of the norm.
        is_turned = spec.positions == "rotary"
        self.has_key_bias = is_turned or spec.qk_norm
        # Each rank norms its own heads, and so sees only their part of the gradient.
        self.q_norm = Norm(spec, cut, self.head_dim, cut.tp) if spec.qk_norm else None
        self.k_norm = Norm(spec, cut, self.head_dim, cut.tp, bias_learns=is_turned) if spec.qk_norm else None

    def project(self, x_sBH: ProductInput) -> Tensor:
        """[s, B, H] to queries, keys and values, [S, B, G x (Q + 2) x D]."""
        return self.qkv(x_sBH)

    def attend(self, qkv: Tensor, run: ForwardPass) -> Tensor:
        """[S, B, G x (Q + 2) x D] to [S, B, N x D]: biases, norms, rotary positions and softmax(QK^T x scale) V."""
        s, B, _ = qkv.shape
        qkv_SBGRD = qkv.view(s, B, -1, self.queries_per_group + 2, self.head_dim)
        if self.qkv_bias is not None:
            qkv_SBGRD = qkv_SBGRD + self._bias(self.qkv_bias)
        if self.cut.trades_heads:
            qkv_SBGRD = trade_for_heads(qkv_SBGRD, self.cut.cp)
        if run.angles is not None and self.q_norm is None:
            q_SBGQD, k_SBGD, v_SBGD = split_and_rotate(qkv_SBGRD, *run.angles)
        else:
            q_SBGQD, k_SBGD, v_SBGD = qkv_SBGRD.split((qkv_SBGRD.shape[3] - 2, 1, 1), dim=3)
            if self.q_norm is not None and self.k_norm is not None:
                q_SBGQD, k_SBGD = self.q_norm(q_SBGQD), self.k_norm(k_SBGD)
                if run.angles is not None:
                    q_SBGQD, k_SBGD = rotate(q_SBGQD, *run.angles), rotate(k_SBGD, *run.angles)
        S = qkv_SBGRD.shape[0]
        q_SBND, k_SBGD, v_SBGD = q_SBGQD.reshape(S, B, -1, self.head_dim), k_SBGD.squeeze(3), v_SBGD.squeeze(3)
        out_SBND = dot_product_attention(q_SBND, k_SBGD, v_SBGD, self.scale, cut=self.cut, run=run)
        out_SBE = out_SBND.reshape(S, B, -1)
        return trade_for_tokens(out_SBE, self.cut.cp) if self.cut.trades_heads else out_SBE

    def _bias(self, bias_GRD: Tensor) -> Tensor:
        if self.has_key_bias:
            return bias_GRD
        # The gradient of a key bias is zero then; left to autograd it would be rounding noise, and Adam makes steps of
        # that.
        q_bias, k_bias, v_bias = bias_GRD.split((self.queries_per_group, 1, 1), dim=1)
        return torch.cat((q_bias, k_bias.detach(), v_bias), dim=1)
