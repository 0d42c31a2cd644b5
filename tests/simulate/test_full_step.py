"""A job's step simulated in full: it agrees with the closed forms where these are exact, and its parts add up."""

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.schedule_facts import SCHEDULES, searched
from shardwright.cost.calibration import shipped
from shardwright.cost.from_job import run_of
from shardwright.layers.memo import Memo
from shardwright.schedule.action import Kind
from shardwright.schedule.job_program import job_program, plan_faults
from shardwright.simulate import full_step as played
from shardwright.simulate.closed_form import StepTime, step_time
from shardwright.simulate.full_step import (
    least_steps_s,
    simulated_step,
    simulated_steps,
)
from shardwright.simulate.stage_seconds import timed_actions

CONSTANTS = shipped()


def job(link: float = 50.0, vocab: int = 512, batch: int = 64, software: str = "megatron-core", **plan: Any) -> JobSpec:
    model = {
        "layers": 16, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "gated_mlp": True, "vocab": vocab,
        "sequence": 4096, "tied_embeddings": False,
    }  # fmt: skip
    cluster = {
        "device": "h100-sxm", "devices_per_node": 8, "nodes": 4, "software": software,
        "intra_node": {"bandwidth_gb_per_s": 450.0}, "inter_node": {"bandwidth_gb_per_s": link},
    }  # fmt: skip
    sections = {"model": model, "cluster": cluster, "plan": plan, "batch": {"global_batch_size": batch}}
    return make_job(sections | {"precision": {"compute": "bf16"}})


def parts(t: StepTime) -> float:
    result = t.compute + t.again + t.tensor + t.context + t.expert + t.data + t.messages + t.bubble
    return result + t.optimizer + t.host + t.other


PLANS = [
    {"schedule": "1f1b"}, {"schedule": "gpipe"}, {"schedule": "interleaved-1f1b", "virtual_stages": 2},
    {"schedule": "zb-h1"}, {"schedule": "zb-h2"}, {"schedule": "dualpipe"}, {"schedule": "dualpipev"},
]  # fmt: skip


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan["schedule"])
def test_equal_stages_wait_as_their_formula_says(plan: dict) -> None:
    of = job(dp=4, tp=2, pp=4, link=1e6, **plan)
    played, closed = simulated_step(of, CONSTANTS), step_time(run_of(of), CONSTANTS)
    assert played.bubble == pytest.approx(closed.bubble, rel=0.02, abs=0.01 * closed.total)
    assert played.compute == pytest.approx(closed.compute, rel=1e-12)


@pytest.mark.parametrize(
    "plan",
    [{"zero": 1}, {"zero": 2}, {"zero": 3}, {"recompute": "stage"}, {"layout": [2, 5, 5, 4]}, {"software": "nemo"},
     {"schedule": "v-min"}, {"batch": 8}],
    ids=str,
)  # fmt: skip
def test_parts_add_up_and_more_bandwidth_is_not_slower(plan: dict) -> None:
    plan = {"vocab": 128256, "dp": 4, "tp": 2, "pp": 4} | plan
    slow, fast = (simulated_step(job(link=link, **plan), CONSTANTS) for link in (10.0, 100.0))
    for t in (slow, fast):
        assert parts(t) == pytest.approx(t.total)
        assert t.low < t.total < t.high
        assert min(value for name, value in asdict(t).items() if name != "again") >= 0
    assert fast.total < slow.total


@pytest.mark.parametrize("plan", [{"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 0, "recompute": "full"}], ids=str)
def test_without_a_pipeline_a_drawn_reduction_is_what_outlasts_the_backward(plan: dict) -> None:
    spec = job(dp=32, link=10.0, batch=32, software="torchtitan", **plan)
    whole, drawn = simulated_step(spec, CONSTANTS), timed_actions(spec, CONSTANTS).costs
    assert 0 < sum(drawn.reduce) <= whole.data * (1 + 1e-9)
    actions_s = sum(sum(costs) for costs in (drawn.forward, drawn.input_grad, drawn.weight_grad, drawn.reduce))
    assert actions_s < whole.total


def test_a_stage_that_runs_again_before_its_gradient_comes_waits_less() -> None:
    of = job(dp=4, tp=2, pp=4, recompute="stage")
    assert simulated_step(of, CONSTANTS).bubble < 0.8 * step_time(run_of(of), CONSTANTS).bubble


def test_without_a_pipeline_nothing_is_played() -> None:
    of = job(dp=16, tp=2)
    assert simulated_step(of, CONSTANTS) == step_time(run_of(of), CONSTANTS)


def test_plans_played_at_once_are_played_as_each_alone() -> None:
    """Also where only some share an order of work."""
    plans = [
        *PLANS,
        {"schedule": "zb-h1", "zero": 2},
        {"schedule": "1f1b", "zero": 3},
        {"schedule": "1f1b", "tp": 1, "pp": 8},
    ]
    of = [job(**({"dp": 4, "tp": 2, "pp": 4} | plan)) for plan in plans]
    closed = [step_time(run_of(each), CONSTANTS) for each in of]
    assert simulated_steps(of, closed, CONSTANTS, Memo()) == [simulated_step(each, CONSTANTS) for each in of]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan["schedule"])
def test_very_many_microbatches_cost_what_those_before_them_do(plan: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    of = job(dp=4, tp=2, pp=4, batch=256, vocab=128256, **plan)
    whole = simulated_step(of, CONSTANTS)
    monkeypatch.setattr(played, "_MOST", 1)
    orders = played.simulated_orders(of)
    assert [order.shape.num_microbatches for order in orders] == [16, 12]
    assert simulated_step(of, CONSTANTS).total == pytest.approx(whole.total, rel=2e-3)


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("schedule", ["dualpipe", "1f1b"])
@pytest.mark.parametrize("layout", [[], [0, 8, 8, 0], [1, 7, 7, 1]], ids=str)
def test_a_step_is_no_shorter_than_its_busiest_rank(zero: int, schedule: str, layout: list[int]) -> None:
    """Under ZeRO 3 closed forms may tell of a rank that gathers much and computes little, as one with nothing but the
    table and the head; a step then seemed to take half as long."""
    of = job(vocab=128256, software="shardwright", link=5.0, dp=8, pp=4, zero=zero, schedule=schedule, layout=layout)
    narrow = of.model.model_copy(update={"hidden": 1024, "heads": 8, "ffn": 3584})
    of = of.model_copy(update={"model": narrow})
    step, costs, program = simulated_step(of, CONSTANTS), timed_actions(of, CONSTANTS).costs, job_program(of)
    each = [sum(of) for of in zip(costs.forward, costs.input_grad, costs.weight_grad, strict=True)]
    forwards = [[part for a in row for part in a.computes() if part.kind is Kind.FORWARD] for row in program.ranks]
    busiest_s = max(sum(each[part.stage] for part in row) for row in forwards)
    assert step.compute + step.again + step.tensor == pytest.approx(busiest_s, rel=1e-9) and step.total > busiest_s


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    schedule=st.sampled_from(searched()),
    plan=st.fixed_dictionaries(
        {
            "zero": st.integers(0, 3),
            "recompute": st.sampled_from(["none", "full", "stage"]),
            "microbatch_size": st.sampled_from([1, 2]),
        }
    ),
    numbers=st.sampled_from([(2, 2), (4, 3), (8, 2)]),
    link=st.sampled_from([0.5, 5.0, 50.0]),
    vocab=st.sampled_from([512, 262144]),
    batch=st.sampled_from([64, 192]),
    software=st.sampled_from(["megatron-core", "shardwright"]),
)
@example(
    schedule="dualpipev",
    plan={"zero": 0, "recompute": "none", "microbatch_size": 1},
    numbers=(2, 2),
    link=50.0,
    vocab=512,
    batch=64,
    software="megatron-core",
)
def test_a_bound_of_a_step_is_below_it(
    schedule: str, plan: dict, numbers: tuple[int, int], link: float, vocab: int, batch: int, software: str
) -> None:
    """In any order of work, with slow and with fast links, heavy heads and uneven stages."""
    pp, virtual = numbers
    virtual = 1 if SCHEDULES[schedule].stages_per_rank else virtual
    try:
        of = job(
            link, vocab, batch, software, dp=32 // pp, pp=pp, schedule=schedule, virtual_stages=virtual, **plan
        )  # fmt: skip
    except PlanError:
        return
    if plan_faults(of):
        return
    memo = Memo()
    closed = step_time(run_of(of), CONSTANTS, memo)
    (least_s,) = least_steps_s([of], [closed], CONSTANTS, memo)
    (step,) = simulated_steps([of], [closed], CONSTANTS, memo)
    assert least_s <= step.total
    if schedule == "1f1b" and link == 50.0 and plan["zero"] == 0 and plan["recompute"] == "none":
        assert least_s > 0.9 * step.total
