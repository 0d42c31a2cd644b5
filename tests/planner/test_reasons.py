"""Reasons of `shardwright plan` are those of the cost model, and the job that it writes can be read."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardwright.api.loaded_job import load
from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.config.checks.check import job_faults
from shardwright.config.cluster import ClusterSpec
from shardwright.config.job import JobSpec
from shardwright.config.load import load_job
from shardwright.config.schedule_facts import searched
from shardwright.cost.calibration import pessimistic, shipped
from shardwright.cost.from_job import run_of
from shardwright.cost.run_goodput import job_goodput
from shardwright.layers.memo import Memo
from shardwright.memory.rank_estimate import peak_memory
from shardwright.planner.advice.neighbours import neighbours
from shardwright.planner.advice.priced_plan import priced
from shardwright.planner.advice.reasons import Reason, reasons
from shardwright.planner.advice.recommendation import best_plans, explained, plans_of
from shardwright.planner.advice.repair import misfit, nearest_that_fit
from shardwright.planner.advice.rules import first_place_of_state, rules_for
from shardwright.planner.advice.sensitivity import flips
from shardwright.planner.search.constraints import constraints_of
from shardwright.planner.search.objectives import Objective, best, cluster_sizes, on_devices
from shardwright.planner.search.plan_price import room_bytes
from shardwright.planner.search.sample import standing
from shardwright.planner.stages.best_layout import paying_layout
from shardwright.report.document import document_text, part_text
from shardwright.report.plan_details import _reason_lines, _rows, plan_details
from shardwright.report.plans_text import job_words, plan_dict
from shardwright.report.recommendation_text import plan_dicts
from shardwright.report.toml_files import write_toml
from shardwright.schedule.job_program import plan_faults
from shardwright.simulate.closed_form import step_time
from shardwright.simulate.full_step import simulated_step
from support.planned import small_job

pytestmark = pytest.mark.usefixtures("searched_once")

QUICK = constraints_of(["plan.recompute=none", "plan.cp=1", "plan.schedule=1f1b"], [])


def job_with(width: int = 1, **plan: object) -> JobSpec:
    """The small dense job under a plan."""
    job = small_job("dense", width)
    job = job.model_copy(update={"plan": job.plan.model_copy(update=plan)})
    assert job_faults(job) + plan_faults(job) == []
    return job


def test_reasons_add_up() -> None:
    """Each neighbour is legal and priced, and the difference is what the text's terms come to."""
    job = job_with(dp=2, tp=2, pp=2, sequence_parallel=True, zero=1)
    results = reasons(job, ("1f1b", "zb-h1"), shipped())
    assert {"tp", "pp", "zero", "schedule", "recompute", "microbatch_size", "sequence_parallel"} <= {
        r.field for r in results
    }
    own = float(simulated_step(job, shipped()).total)
    zero = next(r for r in results if r.field == "zero" and r.other == 3)
    other = job.model_copy(update={"plan": job.plan.model_copy(update={"zero": 3})})
    assert zero.slower_s == pytest.approx(float(simulated_step(other, shipped()).total) - own)
    assert "data-parallel" in zero.text
    wide = misfit(job_with(2, dp=8), ("1f1b",), shipped())
    assert wide is not None
    wide_reasons = reasons(wide.nearest[0].job, ("1f1b",), shipped())
    assert any(r.excess_bytes > 0 and "GiB" in r.text for r in wide_reasons)


def test_neighbours_keep_the_layers_of_stages_that_stay() -> None:
    """A plan of uneven stages is not told apart from the same plan of even ones, nor from itself."""
    even = job_with(dp=4, pp=2, zero=1)
    layers = even.model.layers
    layout = [layers - 1, 1]
    job = job_with(dp=4, pp=2, zero=1, layout=layout)
    near = neighbours(job, ("1f1b", "zb-h1", "zb-v", "dualpipe"))
    assert {one.field for one in near} >= {"zero", "pp", "schedule", "recompute", "microbatch_size"}
    for one in near:
        plan = one.job.plan
        stays = plan.pp == 2 and plan.schedule in ("1f1b", "zb-h1")
        assert plan.layout == (layout if stays else [])
        assert plan.model_copy(update={"layout": layout}) != job.plan
    answer = {(reason.field, reason.other) for reason in reasons(job, ("1f1b",), shipped())}
    assert ("zero", 1) not in answer and ("zero", 3) in answer


def test_reasons_of_a_simulated_plan_compare_simulated_steps() -> None:
    job = job_with(dp=2, tp=2, pp=2, sequence_parallel=True, zero=1)
    result = next(r for r in reasons(job, ("1f1b", "zb-h1"), shipped()) if r.other == "zb-h1")
    other = job.model_copy(update={"plan": job.plan.model_copy(update={"schedule": "zb-h1"})})
    played, closed = (
        float(price(other).total - price(job).total)
        for price in (lambda of: simulated_step(of, shipped()), lambda of: step_time(run_of(of), shipped()))
    )
    assert result.slower_s == pytest.approx(played) != pytest.approx(closed)


@pytest.mark.parametrize(
    "plan",
    [
        {"dp": 8, "zero": 3},
        {"dp": 2, "tp": 2, "pp": 2, "sequence_parallel": True, "zero": 1, "recompute": "selective"},
        {"dp": 1, "tp": 2, "pp": 4, "sequence_parallel": True},
    ],
)
def test_reasons_are_told_only_where_something_differs(plan: dict[str, object]) -> None:
    """No value is held against itself, and no difference is smaller than what is shown of a step; a pipeline of one
    rank has no schedule, and one rank of tp no sequence parallel."""
    job = job_with(2, **plan)
    results = reasons(job, searched(), shipped())
    step_s = float(simulated_step(job, shipped()).total)
    assert results
    for reason in results:
        assert str(reason.value) != str(reason.other)
        assert reason.excess_bytes > 0 or abs(reason.slower_s) >= 4e-4 * step_s
        assert "the same time" not in reason.text and " 0 s " not in reason.text
    fields = {reason.field for reason in results}
    assert job.plan.pp > 1 or not fields & {"schedule", "virtual_stages"}
    assert job.plan.tp > 1 or "sequence_parallel" not in fields


def test_many_values_that_do_not_fit_share_a_line() -> None:
    def unfit(other: str, slower_s: float) -> Reason:
        return Reason("zero", 3, other, slower_s, 2.0**30, False, "needs 81.0 GiB", "", job=job_with(zero=3))

    some = [unfit("1", 1.0), unfit("2", 0.0), unfit("0", 2.0)]
    (line,) = _reason_lines(some, 10.0)
    assert " ".join(part_text(line, "en").split()) == (
        "zero 3, not 1 (1.0), 2 (1.0), 0 (1.0): do not fit: so many GiB more than the device has"
    )
    assert len(list(_reason_lines(some[:2], 10.0))) == 2
    assert len(list(_reason_lines([*some, unfit("4", -1.0)], 10.0))) == 2  # a faster one has a line of its own


def test_what_is_below_what_is_shown_is_left_out_of_the_text() -> None:
    """Also of the smallest jobs, whose steps are milliseconds."""
    for job in (job_with(dp=8), job_with(2, dp=8, zero=3)):
        advice = explained(best_plans(job, QUICK, shipped(), Objective(), 3), job, QUICK, constants=shipped())
        text = document_text(plan_details(advice, flips(advice.plans[0].job, advice.plans[1].job, shipped())))
        for line in text.splitlines():
            assert not re.search(r"(?<![\d.])0(\.0+)? (s|%|GiB)|(?<![\d.])0\.0+%|the same time", line), line


def test_a_flip_is_where_two_plans_are_equally_fast() -> None:
    """At the factor that is named the runner-up is as fast, to a thirtieth of the factor."""
    jobs = [job_with(dp=8), job_with(dp=8, zero=3), job_with(dp=4, tp=2, sequence_parallel=True, zero=1)]
    num_flips = 0
    for pair in itertools.combinations(jobs, 2):
        plans = sorted(pair, key=lambda job: float(step_time(run_of(job), shipped()).total))
        assert flips(plans[1], plans[0], shipped()) == []
        for flip in flips(plans[0], plans[1], shipped()):
            if flip.name == "network bandwidth":
                num_flips += 1
                bandwidths = [factor * 25e9 for factor in (flip.factor, flip.factor**0.8)]
                runs = [[replace(run_of(job), network_bytes_per_s=each) for job in plans] for each in bandwidths]
                at, before = ([float(step_time(run, shipped()).total) for run in at_one] for at_one in runs)
                assert at[1] <= at[0] and before[1] > before[0]
    assert num_flips > 0


def test_a_plan_that_does_not_fit_is_told_by_rank_and_kind_and_has_neighbours_that_fit() -> None:
    """The nearest plans do fit, and one of them is one change away."""
    job = job_with(2, dp=8)
    result = misfit(job, ("1f1b",), shipped())
    assert result is not None and result.excess_bytes > 0 and result.num_ranks == 1
    assert result.memory.process == pytest.approx(room_bytes(job) + result.excess_bytes)
    assert result.nearest and all(near.price.memory.process <= room_bytes(job) for near in result.nearest)
    assert misfit(result.nearest[0].job, ("1f1b",), shipped()) is None


def test_a_plan_that_few_changes_repair_is_told_the_fastest_of_all_too() -> None:
    """Degrees, ZeRO and recomputation together make it faster than any of them alone."""
    job = load_job("llama3-8b", ["cluster.device=h100-sxm", "plan.dp=4", "plan.zero=0", "batch.global_batch_size=64"])
    near = nearest_that_fit(job, ("1f1b",), shipped(), 3, with_fastest=True)
    times_s = [float(plan.price.time.total) for plan in near]
    assert times_s == sorted(times_s) and all(plan.price.memory.process <= room_bytes(job) for plan in near)
    first_job, *_, last_job = (plan.job.plan for plan in near)
    assert first_job.zero == 1 and first_job.pp == 2 and first_job.recompute == "selective"
    assert (last_job.tp, last_job.pp, last_job.zero, last_job.recompute) == (4, 1, 0, "none")


def test_pessimistic_prices_are_no_lower() -> None:
    """Each constant at its unfavourable end makes every part of a step longer, or as long."""
    job = job_with(dp=2, tp=2, pp=2, sequence_parallel=True, zero=1)
    likely, worst = (step_time(run_of(job), constants) for constants in (shipped(), pessimistic()))
    for part in ("compute", "tensor", "data", "messages", "bubble", "other"):
        assert getattr(worst, part) >= getattr(likely, part)
    assert likely.total < worst.total < 1.5 * likely.total


def test_rules_tell_a_good_plan_from_a_bad_one() -> None:
    """A plan that breaks them differs where it does."""
    good = rules_for(job_with(dp=2, tp=4, sequence_parallel=True, zero=1))
    bad = rules_for(job_with(dp=1, tp=4, pp=2, zero=0, recompute="full", microbatch_size=8))
    needless = ("as little model parallelism as memory allows", good[0].name)  # the small job would need no tp
    assert all(rule.agrees for rule in good if rule.name not in needless)
    broken = {rule.name for rule in bad if not rule.agrees}
    assert {"sequence parallel wherever there is tp", "recompute no more than memory needs"} <= broken
    assert "four microbatches a stage, or stages interleaved" in broken


@pytest.mark.parametrize(
    ("model", "words", "agrees", "differs"),
    [
        ("gpt2-xl", "fit a device of 80.0 GiB: replicas", "plan.dp=16", "plan.pp=2"),
        ("llama2-7b", "fit 8 devices of 80.0 GiB, a node", "plan.tp=8", "plan.pp=2"),
        ("llama2-70b", "are more than 8 devices of 80.0 GiB, a node", "plan.pp=2", "plan.dp=16"),
    ],
)
def test_the_first_place_that_holds_the_state_names_the_plan(model: str, words: str, agrees: str, differs: str) -> None:
    """18 bytes a parameter: 26 GiB, 113 GiB and 1,156 GiB, beside 80 and 640."""
    for choice, verdict in ((agrees, True), (differs, False)):
        job = load(model, choice, "plan.zero=1", "plan.reduce_each=auto", devices=16, device="h100-sxm").spec
        rule = first_place_of_state(job)
        assert rule is not None and words in rule.says and rule.agrees is verdict
    assert first_place_of_state(load("quickstart").spec) is None  # its device is unknown


def test_objectives() -> None:
    """Fewer devices are cheaper; a deadline takes as many as it needs, of one node too; room costs at most 5 %."""
    job = job_with(dp=8)
    cheap, result = best(job, QUICK, shipped(), Objective("cost"), 1)
    fast = best(job, QUICK, shipped(), Objective(), 1)[1].candidates[0]
    assert cheap.cluster.num_devices * result.candidates[0].token_s <= job.cluster.num_devices * fast.token_s
    assert best(job, QUICK, shipped(), Objective("energy"), 1)[0] == cheap  # of one kind, with one price and one power

    def days_on(devices: int) -> float:
        sized = on_devices(job, devices)
        return 1e9 * best(sized, QUICK, shipped(), Objective(), 1)[1].candidates[0].token_s / 86400

    per_node, days = job.cluster.devices_per_node, days_on(job.cluster.devices_per_node)
    for devices, most in ((per_node, 1.01 * days), (1, 1.01 * days_on(1)), (2, 0.9 * days_on(1))):
        sized = best(job, QUICK, shipped(), Objective("devices", 1e9, most), 1)[0]
        assert sized.cluster.num_devices == devices and sized.cluster.nodes == 1
    assert best(job, QUICK, shipped(), Objective("devices", 1e9, 0.9 * days), 1)[0].cluster.nodes == 2
    with pytest.raises(PlanError, match="days for 1e"):
        plans_of(job, QUICK, shipped(), Objective("devices", 1e9, days / 100))
    roomy = best(job, QUICK, shipped(), Objective("memory"), 1)[1].candidates[0]
    needed = [peak_memory(run_of(result.job), shipped()).process for result in (roomy, fast)]
    assert needed[0] <= needed[1] and roomy.token_s <= 1.05 * fast.token_s
    assert cluster_sizes(ClusterSpec(nodes=10, devices_per_node=8)) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 80]
    assert cluster_sizes(ClusterSpec(nodes=1, devices_per_node=6)) == [1, 2, 6]


def test_goodput_takes_fewer_nodes_where_failures_eat_the_gain() -> None:
    """The days of a run have failures in them. Where a device fails often and a checkpoint takes long, more nodes may
    train less."""

    def job_that_fails(hours: float, gb_per_s: float) -> JobSpec:
        job = job_with(dp=8)
        facts = {"hours_between_failures": hours, "checkpoint_gb_per_s": gb_per_s, "restart_s": 600.0}
        return job.model_copy(update={"cluster": job.cluster.model_copy(update=facts)})

    steady, shaky = job_that_fails(1e6, 100.0), job_that_fails(0.2, 100.0)
    fewest = {
        name: best(job, QUICK, shipped(), Objective("goodput"), 1)[0].cluster.nodes
        for name, job in (("steady", steady), ("shaky", shaky))
    }
    assert fewest["steady"] == steady.cluster.nodes > fewest["shaky"]
    advice = plans_of(steady, QUICK, shipped(), Objective("goodput", 1e9), num_shown=1)
    (result,), goodput = plan_dicts(advice)[:1], job_goodput(advice.job)
    assert goodput is not None and result["run"]["training_share"] == goodput.training < 1
    seconds = 1e9 * advice.plans[0].token_s / float(goodput.training)
    assert result["run"]["days"] == pytest.approx(seconds / 86400)
    with pytest.raises(PlanError, match=r"cluster\.checkpoint_gb_per_s is 0"):
        plans_of(job_with(dp=8), QUICK, shipped(), Objective("goodput"))


def test_where_a_plan_stands() -> None:
    """None of a sample is faster than the best; about half is faster than the median."""
    job = job_with(dp=8)
    token_s = best(job, QUICK, shipped(), Objective(), 1)[1].candidates[0].token_s
    assert standing(job, token_s, QUICK, shipped(), Memo()).share_faster == 0.0
    assert standing(job, 1e9, QUICK, shipped(), Memo()).share_faster == 1.0


def test_the_command_prints_a_list_and_writes_a_job(tmp_path: Path) -> None:
    """JSON with the recommended plan first, and a TOML that loads with the recommended plan in it."""
    source, target = tmp_path / "job.toml", tmp_path / "best.toml"
    write_toml(source, job_with(2, dp=8))
    options = [
        "--json",
        "--top",
        "3",
        "--toml",
        str(target),
        "--keep",
        "plan.cp=1",
        "--keep",
        "plan.recompute=none",
        "--keep",
        "plan.schedule=1f1b",
    ]
    done = CliRunner().invoke(cli, ["plan", str(source), *options], catch_exceptions=False)
    assert done.exit_code == 0
    plans = json.loads(done.stdout)
    keys = {"plan", "step_s", "tokens_per_s_per_device", "mfu", "hfu", "cost_per_step", "memory", "time", "fits"}
    assert 3 <= len(plans) <= 4 and all(keys <= set(plan) for plan in plans)
    assert [plan["step_s"] for plan in plans] == sorted(plan["step_s"] for plan in plans)
    assert [plan["fastest"] for plan in plans] == [number == 0 for number in range(len(plans))]
    (chosen,) = [plan["plan"] for plan in plans if plan["recommended"]]
    assert load_job(str(target)).plan.model_dump() == chosen
    text = CliRunner().invoke(cli, ["plan", str(source), *options[5:], "--details"], catch_exceptions=False).stdout
    for heading in (
        "The best plan",
        "What binds",
        "Why not another",
        "Rules of thumb",
        "It does not fit",
        "pessimistic",
    ):
        assert heading in text


def test_plans_are_ordered_by_their_simulated_time() -> None:
    """All of them; what closed forms say is kept beside."""
    plans = best_plans(job_with(dp=8), QUICK, shipped(), Objective(), 4).plans
    assert len(plans) == 4
    assert [plan.time.total for plan in plans] == sorted(plan.time.total for plan in plans)
    for plan in plans:
        assert plan.closed == step_time(run_of(plan.job), shipped())
        assert plan.time == simulated_step(plan.job, shipped())
    assert any(plan.time.total != plan.closed.total for plan in plans)


def test_a_plan_gets_uneven_stages_where_that_pays() -> None:
    """A head as large as several layers: the last stage holds fewer, and the plan says what that brings."""
    job = job_with(dp=8)
    wide = job.model_copy(update={"model": job.model.model_copy(update={"vocab": 256_000, "layers": 10})})
    constraints = constraints_of(
        ["plan.pp=2", "plan.cp=1", "plan.schedule=1f1b", "plan.recompute=none", "plan.zero=1", "plan.tp=1"], []
    )
    best, *_ = best_plans(wide, constraints, shipped(), Objective(), 1).plans
    layout = best.job.plan.layout
    assert sum(layout) == 10 and layout[0] > layout[1] and best.fits
    assert best.even_s is not None
    even = best.job.model_copy(update={"plan": best.job.plan.model_copy(update={"layout": []})})
    assert best.even_s == pytest.approx(simulated_step(even, shipped()).total) and best.even_s > 1.01 * best.time.total
    gain = best.even_s / best.time.total - 1
    laid = paying_layout(even, shipped(), gain, room=room_bytes(even))
    assert laid is not None and laid.plan == best.job.plan
    assert paying_layout(even, shipped(), 10 * gain, room=room_bytes(even)) is None
    small = best_plans(job, QUICK, shipped(), Objective(), 2).plans
    assert all(plan.even_s is None and not plan.job.plan.layout for plan in small)


def test_a_plan_says_in_which_numbers_it_computes() -> None:
    """A search may leave fp8 out, and then plans of both kinds stand side by side."""
    job = small_job("dense", 1)
    cluster = job.cluster.model_copy(update={"device": "h100-sxm"})
    fp8 = job.model_copy(update={"precision": job.precision.with_float8("blockwise"), "cluster": cluster})
    assert job_words(fp8) == f"{job_words(job)}, fp8 blockwise"
    plan = priced([fp8], shipped())[0]
    assert plan_dict(plan, Objective())["float8"] == "blockwise"
    assert "fp8 blockwise" in "\n".join(plan_row for row in _rows([plan], Objective()) for plan_row in row)
