"""Attention by rules (windows, chunks, caps, slopes, sinks) over ranks and on one is attention by plain softmax."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardwright.model.position_tables import alibi_slopes
from shardwright.parallel.comm.collectives import Axis
from shardwright.parallel.comm.ledger import Ledger
from shardwright.parallel.context.attention_rule import AttentionRule, Sinks
from shardwright.parallel.context.block_attention import Merged
from shardwright.parallel.context.ring_attention import gathered_attention, ring_attention
from shardwright.parallel.tensor.parameter import PlacedParameter
from shardwright.sharding import score_blocks
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.sharding.score_blocks import KeyReach, blocks_in_reach
from shardwright.sharding.sequence import ScoreBlock, held_ranges, positions_of
from support.attention_inputs import bare_axis, documents, inputs
from support.cuda_kernels import cuda_attention  # noqa: F401  # a fixture
from support.ranks import run_ranks

SEQUENCE = 32
REACHES = {
    "window": KeyReach(5),
    "one": KeyReach(1),
    "long": KeyReach(20),
    "chunks": KeyReach(6, True),
    "all": KeyReach(),
}
RULES: dict[str, dict[str, Any]] = {
    **{name: {"reach": reach} for name, reach in REACHES.items()},
    "cap": {"softcap": 0.7},
    "cap in windows": {"softcap": 0.7, "reach": KeyReach(5)},
    "slopes": {"slopes": True},
    "slopes in chunks": {"slopes": True, "reach": KeyReach(6, True)},
    "sinks": {"sinks": True},
    "all of it": {"slopes": True, "sinks": True, "softcap": 1.5, "reach": KeyReach(9), "scale": 0.5},
}


def test_blocks_are_what_is_in_reach() -> None:
    """Pair by pair, over ranks and in small pieces; no block is without a pair, and what is out of reach in none."""

    @given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 40), st.booleans(), st.sampled_from([0, 1, 5]))
    def check(size: int, length: int, window: int, is_chunked: bool, most: int) -> None:
        sequence, reach = 2 * size * length, KeyReach(window, is_chunked)
        held = [held_ranges(sequence, size, index, "ring") for index in range(size)]
        for index in range(size):
            seen: list[tuple[int, int]] = []
            for source in range(size):
                queries, keys = positions_of(held[index]), positions_of(held[source])
                for block in blocks_in_reach(held[index], held[source], reach, most):
                    assert queries[block.queries][0] == block.first_query and keys[block.keys][0] == block.first_key
                    pairs = [
                        (q, k) for q in queries[block.queries] for k in keys[block.keys] if sees(block, reach, q, k)
                    ]
                    assert pairs
                    seen += pairs
            expected = {(q, k) for q in positions_of(held[index]) for k in range(q + 1) if in_reach(reach, q, k)}
            assert len(seen) == len(set(seen)) and set(seen) == expected

    least, score_blocks.LEAST_QUERIES = score_blocks.LEAST_QUERIES, 2
    try:
        check()
    finally:
        score_blocks.LEAST_QUERIES = least


def sees(block: ScoreBlock, reach: KeyReach, query: int, key: int) -> bool:
    """True if a query of a block sees a key of it, by the fields of the block."""
    if block.is_causal:
        return key <= query
    return not block.has_edge or (key <= query and in_reach(reach, query, key))


def in_reach(reach: KeyReach, query: int, key: int) -> bool:
    if not reach.window:
        return True
    if reach.is_chunked:
        return query // reach.window == key // reach.window
    return query - key < reach.window


def rule_of(name: str, heads: int, kv_heads: int) -> AttentionRule:
    fields = dict(RULES[name])
    if fields.pop("slopes", False):
        fields["slopes_N"] = torch.tensor(alibi_slopes(heads))
    if fields.pop("sinks", False):
        shape = (kv_heads, heads // kv_heads)
        values = torch.randn(shape, generator=torch.Generator().manual_seed(heads))
        place = ParameterShard(shape, tuple((0, n) for n in shape), "zeros")
        fields["sinks"] = Sinks(PlacedParameter(values, place), slice(0, heads))
    return AttentionRule(**fields)


def plainly(tensors: list[Tensor], rule: AttentionRule, documents_BS: Tensor | None) -> list[Tensor]:
    """Output, gradients, and the gradient of sinks, by plain softmax in float64."""
    q, k, v, dout = (x.double() for x in tensors)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    groups = q.shape[2] // k.shape[2]
    scale = rule.scale or q.shape[3] ** -0.5
    scores = torch.einsum("sbnd,tbnd->bnst", q, k.repeat_interleave(groups, 2)) * scale
    if rule.softcap:
        scores = rule.softcap * (scores / rule.softcap).tanh()
    places = torch.arange(SEQUENCE)
    if rule.slopes_N is not None:
        scores = scores - rule.slopes_N.double()[:, None, None] * (places[:, None] - places)
    sees_ST = torch.tensor([[j <= i and in_reach(rule.reach, i, j) for j in range(SEQUENCE)] for i in range(SEQUENCE)])
    sees_BNST = sees_ST.expand_as(scores)
    if documents_BS is not None:
        sees_BNST = sees_BNST & (documents_BS[:, :, None] == documents_BS[:, None, :])[:, None]
    scores = scores.masked_fill(~sees_BNST, -math.inf)
    sinks = None
    if rule.sinks is not None:
        sinks = rule.sinks.weight.detach().flatten().double().requires_grad_()
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), dim=-1)
    shares = scores.softmax(-1)[..., :SEQUENCE]
    out = torch.einsum("bnst,tbnd->sbnd", shares, v.repeat_interleave(groups, 2))
    out.backward(dout)
    result = [out.detach(), *(x.grad for x in (q, k, v))]
    return result + ([sinks.grad] if sinks is not None else [])


def by_rule(cp: Axis, name: str, method: str, packed: bool, dtype: torch.dtype) -> list[Tensor]:
    """Output, gradients of this rank's tokens, and its part of the gradient of sinks."""
    heads, kv_heads = 6, 2
    positions = torch.tensor(positions_of(held_ranges(SEQUENCE, cp.size, cp.index, "ring")))
    order = [positions_of(held_ranges(SEQUENCE, cp.size, index, "ring")) for index in range(cp.size)]
    documents_PBs = documents()[:, torch.tensor(order)].transpose(0, 1) if packed else None
    *qkv, dout = (x[positions] for x in inputs(heads, kv_heads, dtype))
    qkv = [x.requires_grad_() for x in qkv]
    rule, attend = rule_of(name, heads, kv_heads), ring_attention if method == "ring" else gathered_attention
    out = attend(*qkv, cp, documents_PBs, rule)
    out.backward(dout)
    results = [out.detach(), *(x.grad for x in qkv)]
    if rule.sinks is not None:
        results.append(rule.sinks.weight.gradient.flatten())
    return results


def check_part(parts: list[Tensor], expected: list[Tensor], positions: Tensor, dtype: torch.dtype) -> None:
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 4e-2}
    for tensor, full in zip(parts[:4], expected[:4], strict=True):
        torch.testing.assert_close(tensor.double(), full[positions], **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("name", RULES)
def test_a_rule_on_one_rank(name: str, packed: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of eight queries where scores are made."""
    monkeypatch.setattr(score_blocks, "SCORE_BYTES", 1)
    monkeypatch.setattr(score_blocks, "LEAST_QUERIES", 4)
    alone = Axis("cp", (0,), 0, None, Ledger(torch.device("cpu")), None)
    result = by_rule(alone, name, "ring", packed, dtype)
    expected = plainly(inputs(6, 2, dtype), rule_of(name, 6, 2), documents() if packed else None)
    check_part(result, expected, torch.arange(SEQUENCE), dtype)
    if len(expected) > 4:
        bound = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 0.5}
        torch.testing.assert_close(result[4].double(), expected[4], **bound)


@pytest.mark.usefixtures("cuda_attention")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("name", [name for name in RULES if "cap" not in name and name != "all of it"])
def test_a_rule_by_kernels_of_cuda(
    name: str, packed: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several samples in 16 bits: the kernel of the backward believes that rows of the output lie side by side."""
    monkeypatch.setattr(score_blocks, "SCORE_BYTES", 1)
    monkeypatch.setattr(score_blocks, "LEAST_QUERIES", 4)
    alone = Axis("cp", (0,), 0, None, Ledger(torch.device("cpu"), kind="cuda"), None)
    result = by_rule(alone, name, "ring", packed, dtype)
    expected = plainly(inputs(6, 2, dtype), rule_of(name, 6, 2), documents() if packed else None)
    check_part(result, expected, torch.arange(SEQUENCE), dtype)


def on_ranks(rank: int, store: str, size: int) -> list[tuple[Any, ...]]:
    """Every rule both ways: what this rank's tokens got."""
    cp = bare_axis(rank, store, size)
    score_blocks.LEAST_QUERIES, score_blocks.SCORE_BYTES = 4, 1
    positions = torch.tensor(positions_of(held_ranges(SEQUENCE, size, rank, "ring")))
    result = [
        (name, packed, method, positions, by_rule(cp, name, method, packed, torch.float32))
        for name in RULES
        for packed in (False, True)
        for method in ("ring", "all-gather")
    ]
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize("size", [2, 4])
def test_a_rule_over_ranks(size: int) -> None:
    sums: dict[Any, Tensor] = {}
    wanted: dict[Any, list[Tensor]] = {}
    for of_rank in run_ranks(size, on_ranks, size):
        for name, packed, method, positions, results in of_rank:
            if (name, packed) not in wanted:
                tensors = inputs(6, 2, torch.float32)
                wanted[name, packed] = plainly(tensors, rule_of(name, 6, 2), documents() if packed else None)
            check_part(results, wanted[name, packed], positions, torch.float32)
            if len(results) > 4:
                sums[name, packed, method] = sums.get((name, packed, method), torch.zeros(6)) + results[4]
    for (name, packed, _), total in sums.items():
        torch.testing.assert_close(total.double(), wanted[name, packed][4], rtol=1e-5, atol=1e-5)
    assert sums


def test_slopes_of_heads() -> None:
    """arXiv 2108.12409, section 3: for 8 heads 1/2 to 1/2^8; for 12 those, and of 16 every second from the first."""
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(12) == alibi_slopes(8) + alibi_slopes(16)[:8:2]
    assert alibi_slopes(1) == [2.0**-8]


def test_the_output_lies_as_the_backward_takes_it_on_cuda() -> None:
    """Else each backward would copy it."""
    merged = Merged.nothing(torch.zeros(2, 4, 16, 8))
    assert merged.out_BNSD.transpose(1, 2).is_contiguous()
    merged.add(slice(4, 16), torch.ones(2, 4, 12, 8), torch.zeros(2, 4, 12))
    assert merged.out_BNSD.transpose(1, 2).is_contiguous()
