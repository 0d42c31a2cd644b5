"""Context parallel: attention over ranks is the attention of one rank, and moves the bytes that formulas say."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from shardwright.parallel.comm.collectives import Axis
from shardwright.parallel.context.attention_rule import AttentionRule
from shardwright.parallel.context.block_attention import Merged, attend_block, block_gradients
from shardwright.parallel.context.ring_attention import (
    gathered_attention,
    ring_attention,
    trade_for_heads,
    trade_for_tokens,
)
from shardwright.parallel.context.sight import AttentionBlock, Sight
from shardwright.sharding.sequence import ScoreBlock, block_of, held_ranges, positions_of, share_of
from support.attention_inputs import bare_axis, documents, inputs
from support.ranks import run_ranks

METHODS = ("ring", "all-gather", "ulysses")


def num_scores(block: ScoreBlock) -> int:
    """Scores that are not masked away."""
    queries, keys = (int(s.stop - s.start) for s in (block.queries, block.keys))
    return queries * (queries + 1) // 2 if block.is_causal else queries * keys


@given(st.integers(1, 8), st.integers(1, 5), st.sampled_from(METHODS))
def test_every_position_is_held_once(size: int, length: int, method: str) -> None:
    sequence = 2 * size * length
    held = [positions_of(held_ranges(sequence, size, index, method)) for index in range(size)]
    assert sorted(position for positions in held for position in positions) == list(range(sequence))
    assert all(positions == sorted(positions) and len(positions) == 2 * length for positions in held)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_a_share_is_cut_of_what_is_held(size: int, parts: int, length: int) -> None:
    ranges = held_ranges(2 * size * parts * length, size, size - 1, "ring")
    shares = [positions_of(share_of(ranges, parts, index)) for index in range(parts)]
    assert [position for share in shares for position in share] == positions_of(ranges)
    assert len({len(share) for share in shares}) == 1


@given(st.integers(1, 8), st.integers(1, 4), st.booleans())
def test_blocks_are_the_mask_and_equal_work(size: int, length: int, is_causal: bool) -> None:
    """Block by block, the scores that are computed are those of the mask, and every rank computes as many."""
    sequence, work = 2 * size * length, []
    held = [positions_of(held_ranges(sequence, size, index, "ring")) for index in range(size)]
    for index in range(size):
        seen = set()
        for source in range(size):
            block = block_of(index, source, 2 * length, is_causal)
            pairs = [
                (q, k)
                for q in held[index][block.queries]
                for k in held[source][block.keys]
                if k <= q or not block.is_causal
            ]
            assert len(pairs) == num_scores(block)
            seen.update(pairs)
        assert seen == {(q, k) for q in held[index] for k in range(sequence) if k <= q or not is_causal}
        work.append(sum(num_scores(block_of(index, source, 2 * length, is_causal)) for source in range(size)))
    assert len(set(work)) == 1


SHAPES = {"plain": (4, 4), "grouped": (8, 2), "one-key": (4, 1)}


def full_attention(tensors: list[Tensor], is_causal: bool, documents_BS: Tensor | None) -> list[Tensor]:
    """Output and gradients by plain softmax in float64."""
    q, k, v, dout = (x.double() for x in tensors)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    queries = q.shape[2] // k.shape[2]
    scores_BNST = torch.einsum("sbnd,tbnd->bnst", q, k.repeat_interleave(queries, 2)) / q.shape[3] ** 0.5
    if documents_BS is not None:
        scores_BNST = scores_BNST.masked_fill(
            (documents_BS[:, :, None] != documents_BS[:, None, :])[:, None], -torch.inf
        )
    if is_causal:
        scores_BNST = scores_BNST.masked_fill(torch.ones(scores_BNST.shape[2:]).triu(1).bool(), -torch.inf)
    out = torch.einsum("bnst,tbnd->sbnd", scores_BNST.softmax(-1), v.repeat_interleave(queries, 2))
    out.backward(dout)
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def by_ulysses(q: Tensor, k: Tensor, v: Tensor, cp: Axis, is_causal: bool) -> Tensor:
    qkv_sBGRD = torch.cat((q.unflatten(2, (k.shape[2], -1)), k.unsqueeze(3), v.unsqueeze(3)), dim=3)
    traded_SBGRD = trade_for_heads(qkv_sBGRD, cp)
    q, k, v = traded_SBGRD.split((traded_SBGRD.shape[3] - 2, 1, 1), dim=3)
    out_BNSD = functional.scaled_dot_product_attention(
        *(x.flatten(2, 3).permute(1, 2, 0, 3) for x in (q, k, v)), is_causal=is_causal, enable_gqa=True
    )
    return trade_for_tokens(out_BNSD.permute(2, 0, 1, 3).flatten(2), cp).unflatten(2, (-1, 8))


def on_ranks(rank: int, store: str, size: int, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """Every method on every shape and mask: what this rank's tokens got, and what was moved."""
    cp = bare_axis(rank, store, size)
    results = []
    for method in METHODS:
        for shape, (heads, kv_heads) in SHAPES.items():
            positions = torch.tensor(positions_of(held_ranges(32, size, rank, method)))
            order = [positions_of(held_ranges(32, size, index, method)) for index in range(size)]
            documents_PBs = documents()[:, torch.tensor(order)].transpose(0, 1)
            for is_causal in (True, False):
                for packed in (False, True) if method != "ulysses" else (False,):
                    *qkv, dout = (x[positions] for x in inputs(heads, kv_heads, dtype))
                    qkv = [x.requires_grad_() for x in qkv]
                    cp.ledger.clear()
                    if method == "ulysses":
                        out = by_ulysses(*qkv, cp, is_causal)
                    else:
                        attend = ring_attention if method == "ring" else gathered_attention
                        out = attend(*qkv, cp, documents_PBs if packed else None, AttentionRule(is_causal=is_causal))
                    forward = cp.ledger.table()
                    out.backward(dout)
                    got = [out.detach(), *(x.grad for x in qkv)]
                    results.append((method, shape, is_causal, packed, positions, got, forward, cp.ledger.table()))
    dist.destroy_process_group()
    return results


def expected_bytes(method: str, size: int, kv_heads: int, heads: int, element: int) -> tuple[Any, Any]:
    """The ledger after the forward and after the backward, by the formulas of docs/context.md."""
    tokens, width = 32 // size * 3, 8
    kv = 2 * tokens * kv_heads * width
    if method == "ring":
        forward = {"exchange cp": {"count": size - 1, "bytes": (size - 1) * kv * element}}
        after = {"exchange cp": {"count": 3 * (size - 1), "bytes": (size - 1) * kv * (2 * element + 4)}}
        return forward, after
    if method == "all-gather":
        gathers = [{"count": n, "bytes": n * size * kv * element} for n in (1, 2)]
        scatter = {"count": 1, "bytes": size * kv * 4}
        return {"all_gather cp": gathers[0]}, {"all_gather cp": gathers[1], "reduce_scatter cp": scatter}
    traded = tokens * width * element * (heads + 2 * max(kv_heads, size) + heads)
    return tuple({"all_to_all cp": {"count": 2 * n, "bytes": n * traded}} for n in (1, 2))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("size", "dtype"), [(2, torch.float32), (4, torch.float32), (2, torch.bfloat16)], ids=["2", "4", "2-bf16"]
)
def test_every_method_is_full_attention(size: int, dtype: torch.dtype) -> None:
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 4e-2}
    wanted: dict[Any, list[Tensor]] = {}
    for of_rank in run_ranks(size, on_ranks, size, dtype):
        ring: dict[Any, list[Tensor]] = {}
        for method, shape, is_causal, packed, positions, got, forward, after in of_rank:
            heads, kv_heads = SHAPES[shape]
            case = shape, is_causal, packed
            if case not in wanted:
                wanted[case] = full_attention(
                    inputs(heads, kv_heads, dtype), is_causal, documents() if packed else None
                )
            for tensor, full in zip(got, wanted[case], strict=True):
                torch.testing.assert_close(tensor.double(), full[positions], **tolerance)
            assert (forward, after) == expected_bytes(method, size, kv_heads, heads, dtype.itemsize)
            if method == "ring":
                ring[case] = got
            elif method == "all-gather":
                assert torch.equal(got[0], ring[case][0])  # the same blocks in the same order


def test_who_sees_nothing_is_zero_and_not_nan() -> None:
    """Block by block: a query whose document has no key in the block, and one that has no key at all."""
    q, k, v, dout = (x.permute(1, 2, 0, 3) for x in inputs(4, 2, torch.float32, sequence=6))
    sight = Sight(False, torch.tensor([[0, 0, 1, 1, 2, 2]] * 3), torch.tensor([[0, 1, 1, 1, 3, 3]] * 3))
    out, lse = attend_block(AttentionBlock(q, k, v, sight))
    assert (out[:, :, 4:] == 0).all() and (lse[:, :, 4:] == -torch.inf).all()
    assert out[:, :, :4].ne(0).any() and lse[:, :, :4].isfinite().all()
    dq, dk, dv = block_gradients(AttentionBlock(q, k, v, sight), dout, out, lse)
    assert all(x.isfinite().all() for x in (dq, dk, dv))
    assert (dq[:, :, 4:] == 0).all() and (dk[:, :, 4:] == 0).all() and (dv[:, :, 4:] == 0).all()
    assert (dk[:, :, :4] != 0).any() and (dv[:, :, :4] != 0).all()


def test_blocks_merge_where_one_or_none_is_seen() -> None:
    """The last two queries see no key of either block, the first three have keys in both or in one."""
    q, k, v, _ = (x.permute(1, 2, 0, 3) for x in inputs(4, 2, torch.float32, sequence=6))
    of_queries, of_keys = torch.tensor([[0, 1, 1, 4, 2, 2]] * 3), torch.tensor([[0, 1, 1, 1, 4, 3]] * 3)

    def attended(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        sight = Sight(False, of_queries, of_keys[:, keys])
        return attend_block(AttentionBlock(q, k[:, :, keys], v[:, :, keys], sight))

    merged = Merged(*attended(slice(0, 3)))
    merged.add(slice(0, 6), *attended(slice(3, 6)))
    out, lse = attended(slice(0, 6))
    torch.testing.assert_close((merged.out_BNSD, merged.lse_BNS), (out, lse), rtol=1e-5, atol=1e-5)
    assert (out[:, :, 4:] == 0).all()
