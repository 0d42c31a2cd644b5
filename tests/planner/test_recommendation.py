"""The recommended plan, which is the fastest, and the simplest of those that can't be told apart from it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cli.main import cli
from shardwright.config.checks.check import job_faults
from shardwright.config.job import JobSpec
from shardwright.config.load import load_job
from shardwright.config.plan import PlanSpec
from shardwright.config.schedule_facts import SCHEDULES, searched
from shardwright.cost.calibration import shipped
from shardwright.cost.from_job import run_of
from shardwright.memory.fit_chance import SURE, fit_chance
from shardwright.memory.job_memories import fullest
from shardwright.planner.advice.advice import Advice
from shardwright.planner.advice.confidence import fitted_spread
from shardwright.planner.advice.priced_plan import PricedPlan, priced
from shardwright.planner.advice.reasons import Reason, faster_adjacent, reasons
from shardwright.planner.advice.recommendation import (
    CONSIDERED,
    TOLD_APART,
    best_plans,
    in_order,
    kinds_between,
    recommended,
    settled,
)
from shardwright.planner.advice.simplicity import extras, kept_on_host, simplicity
from shardwright.planner.search import plan_price
from shardwright.planner.search.constraints import Constraints, constraints_of
from shardwright.planner.search.objectives import Objective
from shardwright.planner.search.plan_price import room_bytes, sure_room_bytes
from shardwright.planner.search.results import Candidate
from shardwright.planner.search.search import search
from shardwright.planner.search.simpler_plans import simpler_plans
from shardwright.report.plan_screen import plan_screen
from shardwright.report.plans_text import sure_text, usd_text
from shardwright.report.recommendation_text import plan_dicts
from shardwright.report.rendered import rendered
from shardwright.report.toml_files import write_toml
from shardwright.schedule.job_program import plan_faults
from shardwright.simulate.closed_form import step_time
from support.computed_once import computed_once
from support.planned import small_job

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("searched_once")]

FREE = constraints_of([], [])
DEGREES = ("tp", "pp", "cp", "dp", "ep")

PLAIN = tuple(facts.name for facts in SCHEDULES.values() if facts.is_simple)


def with_plan(job: JobSpec, **plan: object) -> JobSpec:
    return job.model_copy(update={"plan": PlanSpec.model_validate(plan)})


def llama_on_a_node() -> JobSpec:
    fields = (
        "model.name=llama3-8b", "cluster.name=h100-node", "batch.global_batch_size=128", "precision.compute=bf16",
        "plan.dp=8", "plan.tp=1", "plan.pp=1", "plan.sequence_parallel=false", "plan.microbatch_size=1",
        "cluster.software=large-2024",
    )  # fmt: skip
    return load_job("quickstart", list(fields))


def advised(job: JobSpec, constraints: Constraints = FREE, objective: str = "time", shown: int = 10) -> Advice:
    result = best_plans(job, constraints, shipped(), Objective(objective), CONSIDERED)  # type: ignore[arg-type]
    return recommended(result, constraints, shipped(), is_roomy=objective == "memory", num_shown=shown)


@pytest.fixture(scope="module")
def llama() -> Advice:
    with computed_once():
        return advised(llama_on_a_node())


def test_the_first_plan_gives_way_to_faster_ones_beside_it(llama: Advice) -> None:
    """Whatever a search missed: from a plan that is slow the way goes on until no plan beside is faster and fits, and
    none leads to what is kept otherwise."""
    slow = with_plan(
        llama.job, dp=2, tp=2, pp=2, sequence_parallel=False, microbatch_size=1, zero=1, recompute="full",
        schedule="gpipe",
    )  # fmt: skip
    for constraints in (FREE, constraints_of(["plan.recompute=full", "plan.tp=2"], [])):
        missed = replace(llama, plans=priced([slow], shipped()))
        result = settled(missed, constraints, shipped(), num_shown=1)
        (first,) = result.plans
        assert first.fits and first.time.total < 0.97 * missed.plans[0].time.total
        values = first.job.plan.model_dump()
        assert all(constraints.allows(name, values[name]) for name in values)
        assert not any(is_faster(reason, constraints) for reason in reasons(first.job, searched(), shipped()))


def is_faster(reason: Reason, constraints: Constraints) -> bool:
    """True if a reason tells of a plan that fits, is faster and is not kept otherwise."""
    values = reason.job.plan.model_dump()
    kept = all(constraints.allows(name, value) for name, value in values.items())
    return kept and reason.slower_s < 0 and not reason.excess_bytes


def test_a_faster_plan_beside_one_is_the_fastest_that_its_reasons_show(llama: Advice) -> None:
    """Neighbours that a bound leaves out are no faster ones."""
    slow = with_plan(llama.job, dp=2, tp=2, pp=2, microbatch_size=1, zero=1, recompute="full", schedule="gpipe")
    answer = [reason for reason in reasons(slow, searched(), shipped()) if is_faster(reason, FREE)]
    fastest = min(answer, key=lambda reason: reason.slower_s)
    (plan,) = priced([slow], shipped())
    assert faster_adjacent(slow, plan.time, searched(), FREE, shipped()) == fastest.job


degrees = st.sampled_from([1, 2, 4, 8])
plans = st.builds(
    PlanSpec, dp=degrees, tp=degrees, pp=degrees, cp=degrees, ep=degrees, zero=st.integers(0, 3),
    microbatch_size=degrees, schedule=st.sampled_from(SCHEDULES.names), virtual_stages=st.integers(1, 3),
    recompute=st.sampled_from(["none", "selective", "full"]), offload_optimizer=st.sampled_from([0.0, 1.0]),
    compress=st.sampled_from(["none", "int8"]), layout=st.sampled_from([[], [1, 2]]),
)  # fmt: skip
BASE = small_job("dense")


@given(st.lists(st.tuples(plans, st.sampled_from([1.0, 2.0])), min_size=2, max_size=6), st.randoms())
def test_the_order_of_simplicity_is_total_and_stable(drawn: list[tuple[PlanSpec, float]], random: Any) -> None:
    """However plans are given they come out in one order, and a plan comes after those that are no less simple."""
    given_plans = [Candidate(BASE.model_copy(update={"plan": plan}), seconds) for plan, seconds in drawn]
    first = list(in_order(given_plans))
    random.shuffle(given_plans)
    assert list(in_order(given_plans)) == first
    assert [simplicity(of.job) for of in first] == sorted(simplicity(of.job) for of in first)
    for before, after in pairwise(first):
        assert simplicity(before.job) < simplicity(after.job) or before.token_s <= after.token_s


@given(plans)
def test_each_thing_less_is_simpler(plan: PlanSpec) -> None:
    job = BASE.model_copy(update={"plan": plan})
    for name, nothing in (("offload_optimizer", 0.0), ("compress", "none"), ("recompute", "none"), ("layout", [])):
        less = job.model_copy(update={"plan": plan.model_copy(update={name: nothing})})
        assert simplicity(less) < simplicity(job) or getattr(plan, name) == nothing
    for axis in ("tp", "cp"):
        less = job.model_copy(update={"plan": plan.model_copy(update={axis: 1})})
        assert simplicity(less) < simplicity(job) or getattr(plan, axis) == 1
    if plan.pp > 1 and plan.schedule == "dualpipe":
        plain = job.model_copy(update={"plan": plan.model_copy(update={"schedule": "1f1b", "virtual_stages": 1})})
        assert simplicity(plain) < simplicity(job)


def test_what_counts_first() -> None:
    """One axis fewer before a plain schedule, that before recomputation, and all before smaller degrees."""
    ordered: Sequence[dict[str, object]] = (
        {"dp": 8, "zero": 3, "recompute": "full"},
        {"dp": 4, "pp": 2, "schedule": "1f1b", "recompute": "full"},
        {"dp": 4, "pp": 2, "schedule": "interleaved-1f1b", "virtual_stages": 3},
        {"dp": 4, "pp": 2, "schedule": "zb-h1"},
        {"dp": 2, "pp": 4, "schedule": "zb-h1"},
        {"dp": 2, "pp": 4, "schedule": "zb-h1", "zero": 1},
        {"dp": 4, "pp": 2, "schedule": "zb-h1", "recompute": "selective"},
        {"dp": 2, "pp": 2, "tp": 2},
        {"dp": 4, "pp": 2, "schedule": "dualpipe"},
    )
    results = [simplicity(with_plan(BASE, **plan)) for plan in ordered]
    assert results == sorted(results) and len(set(results)) == len(results)
    cluster = BASE.cluster.model_copy(update={"software": "megatron-2021"})
    lacking = with_plan(BASE.model_copy(update={"cluster": cluster}), dp=8, zero=1)
    assert simplicity(lacking) > simplicity(with_plan(lacking, dp=2, tp=2, pp=2))  # somebody would have to write it
    hosted = with_plan(BASE, dp=8, zero=3, offload_parameters=True)
    assert kept_on_host(hosted.plan) == ["parameters in host memory"] and extras(hosted) == []
    assert simplicity(hosted) > simplicity(with_plan(BASE, dp=2, tp=2, pp=2, recompute="full"))


def test_the_fastest_is_recommended_and_a_simpler_one_is_told_with_its_cost(llama: Advice) -> None:
    """Llama 3 8B on 8 H100: the likelier winner first; two ranks a layer without a pipeline, nothing twice, for some
    percent. Replicas of whole models would not surely fit."""
    of, fastest = llama.recommendation, llama.plans[0]
    assert of is not None and of.plan is fastest and fastest.first_is_faster is None and of.simpler is not None
    simpler = of.simpler
    plan = simpler.plan.job.plan
    assert (plan.tp, plan.pp, plan.schedule, plan.recompute, extras(simpler.plan.job)) == (2, 1, "1f1b", "none", [])
    assert fastest.job.plan.pp > 1 and simpler.simplicity < simpler.recommended_simplicity
    assert 0.5 < simpler.confidence < TOLD_APART and simpler.plan.fits
    assert fastest.time.total < simpler.plan.time.total < 1.08 * fastest.time.total
    text = " ".join(rendered(plan_screen(llama)).split())
    slower = simpler.plan.time.total / fastest.time.total - 1
    best = fastest.job.plan
    assert f"Recommended: tp {best.tp}, pp {best.pp}, dp {best.dp}" in text
    assert f"Simpler: tp 2, pp {plan.pp}, dp {plan.dp}" in text and f"{100 * slower:.1f} % slower" in text
    more_usd = 1e12 / llama.job.tokens_per_step * (simpler.plan.money.usd - fastest.money.usd)
    assert f"{usd_text(more_usd)} more" in text
    assert f"{sure_text(simpler.confidence)} sure" in text
    assert f"no second copy of the parameters; no {best.schedule}" in text


def test_plans_of_other_software_fit_surely(llama: Advice) -> None:
    """Their memory is predicted. A neighbour that only may fit says with what chance, and leads to no move."""
    chances = [plan.fit_chance for plan in llama.plans]
    assert all(chance is not None and chance >= SURE for chance in chances)
    first, room = llama.plans[0], room_bytes(llama.job)
    assert first.fit_chance == fit_chance(float(first.memory.process), room)
    assert f"79.1 GiB (fits: {100 * first.fit_chance:.0f} %)" in " ".join(rendered(plan_screen(llama)).split())
    tight = [reason for reason in reasons(first.job, searched(), shipped()) if reason.is_tight]
    assert tight
    for reason in tight:
        needed = float(fullest(reason.job, shipped()).process)
        assert sure_room_bytes(llama.job) < needed <= room
        assert f"fits with a chance of {100 * fit_chance(needed, room):.0f} % only" in reason.text
        assert reason.excess_bytes == pytest.approx(needed - sure_room_bytes(llama.job))


def test_if_no_plan_fits_surely_those_that_may_fit_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    job = small_job("dense", 3)
    other = job.model_copy(update={"cluster": job.cluster.model_copy(update={"software": "megatron-core"})})
    values = {
        "tp": 4,
        "pp": 2,
        "schedule": "1f1b",
        "microbatch_size": 4,
        "recompute": "none",
        "zero": 0,
        "offload_optimizer": 0,
    }
    kept = constraints_of([f"plan.{name}={value}" for name, value in values.items()], [])
    assert sure_room_bytes(job) == room_bytes(job) > sure_room_bytes(other)  # our own memory is counted
    monkeypatch.setattr(plan_price, "SURE", 1 - 1e-15)
    assert search(other, kept, shipped(), 1, room=sure_room_bytes(other)).candidates == []
    (shown,) = search(other, kept, shipped(), 1).candidates
    assert sure_room_bytes(other) < float(fullest(shown.job, shipped()).process) <= room_bytes(other)


def test_a_simpler_plan_that_takes_as_long_is_the_recommended_one(llama: Advice) -> None:
    simpler = llama.recommendation.simpler  # type: ignore[union-attr]
    assert simpler is not None
    level = float(llama.plans[0].token_s / simpler.plan.token_s)
    alike = slower(simpler.plan, 1.0004 * level)
    others = [plan for plan in llama.plans if plan.kind != alike.kind]
    kept = constraints_of([f"plan.{name}={getattr(alike.job.plan, name)}" for name in DEGREES], [])
    advice = recommended(replace(llama, plans=[*others, alike]), kept, shipped(), num_shown=10)
    assert advice.recommendation is not None and advice.recommendation.simpler is None
    assert advice.plans[0].job == alike.job == advice.recommendation.plan.job
    assert all((plan.first_is_faster or 0) <= 0.5 for plan in advice.plans[1:2])


def test_each_plan_has_how_sure_it_is_that_the_first_is_faster(llama: Advice) -> None:
    first, *others = llama.plans
    assert first.first_is_faster is None
    for plan in others:
        kinds = kinds_between(first.job, plan.job)
        ratio = plan.time.total / first.time.total  # all of them were simulated
        assert plan.first_is_faster is not None
        assert fitted_spread().ratio(plan.first_is_faster, kinds) == pytest.approx(ratio, rel=1e-6)
    answer = plan_dicts(llama)
    assert [plan["first_is_faster"] for plan in answer[:2]] == [None, others[0].first_is_faster]
    assert [plan["fastest"] for plan in answer] == [True] + [False] * (len(answer) - 1)
    assert sum(plan["recommended"] for plan in answer) == 1
    assert all(plan["told_apart"] == ((plan["first_is_faster"] or 0) >= TOLD_APART) for plan in answer)


def test_all_that_is_as_good_is_no_simpler(llama: Advice) -> None:
    """Of the plans shown and those beside them none that can't be told apart is simpler than the one to take."""
    first = llama.plans[0]
    result = llama.recommendation.simpler  # type: ignore[union-attr]
    assert result is not None
    beside = simpler_plans(
        llama.job,
        FREE,
        [plan.job for plan in llama.plans],
        shipped(),
        room=sure_room_bytes(llama.job),
        most_token_s=1.0,
    )
    alike = [plan for plan in llama.plans[1:] if (plan.first_is_faster or 0) < TOLD_APART]
    assert all(simplicity(plan.job) >= result.simplicity for plan in alike)
    for one in beside:
        ratio = one.token_s * one.job.tokens_per_step / float(first.closed.total)
        if ratio < fitted_spread().ratio(TOLD_APART, kinds_between(first.job, one.job)) / 1.02:  # closed forms
            assert simplicity(one.job) >= result.simplicity


def beside(jobs: list[JobSpec], constraints: Constraints = FREE, most_s: float = 1.0) -> list[Candidate]:
    return simpler_plans(jobs[0], constraints, jobs, shipped(), room=room_bytes(jobs[0]), most_token_s=most_s)


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_plans_beside_are_legal_and_fit_and_cost_what_they_say(model: str) -> None:
    job = small_job(model)
    shown = [
        with_plan(job, dp=2, tp=2, pp=2, schedule="zb-v", sequence_parallel=True, zero=2),
        with_plan(job, dp=4, pp=2, schedule="dualpipe", recompute="full", recompute_every=2),
        with_plan(job, dp=4, cp=2, cp_method="ulysses", zero=3, zero_ranks=4, offload_optimizer=1.0),
    ]
    results = beside(shown)
    assert {one.job.plan.schedule for one in results} == set(PLAIN)
    assert {one.job.plan.zero for one in results} == {0, 1, 2, 3}
    assert {one.job.plan.recompute for one in results} == {"none", "selective", "full"}
    degrees_shown = {tuple(getattr(of.plan, axis) for axis in DEGREES) for of in shown}
    assert {tuple(getattr(one.job.plan, axis) for axis in DEGREES) for one in results} == degrees_shown
    for one, plan in zip(results, priced([one.job for one in results], shipped()), strict=True):
        assert job_faults(one.job) + plan_faults(one.job) == []
        assert plan.fits
        seconds = float(step_time(run_of(one.job), shipped()).total)
        assert one.token_s * one.job.tokens_per_step == pytest.approx(seconds)
        assert one.job.plan.cp == 2 or (not one.job.plan.zero_ranks and not one.job.plan.offload_optimizer)
    slowest = max(one.token_s for one in results)
    assert max(one.token_s for one in beside(shown, most_s=0.9 * slowest)) <= 0.9 * slowest
    assert beside(shown, most_s=0.0) == []


def test_plans_beside_keep_what_is_kept() -> None:
    job = with_plan(small_job("dense"), dp=4, pp=2, schedule="zb-h1", zero=2, microbatch_size=2)
    kept = constraints_of(["plan.schedule=interleaved-1f1b", "plan.zero=2", "plan.virtual_stages=3"], [])
    results = [one.job.plan for one in beside([job], kept)]
    assert results and {(of.schedule, of.zero, of.virtual_stages) for of in results} == {("interleaved-1f1b", 2, 3)}
    assert beside([job], constraints_of(["plan.schedule=zb-v"], [])) == []
    sizes = constraints_of([], ["plan.microbatch_size=1,1"])
    assert {one.job.plan.microbatch_size for one in beside([job], sizes)} == {1}


def test_a_plain_schedule_of_the_same_degrees_is_found() -> None:
    """The search shows the fastest of each kind alone; a plain schedule is priced beside it, and is the simpler one."""
    small = small_job("dense")
    batch, model = small.batch.model_copy(update={"global_batch_size": 256}), small.model
    cluster = small.cluster.model_copy(update={"software": "large-2024"})
    wide = model.model_copy(update={"vocab": 4000, "layers": 8})
    job = small.model_copy(update={"batch": batch, "model": wide, "cluster": cluster})
    result = advised(job, constraints_of(["plan.pp=2", "plan.tp=1", "plan.cp=1", "plan.recompute=none"], []), shown=1)
    of = result.recommendation
    assert len(result.plans) == 1 and of is not None and of.simpler is not None
    assert result.plans[0].job.plan.schedule not in ("gpipe", *PLAIN)
    assert of.simpler.plan.job.plan.schedule in PLAIN
    answer = plan_dicts(result)
    assert [(plan["recommended"], plan["simpler"]) for plan in answer] == [(True, False), (False, True)]
    assert [plan["step_s"] for plan in answer] == sorted(plan["step_s"] for plan in answer)


def slower(plan: PricedPlan, times: float) -> PricedPlan:
    """A plan that takes so many times as long."""
    time, closed = (replace(of, total=of.total * times) for of in (plan.time, plan.closed))
    return replace(plan, time=time, closed=closed)


def test_a_plan_that_can_be_told_apart_is_not_told_as_simpler(llama: Advice) -> None:
    """However simple it is."""
    first, *others = (replace(plan, first_is_faster=None) for plan in llama.plans)
    far = [first, *(slower(plan, 3.0) for plan in others)]
    narrow = constraints_of([f"plan.zero={first.job.plan.zero}", "plan.schedule=dualpipe"], [])
    advice = recommended(replace(llama, plans=far), narrow, shipped(), num_shown=10)
    of = advice.recommendation
    assert of is not None and of.simpler is None and of.plan is first
    assert "Simpler" not in rendered(plan_screen(advice))


def test_with_the_most_room_no_more_memory_is_recommended() -> None:
    result = advised(small_job("dense"), constraints_of(["plan.cp=1"], []), "memory", shown=4)
    assert result.recommendation is not None
    assert result.recommendation.plan.memory.process <= max(plan.memory.process for plan in result.plans)


def test_nothing_is_recommended_where_nothing_fits() -> None:
    huge = small_job("dense", 16)
    result = advised(huge, constraints_of(["plan.offload_optimizer=0", "plan.zero=0"], []))
    assert result.plans == [] and result.recommendation is None
    assert "Recommended" not in rendered(plan_screen(result)) and plan_dicts(result) == []


def test_the_command_writes_the_recommended_plan(tmp_path: Path) -> None:
    source, target = tmp_path / "job.toml", tmp_path / "best.toml"
    write_toml(source, llama_on_a_node())
    options = ["plan", str(source), "--top", "3", "--toml", str(target)]
    done = CliRunner().invoke(cli, [*options, "--json"], catch_exceptions=False)
    text = CliRunner().invoke(cli, options, catch_exceptions=False).stdout
    answer = json.loads(done.stdout)
    (chosen,) = [plan for plan in answer if plan["recommended"]]
    assert load_job(str(target)).plan.model_dump() == chosen["plan"] == answer[0]["plan"]
    assert "the job with the recommended plan is in" in done.stderr
    assert text.startswith("Predicted, not measured: steps of large-2024") and "\n1  " in text and "\n4  " not in text


def test_what_is_not_sure_enough_does_not_read_as_if_it_were() -> None:
    """79.7 % is less than 80 %, and was printed as 80 %: "80 % sure, less than the 80 % from which ..."."""
    assert [sure_text(share) for share in (0.5, 0.797, TOLD_APART, 0.9999, 1.0)] == [
        "50 %",
        "79 %",
        "80 %",
        "99 %",
        "100 %",
    ]
