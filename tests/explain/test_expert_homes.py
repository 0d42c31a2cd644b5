"""Nodes that a token's experts are on: the closed formula, choices that are drawn, and nodes that cut ep lines."""

import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.plan import PlanSpec, ep_ranks_of_node
from shardwright.explain.expert_homes import expected_nodes
from support.expert_traffic import ExpertRanks, sent_direct, sent_node_aware
from support.mesh_lines import expert_array, lines


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("num_nodes", [1, 2, 4])
def test_uniform_choices_are_combinatorics(num_nodes: int, top_k: int) -> None:
    chosen = list(combinations(range(8), top_k))
    by_enumeration = sum(len({expert * num_nodes // 8 for expert in some}) for some in chosen) / len(chosen)
    assert expected_nodes(8, num_nodes, top_k) == pytest.approx(by_enumeration)


def test_drawn_choices_cross_the_slow_link_as_often_as_is_expected() -> None:
    """Node-aware against direct over the slow link: nodes that a token needs over its choices."""
    ranks, top_k, tokens, row_bytes = ExpertRanks(16, num_ranks=8, ranks_per_node=2), 4, 4000, 10_000
    drawing = random.Random(0)
    counts, copies = [[0.0] * 16 for _ in range(8)], [[0.0] * 4 for _ in range(8)]
    for rank in range(8):
        for _ in range(tokens):
            chosen = drawing.sample(range(16), top_k)
            for expert in chosen:
                counts[rank][expert] += 1
            for node in {expert // 4 for expert in chosen}:
                copies[rank][node] += 1
    direct, node_aware = sent_direct(counts, ranks, row_bytes), sent_node_aware(counts, copies, ranks, row_bytes, top_k)
    ratio = sum(s.between_bytes for s in node_aware) / sum(s.between_bytes for s in direct)
    assert ratio == pytest.approx(expected_nodes(16, 4, top_k) / top_k, rel=0.01)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.integers(1, 24))
def test_nodes_cut_ep_lines_evenly_or_are_refused(ep: int, tp: int, edp: int, ranks_per_node: int) -> None:
    plan = PlanSpec(dp=ep * edp, tp=tp, ep=ep)
    parts = {
        tuple(sum(rank // ranks_per_node == node for rank in line) for node in {r // ranks_per_node for r in line})
        for line in lines(expert_array(plan), 2)
    }
    sizes = {size for part in parts for size in part}
    try:
        assert sizes == {ep_ranks_of_node(plan, ranks_per_node)}
    except ValueError:
        # Refused although even: only where lines and nodes are out of step.
        assert len(sizes) > 1 or (ranks_per_node % (ep * tp) and ep * tp % ranks_per_node) or ranks_per_node % tp
