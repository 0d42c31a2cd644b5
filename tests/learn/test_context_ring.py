"""The picture of ring attention has the keys that the runtime's ring brings, and the scores computed from them."""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest
import torch

from shardwright.config.context_facts import CONTEXT_METHODS
from shardwright.learn.context_ring import CONTEXT_RING, TOKENS, positions, ring_steps, scores_of_each, scores_of_last
from shardwright.parallel.context import ring_attention

SIZES = (2, 4, 8)


@dataclass(frozen=True)
class RankOfRing:
    """As much of an axis as the ring reads."""

    size: int
    index: int
    kind: str = "cpu"


@dataclass(frozen=True)
class Arrived:
    """A message that is there."""

    def wait(self, **_: Any) -> None:
        """Nothing to wait for."""


def computed(size: int, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, set[tuple[int, int]]]]]:
    """The runtime's ring, by step and rank: the rank whose keys are there, as their values say, and the scores that
    its attention sees. All ranks go their steps in turn; a rank gets what the one before it had."""
    held = TOKENS // size
    kv_PKs = torch.stack([torch.tensor(positions(rank, size)).expand(2, -1) for rank in range(size)])
    kv_PKsBGD = kv_PKs[..., None, None, None].float()
    present = {rank: kv_PKsBGD[rank] for rank in range(size)}
    arriving = dict[int, torch.Tensor]()

    def start_exchange(out: torch.Tensor, x: torch.Tensor, axis: RankOfRing) -> Arrived:
        present[axis.index] = x
        arriving[axis.index] = out
        return Arrived()

    monkeypatch.setattr(ring_attention, "start_exchange", start_exchange)
    axes = [RankOfRing(size, rank) for rank in range(size)]
    ways = [ring_attention._Way(axis, ring_attention.PLAIN, ring_attention._Ring) for axis in axes]  # type: ignore[arg-type]
    rings = [ring_attention._Ring(kv_PKsBGD[axis.index], axis).blocks() for axis in axes]  # type: ignore[arg-type]
    steps = []
    for _ in range(size):
        ranks = []
        arriving.clear()
        for rank, (ring, way) in enumerate(zip(rings, ways, strict=True)):
            source, kv_KsBGD = next(ring)
            assert kv_KsBGD[0].flatten().tolist() == positions(source, size)
            scores = set[tuple[int, int]]()
            queries = torch.tensor(positions(rank, size))[:, None, None, None].float()
            assert len(queries) == held
            for places, block in way.blocks(source, queries, kv_KsBGD, None):
                block_queries = [round(one) for one in block.q_BNSD.flatten().tolist()]
                block_keys = [round(one) for one in block.k_BGTD.flatten().tolist()]
                seen = torch.ones(len(block_queries), len(block_keys), dtype=torch.bool)
                if places.is_causal:
                    seen = seen.tril()
                scores |= {(block_queries[q], block_keys[k]) for q, k in seen.nonzero().tolist()}
            ranks.append((source, scores))
        for rank, out in arriving.items():
            out.copy_(present[(rank - 1) % size])
        steps.append(ranks)
    return steps


@pytest.mark.parametrize("size", SIZES)
def test_each_step_is_the_runtimes(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [
        [(source, set(scores)) for source, scores in zip(step.sources, step.scores, strict=True)]
        for step in ring_steps(size)
    ]
    assert drawn == computed(size, monkeypatch)


@pytest.mark.parametrize("size", SIZES)
def test_all_steps_are_the_causal_mask_once_in_equal_shares(size: int) -> None:
    scores = list(chain.from_iterable(chain.from_iterable(step.scores for step in ring_steps(size))))
    assert sorted(scores) == [(query, key) for query in range(TOKENS) for key in range(query + 1)]
    assert scores_of_each(size) * size == len(scores) < scores_of_last(size) * size
    assert CONTEXT_METHODS["ring"].chunks == 2


def test_the_figure_has_all_steps_of_each_choice() -> None:
    (figure,) = CONTEXT_RING.values()
    (control,) = figure.controls
    for ranks in control.values:
        shown = figure.frame(ranks)
        steps = ring_steps(int(ranks))
        assert [sorted((q, k) for q, k, _ in step["cells"]) for step in shown.picture["steps"]] == [
            sorted(chain.from_iterable(step.scores)) for step in steps
        ]
        for rank in range(int(ranks)):
            held = [place for place, holder in enumerate(shown.picture["holders"]) if holder == rank]
            assert held == positions(rank, int(ranks))
        assert all(len(step["texts"]) == int(ranks) for step in shown.picture["steps"])
        assert dict(shown.numbers)["times that a rank sends keys and values"] == str(len(steps) - 1)
