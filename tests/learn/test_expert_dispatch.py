"""The picture of dispatch has the choices of the router, the counts of the runtime's dispatch, and its capacity."""

import pytest
import torch

from shardwright.learn.expert_dispatch_figure import (
    RANKS,
    SPEC,
    TOKENS,
    capacity,
    expert_dispatch_figure,
    logits,
    routed,
    sums,
)
from shardwright.parallel.comm.collectives import Axis
from shardwright.parallel.comm.ledger import Ledger
from shardwright.parallel.expert.dispatch import plan_dispatch, start_counting
from support.languages import words_of_picture

ALL = [routed(rank) for rank in range(RANKS)]


def test_tokens_choose_the_most_probable_expert_and_the_last_find_no_room() -> None:
    for rank, one in enumerate(ALL):
        assert list(one.experts) == logits(rank).argmax(dim=1).tolist()
        for expert in range(RANKS):
            holds = [one.holds[place] for place, chosen in enumerate(one.experts) if chosen == expert]
            assert holds == [place < capacity() for place in range(len(holds))]


@pytest.mark.parametrize("rank", range(RANKS))
def test_counts_are_those_of_the_dispatch(rank: int) -> None:
    chosen = zip(ALL[rank].experts, ALL[rank].holds, strict=True)
    experts_TK = torch.tensor([[expert if holds else -1] for expert, holds in chosen])
    alone = Axis("ep", (0,), 0, None, ledger=Ledger(torch.device("cpu")), watch=None)
    plan = plan_dispatch(start_counting(experts_TK, RANKS, alone), alone)
    assert ALL[rank].sent == plan.counts_e.tolist()
    assert max(ALL[rank].sent) <= capacity() == SPEC.capacity(TOKENS)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_picture_says_what_is_dropped(language: str) -> None:
    num_dropped, fullest = sums(ALL)
    assert sum(sum(one.sent) for one in ALL) == RANKS * TOKENS - num_dropped
    assert num_dropped > 0 and fullest > TOKENS
    words = words_of_picture(expert_dispatch_figure()(language))
    assert str(num_dropped) in words and str(fullest) in words
