"""Context parallel: attention over a sequence that is cut over the cp axis. Three ways to bring keys to queries.

Ring (Liu et al. 2023, arXiv 2310.01889): keys and values travel around the ranks, and each rank attends to those that
are with it while the next are on their way. All-gather (Dubey et al. 2024, arXiv 2407.21783, section 3.3.2): every rank
gets all keys and values at once; simpler, with nothing to hide the exchange behind. In both a rank holds its tokens in
zig-zag (sharding/sequence.py), and computes the same blocks in the same order, so that both give the same bits. Ulysses
(Jacobs et al. 2023, arXiv 2309.14509): ranks trade tokens for heads, attend to the whole sequence of their heads as one
rank would, and trade back.

Shape suffixes: s tokens of this rank, S = cp x s of all, B batch, N query heads, G key/value heads, D head width; P
ranks of cp; K the two of key and value. Blocks are computed as views [B, N, s, D] of [s, B, N, D].
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwright.parallel.comm.collectives import Axis, Pending, all_gather, all_to_all, reduce_scatter, start_exchange
from shardwright.parallel.comm.regions import conjugate
from shardwright.parallel.context.attention_rule import AttentionRule
from shardwright.parallel.context.block_attention import Merged, attend_block, block_gradients
from shardwright.parallel.context.sight import Sight
from shardwright.sharding.score_blocks import blocks_in_reach
from shardwright.sharding.sequence import ScoreBlock, block_of, held_ranges

PLAIN = AttentionRule()


def ring_attention(
    q_sBND: Tensor, k_sBGD: Tensor, v_sBGD: Tensor, cp: Axis, documents_PBs: Tensor | None = None,
    rule: AttentionRule = PLAIN,
) -> Tensor:  # fmt: skip
    """Attention by a rule over the tokens of all ranks, [s, B, N, D], for those of this one.

    `documents_PBs`: numbers of the documents that the tokens of each rank are in; attention stays within one.
    """
    return _Attention.apply(q_sBND, k_sBGD, v_sBGD, documents_PBs, cp, rule, _Ring)


def gathered_attention(
    q_sBND: Tensor, k_sBGD: Tensor, v_sBGD: Tensor, cp: Axis, documents_PBs: Tensor | None = None,
    rule: AttentionRule = PLAIN,
) -> Tensor:  # fmt: skip
    """Attention of this rank's queries to all keys and values, which are gathered at once."""
    return _Attention.apply(q_sBND, k_sBGD, v_sBGD, documents_PBs, cp, rule, _Gathered)


class _KeyValueExchange(Protocol):
    """How keys and values come to a rank, and their gradients back home. One for a forward, one for a backward."""

    def __init__(self, kv_KsBGD: Tensor, cp: Axis) -> None: ...

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Whose keys and values are here now, and they, [2, s, B, G, D]: this rank's own, then the ranks before."""

    def add_gradients(self, source: int, keys: slice, dk_sBGD: Tensor, dv_sBGD: Tensor) -> None:
        """Add to the gradients of some keys and values of `source`, which is visiting."""

    def own_gradients(self) -> Tensor:
        """The gradients of this rank's own, [2, s, B, G, D], float32, once all ranks have added theirs."""


class _Ring:
    """Keys and values go from rank to rank, size - 1 times; their gradients follow them one step behind.

    What a rank adds to the gradients of its own keys stays there: the travelling sum begins at the next rank.
    """

    def __init__(self, kv_KsBGD: Tensor, cp: Axis) -> None:
        self._kv, self._cp = kv_KsBGD, cp
        self._own: Tensor | None = None
        self._travelling: tuple[Tensor, Tensor, Pending] | None = None

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        kv, cp = self._kv, self._cp
        for step in range(cp.size):
            pending: Pending | None = None
            if step + 1 < cp.size:
                arriving = torch.empty_like(kv)
                pending = start_exchange(arriving, kv, cp)
            yield (cp.index - step) % cp.size, kv
            if pending is not None:
                pending.wait()
                kv = arriving

    def add_gradients(self, source: int, keys: slice, dk_sBGD: Tensor, dv_sBGD: Tensor) -> None:
        cp = self._cp
        if source == cp.index:
            self._own = torch.stack((dk_sBGD, dv_sBGD)).float()
            return
        # The sum that arrives was begun one step ago, by the rank before, for the keys that have come from there.
        sum_KsBGD = self._arrived() if self._travelling is not None else self._kv.new_zeros(self._kv.shape).float()
        sum_KsBGD[0, keys] += dk_sBGD
        sum_KsBGD[1, keys] += dv_sBGD
        arriving = torch.empty_like(sum_KsBGD)
        self._travelling = arriving, sum_KsBGD, start_exchange(arriving, sum_KsBGD, cp)

    def _arrived(self) -> Tensor:
        assert self._travelling is not None
        arriving, _, pending = self._travelling
        pending.wait()
        return arriving

    def own_gradients(self) -> Tensor:
        assert self._own is not None, "a rank visits itself"
        return self._own if self._travelling is None else self._own.add_(self._arrived())


class _Gathered:
    """Keys and values are all-gathered at the first visit; their gradients are reduce-scattered in the end."""

    def __init__(self, kv_KsBGD: Tensor, cp: Axis) -> None:
        self._kv, self._cp = kv_KsBGD, cp
        self._sums: Tensor | None = None

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        all_PKsBGD = all_gather(self._kv, self._cp).unflatten(0, (self._cp.size, 2))
        for step in range(self._cp.size):
            source = (self._cp.index - step) % self._cp.size
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


class _Attention(torch.autograd.Function):
    """Attention over all ranks' tokens, block by block. Keeps this rank's q, k, v and output alone.

    Ring. Forward: size - 1 exchanges of keys and values, each under the blocks of those that are here. Backward: the
    same again, and as many exchanges of their gradients in float32, each but the last under the blocks of the next.
    All-gather. Forward: an all-gather of keys and values. Backward: the same again instead of having kept them, and a
    reduce-scatter of their gradients in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, q_sBND: Tensor, k_sBGD: Tensor, v_sBGD: Tensor, documents_PBs: Tensor | None, cp: Axis,
        rule: AttentionRule, way: type[_KeyValueExchange],
    ) -> Tensor:  # fmt: skip
        ctx.cp, ctx.rule, ctx.way = cp, rule, way
        q_BNsD = _heads_first(q_sBND)
        merged: Merged | None = None
        exchange = way(torch.stack((k_sBGD, v_sBGD)), cp)
        for source, kv_KsBGD in exchange.blocks():  # the keys and values that visit this rank
            for block in _blocks(rule, cp, source, q_sBND):
                k_BGsD, v_BGsD = (_heads_first(x[block.keys]) for x in kv_KsBGD)
                sight = _sight(block, cp.index, source, documents_PBs, rule=rule)
                out_BNsD, lse_BNs = attend_block(
                    q_BNsD[:, :, block.queries], k_BGsD, v_BGsD, sight, rule=rule, kind=cp.kind
                )
                if merged is None and out_BNsD.shape[2] == len(q_sBND) and not rule.makes_scores:
                    merged = Merged(out_BNsD, lse_BNs)
                    continue
                merged = merged or Merged.nothing(q_BNsD)
                merged.add(block.queries, out_BNsD, lse_BNs)
        assert merged is not None, "a rank visits itself"
        if rule.sinks is not None:
            merged.add_score(rule.sinks.scores())
        out_sBND = merged.out_BNSD.to(q_sBND.dtype).permute(2, 0, 1, 3)
        ctx.save_for_backward(q_sBND, k_sBGD, v_sBGD, out_sBND, merged.lse_BNS, documents_PBs)
        return out_sBND

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_sBND, k_sBGD, v_sBGD, out_sBND, lse_BNs, documents_PBs = ctx.saved_tensors
        cp: Axis = ctx.cp
        rule: AttentionRule = ctx.rule
        q_BNsD, out_BNsD, dout_BNsD = (_heads_first(x) for x in (q_sBND, out_sBND, grads[0].contiguous()))
        dq_sBND = torch.zeros(q_sBND.shape, dtype=torch.float32, device=q_sBND.device)
        exchange: _KeyValueExchange = ctx.way(torch.stack((k_sBGD, v_sBGD)), cp)
        for source, kv_KsBGD in exchange.blocks():
            sums = _KeyGradients(kv_KsBGD)
            for block in _blocks(rule, cp, source, q_sBND):
                here = (slice(None), slice(None), block.queries)
                k_BGsD, v_BGsD = (_heads_first(x[block.keys]) for x in kv_KsBGD)
                dq_BNsD, dk_BGsD, dv_BGsD = block_gradients(
                    dout_BNsD[here],
                    q_BNsD[here],
                    k_BGsD,
                    v_BGsD,
                    out_BNSD=out_BNsD[here],
                    lse_BNS=lse_BNs[here],
                    sight=_sight(block, cp.index, source, documents_PBs, rule=rule),
                    rule=rule,
                    kind=cp.kind,
                )
                dq_sBND[block.queries] += dq_BNsD.permute(2, 0, 1, 3)
                sums.add(block.keys, dk_BGsD.permute(2, 0, 1, 3), dv_BGsD.permute(2, 0, 1, 3))
            exchange.add_gradients(source, *sums.all_of())
        if rule.sinks is not None:
            rule.sinks.add_gradient(dout_BNsD, out_BNsD, lse_BNs)
        dk_sBGD, dv_sBGD = exchange.own_gradients().to(k_sBGD.dtype)
        return dq_sBND.to(q_sBND.dtype), dk_sBGD, dv_sBGD, None, None, None, None


class _KeyGradients:
    """Gradients of the keys and values of one rank, of all blocks that they are in: of one as they are, of several as
    a sum in float32."""

    def __init__(self, kv_KsBGD: Tensor) -> None:
        self._like = kv_KsBGD
        self._one: tuple[slice, Tensor, Tensor] | None = None
        self._sums_KsBGD: Tensor | None = None

    def add(self, keys: slice, dk_sBGD: Tensor, dv_sBGD: Tensor) -> None:
        """Add those of a block."""
        if self._one is None and self._sums_KsBGD is None:
            self._one = keys, dk_sBGD, dv_sBGD
            return
        sums_KsBGD = self._sums()
        sums_KsBGD[0, keys] += dk_sBGD
        sums_KsBGD[1, keys] += dv_sBGD

    def all_of(self) -> tuple[slice, Tensor, Tensor]:
        """Some keys and their gradients: none, where no block was in reach."""
        if self._one is not None:
            return self._one
        if self._sums_KsBGD is None:
            return slice(0, 0), self._like[0, :0], self._like[1, :0]
        return slice(0, self._like.shape[1]), self._sums_KsBGD[0], self._sums_KsBGD[1]

    def _sums(self) -> Tensor:
        """The sum, with what has waited to be alone."""
        if self._sums_KsBGD is None:
            self._sums_KsBGD = torch.zeros(self._like.shape, dtype=torch.float32, device=self._like.device)
        if self._one is not None:
            (keys, dk_sBGD, dv_sBGD), self._one = self._one, None
            self._sums_KsBGD[0, keys] += dk_sBGD
            self._sums_KsBGD[1, keys] += dv_sBGD
        return self._sums_KsBGD


def _blocks(rule: AttentionRule, cp: Axis, source: int, q_sBND: Tensor) -> list[ScoreBlock]:
    """The blocks of scores of this rank's queries with the keys of `source`."""
    num_held = len(q_sBND)
    sequence = num_held * cp.size
    if not rule.goes_by_position(sequence):
        return [block_of(cp.index, source, num_held, rule.is_causal)]
    queries, keys = (held_ranges(sequence, cp.size, index, "ring") for index in (cp.index, source))
    return blocks_in_reach(queries, keys, rule.reach, rule.most_queries(q_sBND))


def _heads_first(x_sBND: Tensor) -> Tensor:
    return x_sBND.permute(1, 2, 0, 3)


def _sight(block: ScoreBlock, index: int, source: int, documents_PBs: Tensor | None, rule: AttentionRule) -> Sight:
    of_queries = of_keys = None
    if documents_PBs is not None:
        of_queries, of_keys = documents_PBs[index][:, block.queries], documents_PBs[source][:, block.keys]
    # Where scores are made, positions say what causality would.
    is_causal = block.is_causal and not rule.makes_scores
    reach = rule.reach if block.has_edge and not is_causal else None
    return Sight(is_causal, of_queries, of_keys, reach, block.first_query, block.first_key, slopes_N=rule.slopes_N)


# Ulysses.


def trade_for_heads(qkv_sBGRD: Tensor, cp: Axis) -> Tensor:
    """Give tokens away for heads: [s, B, G, Q + 2, D] of a rank's tokens to [S, B, G', Q' + 2, D] of all tokens.

    A group along G is Q query heads, their key and their value. With G = cp x G', each rank gets G' groups. With fewer,
    cp = m x G, each group goes to m ranks: an m-th of its queries to each, and the key and the value to all of them.
    Forward: an all-to-all. Backward: one of the gradient, the other way.
    """
    s, B, G, R, D = qkv_sBGRD.shape
    if cp.size > G:
        ranks_of_group = cp.size // G
        q, kv = qkv_sBGRD.split((R - 2, 2), dim=3)
        q = q.reshape(s, B, cp.size, (R - 2) // ranks_of_group, D)
        qkv_sBGRD = torch.cat((q, kv.repeat_interleave(ranks_of_group, dim=2)), dim=3)
    groups, R = qkv_sBGRD.shape[2] // cp.size, qkv_sBGRD.shape[3]
    return conjugate(qkv_sBGRD.reshape(s, B, -1), cp, _cut_last, _cut_first).unflatten(2, (groups, R, D))


def trade_for_tokens(out_SBE: Tensor, cp: Axis) -> Tensor:
    """Give heads away for tokens: [S, B, N' x D] of all tokens to [s, B, N x D] of this rank's, N = cp x N'. Forward:
    an all-to-all. Backward: one of the gradient, the other way."""
    return conjugate(out_SBE, cp, _cut_first, _cut_last)


def _cut_last(x_sBE: Tensor, cp: Axis) -> Tensor:
    """[s, B, cp x E] to [cp x s, B, E]."""
    parts_PsBE = x_sBE.unflatten(2, (cp.size, -1)).permute(2, 0, 1, 3).contiguous()
    return all_to_all(parts_PsBE, cp).flatten(0, 1)


def _cut_first(x_SBE: Tensor, cp: Axis) -> Tensor:
    """[cp x s, B, E] to [s, B, cp x E]."""
    parts_PsBE = all_to_all(x_SBE.contiguous().unflatten(0, (cp.size, -1)), cp)
    return parts_PsBE.permute(1, 2, 0, 3).flatten(2)
