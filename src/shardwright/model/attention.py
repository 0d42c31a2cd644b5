"""Causal self-attention with grouped queries. Vaswani et al. 2017; Ainslie et al. 2023 (arXiv 2305.13245).

Heads are split over tp: each rank attends with its own heads, and the output projection sums over the ranks.

The tensors that its backward keeps are listed in memory/attention_activations.py; their sizes are in
memory/kept_tensors.py (InnerAttention) and layers/layer_tensors.py (AttentionTensors).

Shape suffixes: S sequence, B batch, H hidden, G key/value heads of this rank, Q query heads of a key/value head,
N = G x Q query heads of this rank, D head width; s is S / tp under sequence parallel.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from shardwright.config.model import ModelSpec
from shardwright.config.model_shape import shape_of
from shardwright.model.attention_core import dot_product_attention
from shardwright.model.forward_pass import ForwardPass
from shardwright.model.head_norms import AllHeadsNorm, norm_all_heads, plain_norm
from shardwright.model.norm import Norm
from shardwright.model.position_tables import PositionTables
from shardwright.model.rotary import rotate, split_and_rotate
from shardwright.parallel.context.attention_rule import AttentionRule, Sinks
from shardwright.parallel.context.ring_attention import trade_for_heads, trade_for_tokens
from shardwright.parallel.tensor.linear import ColumnLinear, LayerSharding, RowLinear
from shardwright.parallel.tensor.low_rank import adapter_of
from shardwright.parallel.tensor.parameter import sharded
from shardwright.parallel.tensor.product_input import ProductInput
from shardwright.sharding.score_blocks import KeyReach
from shardwright.sharding.stage_parameters import residual_std


class Attention(nn.Module):
    """Query, key and value are one matrix of full shape [kv_heads, Q + 2, D, H].

    Each group along its first dim holds the queries that share a key/value head, then that key and that value. A tp
    rank therefore holds a range of the first dim.

    The operators are called one by one, since a block may recompute some of them: `project`, `attend`, and `out`, [S,
    B, N x D] to [s, B, H].
    """

    def __init__(self, spec: ModelSpec, sharding: LayerSharding, number: int = 0) -> None:
        """`number` is the number of the block, from 0."""
        super().__init__()
        self.head_dim, self.epsilon, self.clip = spec.head_size, spec.norm_epsilon, spec.clip_qkv
        self.queries_per_group = spec.heads // spec.num_kv_heads
        self.is_turned, self.is_windowed = spec.is_turned(number), spec.is_windowed(number)
        self.grows = spec.grows(number)
        reach = KeyReach(spec.window.size, spec.window.chunked) if self.is_windowed else KeyReach()
        self.rule = AttentionRule(spec.softmax_scale, reach=reach, softcap=spec.attention_softcap)
        self.sharding, self.norms_turned = sharding, spec.qk_norm == "l2" and self.is_turned
        groups = (spec.num_kv_heads, self.queries_per_group + 2, self.head_dim)
        self.qkv = ColumnLinear(spec.hidden, groups, 0, sharding, std=spec.init_std)
        self.qkv_bias = sharded(groups, 0, sharding.tp, "zeros") if spec.has_attention_bias or spec.qkv_bias else None
        self.sinks = sharded((*groups[:1], self.queries_per_group), 0, sharding.tp, "zeros") if spec.sinks else None
        qkv_matrix, out_matrix = shape_of(spec).attention_matrices
        self.qkv.adapter = adapter_of(spec.adapter, qkv_matrix, sharding)
        std = residual_std(spec.init_std, spec.layers)
        # The backward of attention keeps its result, which is the input of this product.
        inner, has_bias = spec.heads * self.head_dim, spec.has_attention_bias
        self.out = RowLinear(inner, spec.hidden, has_bias, sharding, std=std, owns_input=False)
        self.out.adapter = adapter_of(spec.adapter, out_matrix, sharding)
        # A bias that is the same for the keys of all positions adds the same number to all scores of a query. Softmax
        # cancels it, if only the product with the query comes between: so it is for the elements that rotary positions
        # do not turn, in the bias of the key's norm, or without such a norm in the bias of the product.
        cancels = not (spec.attention_softcap or spec.sinks)
        num_learning = (spec.rotary_width if self.is_turned else 0) if cancels else self.head_dim
        is_last = spec.qk_norm == "none" or (spec.qk_norm == "l2" and not self.is_turned)
        self.num_key_biases = num_learning if is_last and not spec.clip_qkv else self.head_dim
        self.q_norm: Norm | AllHeadsNorm | None = None
        self.k_norm: Norm | AllHeadsNorm | None = None
        self.turns_first = spec.qk_norm != "head" and self.is_turned
        if spec.norms_heads:
            # Each rank normalises its own heads, and so sees only their part of the weight's gradient.
            num_learning = 0 if self.turns_first and cancels else num_learning
            self.q_norm = Norm(spec, sharding, self.head_dim, sharding.tp)
            self.k_norm = Norm(spec, sharding, self.head_dim, sharding.tp, learning_biases=num_learning)
        elif spec.qk_norm == "full":
            self.q_norm = AllHeadsNorm(spec, self.queries_per_group, sharding)
            self.k_norm = AllHeadsNorm(spec, 1, sharding)

    def project(self, x_sBH: ProductInput) -> Tensor:
        """[s, B, H] to queries, keys and values, [S, B, G x (Q + 2) x D]."""
        return self.qkv(x_sBH)

    def attend(self, qkv: Tensor, run: ForwardPass) -> Tensor:
        """[S, B, G x (Q + 2) x D] to [S, B, N x D]: biases, norms, rotary positions and softmax(QK^T x scale) V."""
        s, B, _ = qkv.shape
        qkv_SBGRD = qkv.view(s, B, -1, self.queries_per_group + 2, self.head_dim)
        if self.qkv_bias is not None:
            qkv_SBGRD = qkv_SBGRD + self._bias(self.qkv_bias)
        if isinstance(self.q_norm, AllHeadsNorm) and isinstance(self.k_norm, AllHeadsNorm):
            qkv_SBGRD = norm_all_heads(qkv_SBGRD, self.q_norm, self.k_norm, self.epsilon, self.sharding.tp)
        if self.clip:
            qkv_SBGRD = qkv_SBGRD.clamp(-self.clip, self.clip)
        if self.sharding.trades_heads:
            qkv_SBGRD = trade_for_heads(qkv_SBGRD, self.sharding.cp)
        q_SBGQD, k_SBGD, v_SBGD = self._split(qkv_SBGRD, run.tables)
        S = qkv_SBGRD.shape[0]
        q_SBND, k_SBGD, v_SBGD = q_SBGQD.reshape(S, B, -1, self.head_dim), k_SBGD.squeeze(3), v_SBGD.squeeze(3)
        rule = self._rule_of_heads(q_SBND.shape[2], run.tables)
        out_SBND = dot_product_attention(q_SBND, k_SBGD, v_SBGD, rule, sharding=self.sharding, run=run)
        out_SBE = out_SBND.reshape(S, B, -1)
        return trade_for_tokens(out_SBE, self.sharding.cp) if self.sharding.trades_heads else out_SBE

    def _split(self, qkv_SBGRD: Tensor, tables: PositionTables) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [S, B, G, Q, D], keys and values [S, B, G, 1, D], with the layer's norms and rotary positions."""
        angles = tables.angles(self.is_windowed) if self.is_turned else None
        if angles is not None and self.turns_first:
            q_SBGQD, k_SBGD, v_SBGD = split_and_rotate(qkv_SBGRD, *angles)
        else:
            q_SBGQD, k_SBGD, v_SBGD = qkv_SBGRD.split((qkv_SBGRD.shape[3] - 2, 1, 1), dim=3)
        if isinstance(self.q_norm, Norm) and isinstance(self.k_norm, Norm):
            q_SBGQD, k_SBGD = self.q_norm(q_SBGQD), self.k_norm(k_SBGD)
        elif self.norms_turned:
            q_SBGQD, k_SBGD = plain_norm(q_SBGQD, self.epsilon), plain_norm(k_SBGD, self.epsilon)
        if angles is not None and not self.turns_first:
            q_SBGQD, k_SBGD = rotate(q_SBGQD, *angles), rotate(k_SBGD, *angles)
        if self.grows and tables.temperatures is not None:
            q_SBGQD = (q_SBGQD * tables.temperatures).to(q_SBGQD.dtype)
        return q_SBGQD, k_SBGD, v_SBGD

    def _rule_of_heads(self, num_heads: int, tables: PositionTables) -> AttentionRule:
        """The rule with the ALiBi slopes and sinks of the heads that this rank attends with: its heads of tp, or the
        part of them for which tokens were traded."""
        first = num_heads * self.sharding.cp.index if self.sharding.trades_heads else 0
        rule = self.rule
        if tables.slopes_N is not None:
            first_of_tp = len(tables.slopes_N) // self.sharding.tp.size * self.sharding.tp.index
            rule = replace(rule, slopes_N=tables.slopes_N[first_of_tp + first : first_of_tp + first + num_heads])
        if self.sinks is not None:
            rule = replace(rule, sinks=Sinks(self.sinks, slice(first, first + num_heads)))
        return rule

    def _bias(self, bias_GRD: Tensor) -> Tensor:
        """The bias of qkv, in which only the first `num_key_biases` elements of keys have a gradient."""
        if self.num_key_biases == self.head_dim:
            return bias_GRD
        # If softmax cancels a key bias, its gradient is zero. Autograd would give rounding noise, and Adam turns noise
        # into steps.
        q_bias, k_bias, v_bias = bias_GRD.split((self.queries_per_group, 1, 1), dim=1)
        detached = k_bias.detach()
        if self.num_key_biases:
            detached = torch.cat((k_bias[..., : self.num_key_biases], detached[..., self.num_key_biases :]), dim=2)
        return torch.cat((q_bias, detached, v_bias), dim=1)
