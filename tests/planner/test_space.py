"""The planner's space is what the checks of a job accept: no plan more, and none less but for what is documented."""

from collections import Counter
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.base import PlanError
from shardwright.config.checks.check import job_faults
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.plan import PlanSpec
from shardwright.config.rank_order import DEFAULT_ORDER, ORDERS, STAGES_INSIDE, number_of
from shardwright.config.schedule_facts import searched
from shardwright.cost.calibration import shipped
from shardwright.planner.advice.priced_plan import priced
from shardwright.planner.search.constraints import Constraints, constraints_of
from shardwright.planner.search.plan_block import NUMBERS, PlanBlock, PlanVariant
from shardwright.planner.search.search import search
from shardwright.planner.search.space import count_by_variant, degrees, recomputations
from shardwright.schedule.job_program import plan_faults
from shardwright.sharding.groups import CP, DP, EP, PP, REPLICAS, TP, axis_groups
from support.planned import all_plans

pytestmark = pytest.mark.long

DENSE: dict[str, Any] = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "sequence": 12}
MODELS = {
    "dense": DENSE,
    "experts": DENSE | {"moe": {"experts": 4, "ffn": 16}, "layers": 3},
    "latent": DENSE | {"kv_heads": 0, "latent": {"kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 8}},
}


def small_job(model: str) -> JobSpec:
    """On two nodes of two devices."""
    cluster = {"name": "small", "device": "a100-sxm-80g", "devices_per_node": 2, "nodes": 2}
    fields = {"model": MODELS[model], "cluster": cluster, "plan": {"dp": 4}, "batch": {"global_batch_size": 4}}
    return make_job(fields)


Key = tuple[PlanVariant, tuple[float, ...]]


def key(plan: PlanSpec, batch: int = 4) -> Key:
    """A plan as its words and its numbers."""
    values = {name: getattr(plan, name) for name in PlanVariant.__dataclass_fields__ if name != "float8"}
    numbers = plan.model_dump() | {"expert_tp": plan.expert_tp_size, "global_batch_size": batch}
    numbers["order"] = number_of(plan.order)
    variant = PlanVariant(**(values | {"recompute_operators": tuple(plan.recompute_operators)}))
    return variant, tuple(numbers[name] for name in NUMBERS)


def keys(block: PlanBlock) -> list[Key]:
    """The keys of all plans of a block."""
    return [(block.variant, row) for row in zip(*(block.columns[name].tolist() for name in NUMBERS), strict=True)]


@cache
def space(model: str) -> frozenset[Key]:
    """All plans of a small job."""
    return frozenset(result for block in all_plans(small_job(model), Constraints()) for result in keys(block))


def on_nodes(plan: PlanSpec) -> list[list[list[int]]]:
    """How many ranks of each line are on each of the nodes of `small_job`, for every kind of line."""
    return [
        sorted(sorted(Counter(rank // 2 for rank in line).values()) for line in axis_groups(plan, kind).lines())
        for kind in (TP, CP, DP, EP, PP, *REPLICAS.values())
    ]


def standing_for(plan: PlanSpec, has_experts: bool) -> PlanSpec:
    """The plan of the space that is the same in all but name."""
    same: dict[str, Any] = {}
    if plan.pp == 1:
        same |= {"schedule": "1f1b", "virtual_stages": 1}
    elif plan.schedule not in ("interleaved-1f1b", "looped-bfs"):
        same |= {"virtual_stages": 1}
    if plan.tp == 1:
        same |= {"sequence_parallel": False}
    if plan.cp == 1:
        same |= {"cp_method": "ring"}
    if plan.ep == 1 or plan.ep * plan.expert_tp_size <= 2:  # one rank trades with no other, or those of one node
        same |= {"dispatch": "direct"}
    if plan.expert_tp_size == plan.tp or not has_experts:
        same |= {"expert_tp": 0}
    if plan.zero_ranks >= plan.replicas:
        same |= {"zero_ranks": 0}
    if on_nodes(plan) == on_nodes(plan.model_copy(update={"order": DEFAULT_ORDER})):
        same |= {"order": DEFAULT_ORDER}
    return plan.model_copy(update=same)


@st.composite
def plans(draw: st.DrawFn) -> PlanSpec:
    """Any plan over four ranks of those fields that are searched, legal or not."""
    degree = st.sampled_from((1, 2, 4))
    tp, pp, cp = draw(degree), draw(degree), draw(degree)
    variant = draw(st.sampled_from(recomputations())).fields() | {"schedule": draw(st.sampled_from(searched()))}
    numbers = {
        "tp": tp, "pp": pp, "cp": cp, "dp": max(1, 4 // (tp * pp * cp)), "ep": draw(degree),
        "expert_tp": draw(st.sampled_from((0, 1))),
        "cp_method": draw(st.sampled_from(("ring", "all-gather", "ulysses"))),
        "dispatch": draw(st.sampled_from(("direct", "node-aware"))), "sequence_parallel": draw(st.booleans()),
        "microbatch_size": draw(st.sampled_from((1, 2, 3, 4))), "virtual_stages": draw(st.integers(1, 4)),
        "zero": draw(st.integers(0, 3)), "zero_ranks": draw(st.sampled_from((0, 2))) if tp == 1 else 0,
        "offload_optimizer": draw(st.sampled_from((0.0, 1.0))), "offload_parameters": draw(st.booleans()),
    }  # fmt: skip
    return PlanSpec(**(variant | numbers), order=draw(st.sampled_from((DEFAULT_ORDER, STAGES_INSIDE))))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model", MODELS)
def test_every_plan_of_the_space_is_legal_and_none_is_there_twice(model: str) -> None:
    """All of what the space has, on few devices."""
    job, seen = small_job(model), []
    for block in all_plans(job, Constraints()):
        for index in range(0, len(block), 61):
            result = block.plan(index, job)
            assert job_faults(result) + plan_faults(result) == []
            assert key(result.plan) == keys(block)[index]
        seen += keys(block)
    assert (
        len(seen) == len(set(seen)) == sum(count_by_variant(job, Constraints(), degrees(job, Constraints())).values())
    )


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=100, deadline=None)
@given(plan=plans())
def test_what_the_space_leaves_out_is_refused(model: str, plan: PlanSpec) -> None:
    """A legal plan is in the space, itself or as another that is the same; any other is not."""
    job = small_job(model).model_copy(update={"plan": plan})
    if job_faults(job) or plan_faults(job):
        assert key(plan) not in space(model)
    else:
        assert key(standing_for(plan, model == "experts")) in space(model)


def test_limits_of_the_user_hold() -> None:
    """Fields that are kept, ranges, and several batches."""
    job = small_job("dense")
    constraints = Constraints(keep={"tp": 2, "zero": 1}, between={"microbatch_size": (2, 4)}, global_batch=(4, 12))
    blocks = all_plans(job, constraints)
    results = [block.plan(index, job) for block in blocks for index in range(len(block))]
    assert len(results) == sum(count_by_variant(job, constraints, degrees(job, constraints)).values())
    assert {p.plan.tp for p in results} == {2} and {p.plan.zero for p in results} == {1}
    assert {p.plan.microbatch_size for p in results} == {2, 3, 4}
    assert {p.batch.global_batch_size for p in results} == {4, 8, 12}


@pytest.mark.parametrize(("field", "way_out"), [("layout", "not searched"), ("nonsense", "virtual_stages")])
def test_limits_on_what_is_not_searched_are_refused(field: str, way_out: str) -> None:
    """With the fields that there are."""
    with pytest.raises(PlanError, match=way_out):
        Constraints(keep={field: 1})
    with pytest.raises(PlanError, match="no range"):
        Constraints(between={field: (1, 2)})


def test_every_virtual_stage_is_there() -> None:
    """All numbers of them that leave a layer to each stage."""
    job = small_job("dense")
    result = {
        (plan.pp, plan.virtual_stages)
        for block in all_plans(job, Constraints(keep={"schedule": "interleaved-1f1b", "zero": 0}))
        for plan in (block.plan(index, job).plan for index in range(len(block)))
    }
    assert result == {(pp, v) for pp, v in product((2, 4), (2, 3)) if pp * v <= 4}


@pytest.mark.parametrize("model", MODELS)
def test_an_order_is_searched_where_it_moves_a_group_to_other_links(model: str) -> None:
    """And nowhere else, so that nothing is priced twice."""
    job = small_job(model)
    rows = degrees(job, Constraints())
    with_other = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    inside = {number_of(STAGES_INSIDE)}
    assert {row["order"] for row in with_other} == {0, *inside}
    for row in with_other:
        numbers = {name: int(row[name]) for name in ("tp", "pp", "cp", "dp", "ep", "expert_tp")}
        default, other = (PlanSpec(**numbers, order=order) for order in (DEFAULT_ORDER, STAGES_INSIDE))
        is_drawn = any(all(o[n] == row[n] for n in row if n != "order") and o["order"] for o in with_other)
        assert is_drawn == (on_nodes(default) != on_nodes(other))


@pytest.mark.parametrize("order", ["pp-dp", "dp-tp", "tp-pp-cp-ep-dp"])
def test_an_order_that_is_kept_is_the_only_one(order: str) -> None:
    job, constraints = small_job("experts"), constraints_of([f"plan.order={order}", "plan.recompute=none"], [])
    rows = degrees(job, constraints)
    full = PlanSpec(order=order).order
    assert {str(ORDERS[number]) for number in rows["order"].tolist()} == {full}
    results = search(job, constraints, shipped(), num_shown=4).candidates
    assert results and {candidate.job.plan.order for candidate in results} == {full}
    for candidate in results:
        assert job_faults(candidate.job) == []
        (alone,) = priced([candidate.job], shipped())
        assert float(alone.time.total) / candidate.job.tokens_per_step == pytest.approx(candidate.token_s, rel=1e-9)
