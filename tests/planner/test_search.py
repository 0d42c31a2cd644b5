"""The search loses nothing: its bounds are below every price, and what it finds is the best of the whole space."""

from collections import defaultdict
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config import catalog
from shardwright.config.adapter import AdapterSpec
from shardwright.config.base import PlanError
from shardwright.config.checks.check import job_faults
from shardwright.config.job import JobSpec
from shardwright.config.load import load_job, make_job
from shardwright.config.plan import PlanSpec
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.software import software_of
from shardwright.cost.calibration import rates_of, shipped
from shardwright.cost.from_job import run_of
from shardwright.layers.memo import Memo
from shardwright.planner.advice.priced_plan import priced
from shardwright.planner.search import bounds
from shardwright.planner.search.adjacent_plans import adjacent_blocks
from shardwright.planner.search.branch_and_bound import ranked_kinds
from shardwright.planner.search.constraints import Constraints, constraints_of
from shardwright.planner.search.known_strategies import within_known
from shardwright.planner.search.plan_block import Columns, PlanBlock
from shardwright.planner.search.plan_price import prices, room_bytes
from shardwright.planner.search.search import search
from shardwright.planner.search.search_scope import SearchScope
from shardwright.planner.search.simulated_plans import SimulatedPlans
from shardwright.planner.search.space import degrees, hybrid_ranks, variants_of
from support.planned import MODELS, all_plans, small_job

pytestmark = pytest.mark.long


def kind(plan: Any) -> tuple[int, ...]:
    """The degrees that plans have in common of which one is shown."""
    return plan.tp, plan.pp, plan.cp, plan.ep


ORDERS = {"searched": Constraints(), "dp-tp": Constraints({"order": "dp-tp"}), "pp-cp": Constraints({"order": "pp-cp"})}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("model", "width", "order"),
    [("dense", 1, ""), ("dense", 2, ""), ("experts", 4, ""), ("dense", 2, "dp-tp"), ("experts", 4, "pp-cp")],
)
def test_pruning_loses_nothing(model: str, width: int, order: str) -> None:
    """The fastest plan that fits of each of the best kinds, as pricing every plan finds it."""
    job = small_job(model, width)
    constraints = constraints_of(
        ["plan.cp_method=ring", "plan.dispatch=direct", "plan.recompute_every=1"]
        + [f"plan.order={order}"] * bool(order),
        ["plan.virtual_stages=1,2"],
    )
    best: dict[tuple[int, ...], float] = defaultdict(lambda: np.inf)
    num_plans = num_fit = 0
    memo = Memo()
    for block in all_plans(job, constraints):
        priced = prices(job, block, shipped(), memo)
        num_plans, num_fit = num_plans + len(block), num_fit + int(priced.fits.sum())
        columns = (block.columns[name][priced.fits].tolist() for name in ("tp", "pp", "cp", "ep"))
        for *at, token_s in zip(*columns, priced.laid_out_s[priced.fits].tolist(), strict=True):
            best[tuple(at)] = min(best[tuple(at)], token_s)
    rows = degrees(job, constraints)
    kinds, tally = ranked_kinds(SearchScope(job, constraints, shipped(), rows, 6, room_bytes(job)))
    expected = sorted(best.values())[:6]
    assert [places[0].token_s for places in kinds[:6]] == pytest.approx(expected, rel=1e-12)
    assert tally.num_plans == num_plans
    assert tally.num_priced < num_plans / 2
    assert (num_fit < num_plans) == (width > 1)


def test_plans_that_must_offload_are_not_judged_as_if_they_did_not() -> None:
    """Where all plans offload, those are found that have no room for the optimizer state: without ZeRO it is whole."""
    job = small_job("dense", 3)
    kept = ["offload_optimizer=1", "recompute=none", "zero=0", "cp=1"]
    constraints = constraints_of([f"plan.{text}" for text in kept], ["plan.virtual_stages=1,2"])
    best: dict[tuple[int, ...], float] = defaultdict(lambda: np.inf)
    for block in all_plans(job, constraints):
        priced = prices(job, block, shipped())
        degrees_of_plans = zip(*(block.columns[name][priced.fits].tolist() for name in ("tp", "pp")), strict=True)
        for at, token_s in zip(degrees_of_plans, priced.laid_out_s[priced.fits].tolist(), strict=True):
            best[at] = min(best[at], token_s)
    kinds, _ = ranked_kinds(
        SearchScope(job, constraints, shipped(), degrees(job, constraints), len(best), room_bytes(job))
    )
    assert [places[0].token_s for places in kinds] == pytest.approx(sorted(best.values()), rel=1e-12)


def test_plans_without_room_are_not_priced_where_nothing_is_known_of_the_host() -> None:
    """Those that would have to offload are not bounded by an update that has no price."""
    job = small_job("dense", 3)
    job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"device": "l40"})})
    constraints, sentences = within_known(job, Constraints())
    assert "Plans that offload are left out" in sentences[0]
    kinds, tally = ranked_kinds(SearchScope(job, constraints, shipped(), degrees(job, constraints), 4, room_bytes(job)))
    assert len(kinds) >= 4 and not any(places[0].plan(job).plan.offload_optimizer for places in kinds)
    assert 0 < tally.num_fit < tally.num_priced


@cache
def blocks(model: str, order: str = "searched") -> list[PlanBlock]:
    """The whole space of a small job."""
    return all_plans(small_job(model), ORDERS[order])


@settings(max_examples=25, deadline=None)
@given(
    model=st.sampled_from(list(MODELS)),
    order=st.sampled_from(list(ORDERS)),
    software=st.sampled_from(
        [
            *["shardwright", "shardwright", "megatron-core", "megatron-deepspeed", "fsdp-2024", "deepspeed-2024"],
            *["transformers-2024", "torchtune", "litgpt"],
        ]
    ),
    data=st.data(),
)
def test_no_bound_is_above_a_price(model: str, order: str, software: str, data: st.DataObject) -> None:
    """Each bound, against what the plans that it stands for take, those that offload among them."""
    job = small_job(model)
    job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"software": software})})
    if software_of(software).adapters and job.model.mtp_layers == 0:
        adapter = AdapterSpec(rank=data.draw(st.sampled_from([0, 0, 4])))
        job = job.model_copy(update={"model": job.model.model_copy(update={"adapter": adapter})})
    block = data.draw(st.sampled_from(blocks(model, order)))
    chosen = np.array(data.draw(st.lists(st.integers(0, len(block) - 1), min_size=1, max_size=20)))
    block = block.where(chosen)
    variant, columns = block.variant, block.columns
    priced = prices(job, block, shipped())
    below = priced.token_s * (1 + 1e-12)
    hybrid = hybrid_ranks(job, Constraints(), columns)
    rows = columns | {
        "turn_s": bounds.turn_token_s(job, columns, rates_of(run_of(job), shipped())),
        "exchange_s": bounds.exchange_token_s(job, columns, hybrid, shipped(), Memo()),
        "zero3_s": bounds.zero3_token_s(
            job,
            columns,
            replace(variant, recompute="none", recompute_every=1, offload_activations=False),
            hybrid,
            shipped(),
            Memo(),
        ),
    }
    mean_s, paired_s = (
        bounds.mean_rank_token_s(job, columns, seconds)
        for seconds in bounds.microbatch_s(job, columns, variant, shipped(), Memo())
    )
    least_s = bounds.before_experts_s(job, columns, variant, shipped(), Memo())
    assert (bounds.mean_rank_token_s(job, columns, least_s) <= np.minimum(mean_s, paired_s) * (1 + 1e-12)).all()
    factor = bounds.bubble_factor(columns, variant.schedule, columns["virtual_stages"])
    virtual = SCHEDULES[variant.schedule].stages_per_rank or columns["virtual_stages"]
    least_s = factor * (paired_s if bounds.is_paired(variant.schedule) else mean_s)
    least_s = least_s + bounds.messages_token_s(rows, variant.schedule, virtual)
    unsharded = PlanBlock(variant, bounds.plain(columns) | {"virtual_stages": columns["virtual_stages"]})
    alone = prices(job, unsharded, shipped())
    rates = rates_of(run_of(job), shipped())
    update_s = bounds.update_token_s(job, block, rates, shipped(), Memo())
    assert (update_s > 0).all()
    for token_s in (least_s, bounds.unsharded_token_s(job, unsharded, shipped(), Memo())):
        below_s, gathered_s = bounds.step_token_s(job, rows, token_s, rates, factor)
        assert (np.where(columns["zero"] == 3, gathered_s, below_s) + update_s <= below).all()
    assert (bounds.unsharded_bytes(job, alone.memory) <= priced.memory.process).all()
    held = PlanBlock(variant, columns | bounds.unsharded_parts(job, alone.memory))
    for least_bytes in bounds.state_bytes(job, held, Memo()):
        assert (least_bytes <= priced.memory.process * (1 + 1e-12)).all()
    is_offloaded = columns["offload_optimizer"] > 0
    must_offload = bounds.must_offload(job, held, room_bytes(job), Memo())
    assert (is_offloaded | ~must_offload | (priced.memory.process > room_bytes(job))).all()
    offloaded_s = bounds.offloaded_token_s(job, unsharded, hybrid, 1.0, constants=shipped(), memo=Memo())
    assert (offloaded_s[is_offloaded] <= update_s[is_offloaded]).all()
    kept_anywhere = priced.memory.process + priced.memory.host
    assert (bounds.SURE_STATE * bounds.least_state_bytes(job, shipped()) <= kept_anywhere).all()
    is_hosted = is_offloaded | (columns["offload_parameters"] > 0)
    memory = priced.memory
    # Memory is that of the stage that takes most of all, which may hold less state than another.
    state_bytes = memory.parameters + memory.gradients + memory.optimizer
    held_bytes = np.where(columns["pp"] == 1, state_bytes, memory.process)
    assert (is_hosted | (bounds.device_state_bytes(job, shipped()) <= held_bytes * (1 + 1e-12))).all()
    if bounds.keeps_as_much(job, variant):
        least, on_device = bounds.least_bytes(job, columns, variant, shipped(), Memo())
        assert (least <= priced.memory.process).all()
        assert (is_offloaded | (on_device <= priced.memory.process)).all()


def test_state_without_room_on_all_devices_is_known_before_the_search() -> None:
    """Of the jobs of the catalog it is one whose host memory is stated, and which hosts may hold."""
    jobs = [job for name in catalog.names("jobs") if (job := load_job(name)).cluster.num_devices > 1]
    on_device = Constraints(among={"offload_optimizer": (0.0,), "offload_parameters": (False,)})
    has_room = {
        job.name: [
            bounds.has_room_for_state(job, limits, room_bytes(job), shipped()) for limits in (on_device, Constraints())
        ]
        for job in jobs
    }
    assert has_room.pop("gpt-100b-told") == [False, True]
    assert len(has_room) > 9
    assert all(map(all, has_room.values()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("order", ORDERS)
def test_a_memo_changes_no_price(model: str, order: str) -> None:
    """Plans of many words priced with one memo, as each block alone."""
    job, memo, random = small_job(model), Memo(), np.random.default_rng(0)
    results = blocks(model, order)
    for index in random.choice(len(results), 50, replace=False).tolist():
        block = results[index].where(random.integers(0, len(results[index]), 20))
        alone, remembered = prices(job, block, shipped()), prices(job, block, shipped(), memo)
        for fresh, old in ((alone.time, remembered.time), (alone.memory, remembered.memory)):
            for name, value in asdict(fresh).items():
                assert np.array_equal(value, asdict(old)[name]), (name, block.variant)


@pytest.mark.parametrize("model", MODELS)
def test_a_memo_keeps_sharding_apart_under_other_software(model: str) -> None:
    """Short steps wait longer for DeepSpeed's host under ZeRO-3, and one layer stands for plans with any sharding."""
    job = small_job(model)
    cluster = job.cluster.model_copy(update={"software": "deepspeed-2024"})
    job = job.model_copy(update={"cluster": cluster, "model": job.model.model_copy(update={"sequence": 128})})
    memo, random = Memo(), np.random.default_rng(0)
    results = blocks(model)
    for index in random.choice(len(results), 20, replace=False).tolist():
        block = results[index].where(random.integers(0, len(results[index]), 20))
        alone = prices(job, PlanBlock(block.variant, block.columns), shipped())
        assert np.array_equal(alone.time.total, prices(job, block, shipped(), memo).time.total), block.variant


def test_what_is_kept_is_kept_and_may_cost() -> None:
    """A constraint holds in every plan that is found, and never makes the best one faster."""
    job = small_job("dense")
    free = search(job, constraints_of(["plan.cp=1", "plan.recompute=none"], []), shipped(), num_shown=3)
    kept = search(
        job,
        constraints_of(["plan.cp=1", "plan.recompute=none", "plan.tp=4", "plan.zero=3"], ["plan.microbatch_size=2,4"]),
        shipped(),
    )
    assert {c.job.plan.tp for c in kept.candidates} == {4} and {c.job.plan.zero for c in kept.candidates} == {3}
    assert {c.job.plan.microbatch_size for c in kept.candidates} <= {2, 4}
    assert kept.candidates[0].token_s >= free.candidates[0].token_s
    assert len({kind(c.job.plan) for c in free.candidates}) == 3


def test_what_has_no_price_or_no_plan_is_said() -> None:
    """With a way out."""
    job = small_job("dense")
    unknown = job.model_copy(update={"cluster": job.cluster.model_copy(update={"device": "unknown"})})
    with pytest.raises(PlanError, match=r"cluster\.device is unknown"):
        search(unknown, Constraints(), shipped())
    with pytest.raises(PlanError, match=r"no plan has plan\.tp=3; use one of 1, 2, 4, or"):
        search(job, Constraints(keep={"tp": 3}), shipped())


def test_a_model_that_no_devices_hold_is_not_searched_for() -> None:
    job = small_job("dense")
    few = job.model_copy(update={"model": job.model.model_copy(update={"layers": 4000})})
    result = search(few, Constraints(), shipped())
    assert (result.candidates, result.tally.num_priced) == ([], 0) and result.tally.num_plans > 0


def test_the_plans_beside_one_pair_microbatches_together_or_not_at_all() -> None:
    """Of a model with experts a price holds for plans that hide the way to these, or for ones that do not."""
    job = small_job("experts")
    constraints = Constraints(among={"microbatch_size": (1,)})
    rows = degrees(job, constraints)
    (first, *_) = search(
        job, Constraints({"schedule": "dualpipev", "pp": 2, "tp": 1, "microbatch_size": 1}), shipped()
    ).candidates
    variants = variants_of(job, constraints, rows)
    blocks = adjacent_blocks(job, constraints, rows, [first.job], variants=variants)
    columns = [block.columns["schedule"] for block in blocks]
    are_paired = [{bounds.is_paired(SCHEDULES.names[number]) for number in column.tolist()} for column in columns]
    assert all(len(pairs) == 1 for pairs in are_paired)
    assert set.union(*are_paired) == {False, True}


def test_bounds_of_many_plans_are_those_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed for so many plans in one call that these have room."""
    whole = search(small_job("experts"), Constraints(), shipped(), num_shown=4)
    monkeypatch.setattr("shardwright.planner.search.branch_and_bound._MOST_ROWS", 200)
    parts = search(small_job("experts"), Constraints(), shipped(), num_shown=4)
    assert [plan.job for plan in parts.candidates] == [plan.job for plan in whole.candidates]
    assert parts.tally.num_priced == whole.tally.num_priced


def test_a_method_that_no_degrees_admit_is_passed_over() -> None:
    """On one node no token can go once to each of several."""
    job = small_job("experts")
    job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"nodes": 1})})
    constraints = constraints_of(["plan.recompute=none", "plan.schedule=1f1b", "plan.cp=1"], [])
    assert {c.job.plan.dispatch for c in search(job, constraints, shipped()).candidates} == {"direct"}


def test_the_shown_plan_costs_what_the_search_says() -> None:
    """Prices of arrays and of one plan agree."""
    constraints = constraints_of(["plan.recompute=selective", "plan.schedule=1f1b"], [])
    for candidate in search(small_job("experts"), constraints, shipped(), num_shown=4).candidates:
        (alone,) = priced([candidate.job], shipped())
        assert float(alone.time.total) / candidate.job.tokens_per_step == pytest.approx(candidate.token_s, rel=1e-9)


def test_kinds_of_which_no_plan_fits_are_refuted_each_time() -> None:
    """A search asks again after what it has learned, and what it knows by then leaves a kind without a plan."""
    job, constraints = small_job("dense"), Constraints()
    rows, room = degrees(job, constraints), 1.0
    scope = SearchScope(job, constraints, shipped(), rows, 3, room_bytes(job))
    kinds, _ = ranked_kinds(scope)
    plays = SimulatedPlans(replace(scope, room=room))
    for _ in range(2):
        assert plays.fastest(kinds, 3) == []
        assert plays.refuted
        plays.refuted = {}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", ["dense", "experts"])
@pytest.mark.parametrize("keep", [[], ["plan.zero=3"], ["plan.offload_optimizer=1"]])
def test_a_plan_names_no_zero_stage_that_does_nothing(model: str, keep: list[str]) -> None:
    """With one replica a lower stage is another plan only where its price differs: two copies of each stage, experts
    that tensor-parallel ranks repeat, parameters in host memory."""
    constraints = constraints_of(["plan.dp=1", "plan.cp=1", *keep], [])
    plans = [candidate.job for candidate in search(small_job(model), constraints, shipped(), 6).candidates]
    assert plans and (keep != ["plan.zero=3"] or all(job.plan.zero == 3 for job in plans))
    for job in plans:
        for zero in range(job.plan.zero):
            lower = job.model_copy(update={"plan": job.plan.model_copy(update={"zero": zero})})
            if constraints.allows("zero", zero) and not job_faults(lower):
                shared, whole = priced([job, lower], shipped())
                assert (shared.memory, shared.closed_token_s) != (whole.memory, whole.closed_token_s)


def test_a_search_of_no_plan_says_what_it_was_held_to() -> None:
    constraints = Constraints(global_batch=(7, 7), among={"dp": (8,)})
    with pytest.raises(PlanError) as error:
        search(small_job("dense"), constraints, shipped(), num_shown=1)
    (fault,) = error.value.faults
    assert "dp must divide the batch of 7, tp the" in fault
    assert fault.endswith("use another batch.global_batch_size, a system that has more values of plan.dp")


def test_what_a_rule_of_a_section_refuses_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that the space does not know, as somebody adds it to a spec."""
    job = small_job("dense")
    few = constraints_of(["plan.schedule=1f1b", "plan.recompute=none"], [])  # of few plans the best is soon found
    free = search(job, few, shipped(), num_shown=1).candidates[0].job.plan
    refused = {"tp": free.tp, "pp": free.pp}

    def faults(plan: PlanSpec) -> list[str]:
        return ["these degrees are refused"] * (refused == {"tp": plan.tp, "pp": plan.pp})

    monkeypatch.setattr(PlanSpec, "faults", faults)
    with pytest.raises(PlanError, match="these degrees are refused"):
        make_job(job.model_dump(mode="json") | {"plan": free.model_dump(mode="json")})
    shown = search(job, few, shipped(), num_shown=6).candidates
    assert shown and all({"tp": plan.job.plan.tp, "pp": plan.job.plan.pp} != refused for plan in shown)


def test_a_large_space_has_a_first_plan_before_its_layers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of DeepSeek-V3's 58,336 rows of layers a few hundred are priced before a plan is told."""
    bounded: list[int] = []
    microbatch_s = bounds.microbatch_s

    def counted(job: JobSpec, rows: Columns, *options: Any, **named: Any) -> Any:
        bounded.append(len(rows["dp"]))
        return microbatch_s(job, rows, *options, **named)

    class FirstPlanError(Exception):
        pass

    def told(job: Any, token_s: float) -> None:
        raise FirstPlanError(job().plan)

    monkeypatch.setattr(bounds, "microbatch_s", counted)
    monkeypatch.setattr("shardwright.planner.search.branch_and_bound.tell_bound", told)
    with pytest.raises(FirstPlanError):
        search(load_job("deepseek-v3"), constraints_of((), ()), shipped())
    assert sum(bounded) < 1000
