"""Operators of software on the rows of experts: each operator's bytes, as its source has them."""

from dataclasses import replace

import pytest

from shardwright.config.model_shape import ModelShape
from shardwright.config.section_shapes import ExpertShape
from shardwright.config.software import software_of
from shardwright.layers.chains import chains, kept_bytes, share_run_again
from shardwright.layers.operators import Operator
from shardwright.layers.query import PlanGrid

SHAPE = ModelShape(
    layers=2, hidden=1024, heads=8, kv_heads=8, head_dim=128, ffn=2048, gated=True, vocab=32000, sequence=512,
    experts=ExpertShape(num=8, topk=2, ffn=2048),
)  # fmt: skip
TOKENS = 512
ELEMENTS = TOKENS * 2 * 1024  # of the rows of experts


def operators(software: str, shape: ModelShape = SHAPE, **grid: int) -> dict[str, Operator]:
    """The operators of a layer with experts, by name."""
    chain = chains(shape, PlanGrid(**{"dp": 4, "global_batch": 4} | grid), software_of(software))["experts"]
    return {operator.name: operator for operator in chain}


def moved(operator: Operator, more_than: Operator) -> tuple[float, float]:
    """Bytes by element of the rows of experts that one operator moves more than another, forward and backward."""
    forward, backward = (
        (float(of_one - of_other) / ELEMENTS)
        for of_one, of_other in zip(
            (operator.forward_bytes, operator.backward_bytes),
            (more_than.forward_bytes, more_than.backward_bytes),
            strict=True,
        )
    )
    return forward, backward


def test_single_operators_of_gathered_tokens_move_more_than_two_copies() -> None:
    gathered, copied = operators("megatron-core+all-gather"), operators("megatron-core+all-to-all")
    assert moved(gathered["dispatch"], copied["dispatch"]) == (8 - 4, 15 - 4)
    assert moved(gathered["combine"], copied["combine"]) == (23 - 4, 20 - 4)


@pytest.mark.parametrize("software", ["torchtitan", "torchtitan-2026"])
def test_rows_of_torchtitan_pass_through_single_operators(software: str) -> None:
    titan, copied = operators(software), operators("megatron-core+all-to-all")
    assert moved(titan["dispatch"], copied["dispatch"]) == (12 - 4, 14 - 4)
    assert moved(titan["combine"], copied["combine"]) == (20 - 4, 28 - 4)
    assert titan["combine"].kept == 4 * ELEMENTS  # in float32, for the gradients of scores


def test_gathered_tokens_travel_whole_to_all_ranks_and_results_are_scattered() -> None:
    ranks = operators("megatron-core+all-gather", ep=4)
    (forward,), (backward,) = ranks["dispatch"].forward, ranks["dispatch"].backward
    assert (forward.kind, backward.kind) == ("all_gather", "reduce_scatter")
    assert forward.size == backward.size == 2 * TOKENS * 1024 * 4  # tokens of 4 ranks, once each
    assert [e.kind for e in ranks["combine"].forward] == ["reduce_scatter"]
    assert ranks["dispatch"].forward_bytes == 8 * ELEMENTS  # no rows come in a second order


@pytest.mark.parametrize("ep", [1, 2, 8])
def test_experts_in_turn_copy_all_gradients_for_each_expert_of_a_rank(ep: int) -> None:
    in_turn = operators("megatron-core+experts-in-turn", ep=ep)["combine"]
    assert moved(in_turn, operators("megatron-core", ep=ep)["combine"]) == (6, 4 + 12 * 8 / ep)


def test_biases_and_limits_of_experts_are_operators_unless_a_graph_has_the_whole_step() -> None:
    limited = replace(SHAPE, bias=True, experts=replace(SHAPE.mixture, limited=True))
    plain, limits = operators("nemo"), operators("nemo", limited)
    assert moved(limits["combine"], plain["combine"]) == (12, 16)
    of_activation = moved(limits["expert activation"], plain["expert activation"])
    assert of_activation == (16 * 2048 / 1024, 20 * 2048 / 1024)  # by element that leaves it
    wide = operators("nemo+hybridep", limited)  # weights of choices in float32
    assert moved(wide["combine"], operators("nemo+hybridep")["combine"]) == (28, 40)
    graph = operators("nemo+hybridep+graphs-step", limited)
    assert moved(graph["combine"], operators("nemo+hybridep")["combine"]) == (0, 0)
    graph = operators("nemo+graphs-step", limited)
    assert graph["combine"].forward_bytes == plain["combine"].forward_bytes
    assert graph["expert activation"].backward_bytes == plain["expert activation"].backward_bytes


def test_recomputation_by_operator_keeps_no_grouped_product() -> None:
    """torchtitan's list has mm and linear, not _grouped_mm."""
    layer = operators("torchtitan-2026")
    wide = operators("torchtitan-2026", replace(SHAPE, experts=replace(SHAPE.mixture, ffn=4096)))
    kept, kept_of_wide = (kept_bytes(tuple(chain.values()), "matmul") for chain in (layer, wide))
    assert kept == kept_of_wide > 0
    again = {name: share_run_again(operator, "matmul") for name, operator in layer.items() if operator.products}
    of_experts = {name for name in again if name.startswith("expert")}
    assert {again[name] for name in of_experts} == {1.0}
    assert {again[name] for name in set(again) - of_experts} == {0.5}
