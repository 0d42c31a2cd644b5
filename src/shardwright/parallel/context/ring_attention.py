"""Context parallel: attention over a sequence that is sharded over the cp axis, with three ways to bring keys to
queries.

Ring (Liu et al. 2023, arXiv 2310.01889): keys and values are sent around the ranks, and each rank computes attention to
the ones it has while the next ones arrive. All-gather (Dubey et al. 2024, arXiv 2407.21783, section 3.3.2): every rank
gathers all keys and values at once; this is simpler, but exposes the exchange. In both a rank holds its tokens in
zig-zag order (sharding/sequence.py), and computes the same blocks in the same order, so that both give the same bits.
Ulysses (Jacobs et al. 2023, arXiv 2309.14509): ranks trade tokens for heads, compute attention over the whole sequence
for their heads, as one rank would, and trade back.

Shape suffixes: s tokens of this rank, S = cp x s of all, B batch, N query heads, G key/value heads, D head width; P
ranks of cp; K the two of key and value. Blocks are computed as views [B, N, s, D] of [s, B, N, D].
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwright.parallel.comm.collectives import Axis, Pending, all_gather, all_to_all, reduce_scatter, start_exchange
from shardwright.parallel.comm.regions import conjugate
from shardwright.parallel.context.attention_rule import PLAIN, AttentionRule
from shardwright.parallel.context.block_attention import Merged, attend_block, block_gradients
from shardwright.parallel.context.sight import AttentionBlock, Sight
from shardwright.sharding.score_blocks import blocks_in_reach
from shardwright.sharding.sequence import ScoreBlock, block_of, held_ranges, ring_source


def ring_attention(
    q_sBND: Tensor,
    k_sBGD: Tensor,
    v_sBGD: Tensor,
    cp: Axis,
    documents_PBs: Tensor | None = None,
    rule: AttentionRule = PLAIN,
) -> Tensor:
    """Attention by a rule of this rank's queries to the keys of all ranks, in a ring, [s, B, N, D].

    `documents_PBs` are the document numbers of the tokens of each rank; attention stays within a document.
    """
    return _Attention.apply(q_sBND, k_sBGD, v_sBGD, documents_PBs, _Way(cp, rule, _Ring))


def gathered_attention(
    q_sBND: Tensor,
    k_sBGD: Tensor,
    v_sBGD: Tensor,
    cp: Axis,
    documents_PBs: Tensor | None = None,
    rule: AttentionRule = PLAIN,
) -> Tensor:
    """Attention as `ring_attention` computes it, with all keys and values gathered at once."""
    return _Attention.apply(q_sBND, k_sBGD, v_sBGD, documents_PBs, _Way(cp, rule, _Gathered))


class _KeyValueExchange(Protocol):
    """Brings keys and values to this rank, and their gradients back to their ranks. One object for each forward and
    each backward."""

    def __init__(self, kv_KsBGD: Tensor, cp: Axis) -> None: ...

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yields the index of a rank and its keys and values, [2, s, B, G, D]: first this rank's own, then those of the
        ranks before it."""

    def add_gradients(self, source: int, keys: slice, dk_sBGD: Tensor, dv_sBGD: Tensor) -> None:
        """Add to the gradients of some keys and values of `source`, while its block is being computed."""

    def own_gradients(self) -> Tensor:
        """The gradients of this rank's own keys and values, [2, s, B, G, D], float32, with the parts of all ranks."""


class _Ring:
    """The ring: keys and values are sent from rank to rank, size - 1 times; their gradients follow one step later.

    A rank keeps its part of the gradients of its own keys: the sum that is sent around begins at the next rank.
    """

    def __init__(self, kv_KsBGD: Tensor, cp: Axis) -> None:
        self._kv, self._cp = kv_KsBGD, cp
        self._own_part: Tensor | None = None
        self._incoming_sum: tuple[Tensor, Tensor, Pending] | None = None

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        kv, cp = self._kv, self._cp
        for step in range(cp.size):
            pending: Pending | None = None
            if step + 1 < cp.size:
                arriving = torch.empty_like(kv)
                pending = start_exchange(arriving, kv, cp)
            yield ring_source(cp.index, step, cp.size), kv
            if pending is not None:
                pending.wait()
                kv = arriving

    def add_gradients(self, source: int, keys: slice, dk_sBGD: Tensor, dv_sBGD: Tensor) -> None:
        cp = self._cp
        if source == cp.index:
            self._own_part = torch.stack((dk_sBGD, dv_sBGD)).float()
            return
        # The rank before began the arriving sum one step ago, for the same keys, which it has sent to this rank.
        sum_KsBGD = self._arrived() if self._incoming_sum is not None else self._kv.new_zeros(self._kv.shape).float()
        sum_KsBGD[0, keys] += dk_sBGD
        sum_KsBGD[1, keys] += dv_sBGD
        arriving = torch.empty_like(sum_KsBGD)
        self._incoming_sum = arriving, sum_KsBGD, start_exchange(arriving, sum_KsBGD, cp)

    def _arrived(self) -> Tensor:
        assert self._incoming_sum is not None
        arriving, _, pending = self._incoming_sum
        pending.wait()
        return arriving

    def own_gradients(self) -> Tensor:
        assert self._own_part is not None, "a rank visits itself"
        return self._own_part if self._incoming_sum is None else self._own_part.add_(self._arrived())


class _Gathered:
    """Keys and values are all-gathered before the first block; their gradients are reduce-scattered in the end."""

    def __init__(self, kv_KsBGD: Tensor, cp: Axis) -> None:
        self._kv, self._cp = kv_KsBGD, cp
        self._sums: Tensor | None = None

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        all_PKsBGD = all_gather(self._kv, self._cp).unflatten(0, (self._cp.size, 2))
        for step in range(self._cp.size):
            source = ring_source(self._cp.index, step, self._cp.size)
            yield source, all_PKsBGD[source]

    def add_gradients(self, source: int, keys: slice, dk_sBGD: Tensor, dv_sBGD: Tensor) -> None:
        if self._sums is None:
            shape = (self._cp.size, *self._kv.shape)
            self._sums = torch.zeros(shape, dtype=torch.float32, device=self._kv.device)
        self._sums[source, 0, keys] += dk_sBGD
        self._sums[source, 1, keys] += dv_sBGD

    def own_gradients(self) -> Tensor:
        assert self._sums is not None, "a rank visits itself"
        return reduce_scatter(self._sums.flatten(0, 1), self._cp)


@dataclass(frozen=True)
class _Way:
    """The way in which keys come to queries, and the rule by which their blocks are computed."""

    cp: Axis
    rule: AttentionRule
    exchange_type: type[_KeyValueExchange]

    def blocks(
        self, source: int, q_sBND: Tensor, kv_KsBGD: Tensor, documents_PBs: Tensor | None
    ) -> Iterator[tuple[ScoreBlock, AttentionBlock]]:
        """The blocks of this rank's queries with the keys and values of `source`, as positions and as tensors."""
        q_BNsD = _heads_first(q_sBND)
        for block in self._score_blocks(source, q_sBND):
            k_BGsD, v_BGsD = (_heads_first(x[block.keys]) for x in kv_KsBGD)
            sight = self._sight(block, source, documents_PBs)
            yield block, AttentionBlock(q_BNsD[:, :, block.queries], k_BGsD, v_BGsD, sight, self.rule, self.cp.kind)

    def _score_blocks(self, source: int, q_sBND: Tensor) -> list[ScoreBlock]:
        num_held, index = len(q_sBND), self.cp.index
        sequence = num_held * self.cp.size
        if not self.rule.goes_by_position(sequence):
            return [block_of(index, source, num_held, self.rule.is_causal)]
        queries, keys = (held_ranges(sequence, self.cp.size, holder, "ring") for holder in (index, source))
        return blocks_in_reach(queries, keys, self.rule.reach, self.rule.most_queries(q_sBND))

    def _sight(self, block: ScoreBlock, source: int, documents_PBs: Tensor | None) -> Sight:
        query_documents = key_documents = None
        if documents_PBs is not None:
            query_documents = documents_PBs[self.cp.index][:, block.queries]
            key_documents = documents_PBs[source][:, block.keys]
        # If scores are made, the mask follows from positions instead of `is_causal`.
        is_causal = block.is_causal and not self.rule.makes_scores
        reach = self.rule.reach if block.has_edge and not is_causal else None
        return Sight(
            is_causal, query_documents, key_documents, reach, block.first_query, block.first_key, self.rule.slopes_N
        )


class _Attention(torch.autograd.Function):
    """Attention over all ranks' tokens, block by block. Keeps only this rank's q, k, v and output.

    Ring. Forward: size - 1 exchanges of keys and values, each hidden behind the blocks of the present keys. Backward:
    the same exchanges again, and as many exchanges of their gradients in float32, each but the last hidden behind the
    next keys' blocks. All-gather. Forward: an all-gather of keys and values. Backward: the same all-gather again, since
    they were not kept, and a reduce-scatter of their gradients in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, q_sBND: Tensor, k_sBGD: Tensor, v_sBGD: Tensor, documents_PBs: Tensor | None, way: _Way
    ) -> Tensor:
        ctx.way = way
        merged: Merged | None = None
        exchange = way.exchange_type(torch.stack((k_sBGD, v_sBGD)), way.cp)
        for source, kv_KsBGD in exchange.blocks():  # the keys and values of each rank
            for places, block in way.blocks(source, q_sBND, kv_KsBGD, documents_PBs):
                out_BNsD, lse_BNs = attend_block(block)
                if merged is None and out_BNsD.shape[2] == len(q_sBND) and not way.rule.makes_scores:
                    merged = Merged(out_BNsD, lse_BNs)
                    continue
                merged = merged or Merged.nothing(_heads_first(q_sBND))
                merged.add(places.queries, out_BNsD, lse_BNs)
        assert merged is not None, "a rank visits itself"
        if way.rule.sinks is not None:
            merged.add_score(way.rule.sinks.scores())
        out_sBND = merged.out_BNSD.to(q_sBND.dtype).permute(2, 0, 1, 3)
        ctx.save_for_backward(q_sBND, k_sBGD, v_sBGD, out_sBND, merged.lse_BNS, documents_PBs)
        return out_sBND

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_sBND, k_sBGD, v_sBGD, out_sBND, lse_BNs, documents_PBs = ctx.saved_tensors
        way: _Way = ctx.way
        out_BNsD, dout_BNsD = _heads_first(out_sBND), _heads_first(grads[0].contiguous())
        dq_sBND = torch.zeros(q_sBND.shape, dtype=torch.float32, device=q_sBND.device)
        exchange = way.exchange_type(torch.stack((k_sBGD, v_sBGD)), way.cp)
        for source, kv_KsBGD in exchange.blocks():
            sums = _KeyGradients(kv_KsBGD)
            for places, block in way.blocks(source, q_sBND, kv_KsBGD, documents_PBs):
                queries = (slice(None), slice(None), places.queries)
                dq_BNsD, dk_BGsD, dv_BGsD = block_gradients(
                    block, dout_BNsD[queries], out_BNsD[queries], lse_BNs[queries]
                )
                dq_sBND[places.queries] += dq_BNsD.permute(2, 0, 1, 3)
                sums.add(places.keys, dk_BGsD.permute(2, 0, 1, 3), dv_BGsD.permute(2, 0, 1, 3))
            exchange.add_gradients(source, *sums.all_of())
        if way.rule.sinks is not None:
            way.rule.sinks.add_gradient(dout_BNsD, out_BNsD, lse_BNs)
        dk_sBGD, dv_sBGD = exchange.own_gradients().to(k_sBGD.dtype)
        return dq_sBND.to(q_sBND.dtype), dk_sBGD, dv_sBGD, None, None


class _KeyGradients:
    """The gradients of the keys and values of one rank, summed over its blocks. The gradients of a single block are
    kept as they are; those of several are summed in float32."""

    def __init__(self, kv_KsBGD: Tensor) -> None:
        self._kv_KsBGD = kv_KsBGD
        self._only_block: tuple[slice, Tensor, Tensor] | None = None
        self._sums_KsBGD: Tensor | None = None

    def add(self, keys: slice, dk_sBGD: Tensor, dv_sBGD: Tensor) -> None:
        """Add the gradients of a block."""
        if self._only_block is None and self._sums_KsBGD is None:
            self._only_block = keys, dk_sBGD, dv_sBGD
            return
        sums_KsBGD = self._sums()
        sums_KsBGD[0, keys] += dk_sBGD
        sums_KsBGD[1, keys] += dv_sBGD

    def all_of(self) -> tuple[slice, Tensor, Tensor]:
        """A range of keys and its gradients; an empty range if no block was in reach."""
        if self._only_block is not None:
            return self._only_block
        if self._sums_KsBGD is None:
            return slice(0, 0), self._kv_KsBGD[0, :0], self._kv_KsBGD[1, :0]
        return slice(0, self._kv_KsBGD.shape[1]), self._sums_KsBGD[0], self._sums_KsBGD[1]

    def _sums(self) -> Tensor:
        """The sum in float32, which includes the first block."""
        if self._sums_KsBGD is None:
            self._sums_KsBGD = torch.zeros(self._kv_KsBGD.shape, dtype=torch.float32, device=self._kv_KsBGD.device)
        if self._only_block is not None:
            (keys, dk_sBGD, dv_sBGD), self._only_block = self._only_block, None
            self._sums_KsBGD[0, keys] += dk_sBGD
            self._sums_KsBGD[1, keys] += dv_sBGD
        return self._sums_KsBGD


def _heads_first(x_sBND: Tensor) -> Tensor:
    return x_sBND.permute(1, 2, 0, 3)


# Ulysses.


def trade_for_heads(qkv_sBGRD: Tensor, cp: Axis) -> Tensor:
    """Trade tokens for heads: [s, B, G, Q + 2, D] of this rank's tokens to [S, B, G', Q' + 2, D] of all tokens.

    A group along G is Q query heads, their key and their value. If G = cp x G', each rank gets G' groups. If there are
    fewer groups than ranks, cp = m x G, each group is sent to m ranks: an m-th of its queries to each, the key and the
    value to all of them. Forward: an all-to-all. Backward: an all-to-all of the gradient in the other direction.
    """
    s, B, G, R, D = qkv_sBGRD.shape
    if cp.size > G:
        ranks_of_group = cp.size // G
        q, kv = qkv_sBGRD.split((R - 2, 2), dim=3)
        q = q.reshape(s, B, cp.size, (R - 2) // ranks_of_group, D)
        qkv_sBGRD = torch.cat((q, kv.repeat_interleave(ranks_of_group, dim=2)), dim=3)
    groups, R = qkv_sBGRD.shape[2] // cp.size, qkv_sBGRD.shape[3]
    return conjugate(qkv_sBGRD.reshape(s, B, -1), cp, _shard_last_dim, _shard_first_dim).unflatten(2, (groups, R, D))


def trade_for_tokens(out_SBE: Tensor, cp: Axis) -> Tensor:
    """Trade heads for tokens: [S, B, N' x D] of all tokens to [s, B, N x D] of this rank's tokens, N = cp x N'.
    Forward: an all-to-all. Backward: an all-to-all of the gradient in the other direction."""
    return conjugate(out_SBE, cp, _shard_first_dim, _shard_last_dim)


def _shard_last_dim(x_sBE: Tensor, cp: Axis) -> Tensor:
    """Shard the last dim instead of the first: [s, B, cp x E] to [cp x s, B, E]."""
    parts_PsBE = x_sBE.unflatten(2, (cp.size, -1)).permute(2, 0, 1, 3).contiguous()
    return all_to_all(parts_PsBE, cp).flatten(0, 1)


def _shard_first_dim(x_SBE: Tensor, cp: Axis) -> Tensor:
    """Shard the first dim instead of the last: [cp x s, B, E] to [s, B, cp x E]."""
    parts_PsBE = all_to_all(x_SBE.contiguous().unflatten(0, (cp.size, -1)), cp)
    return parts_PsBE.permute(1, 2, 0, 3).flatten(2)
