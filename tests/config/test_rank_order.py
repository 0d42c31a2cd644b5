"""Orders of the axes: how they are told, which there are, and what is refused, with a way out."""

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.config.base import PlanError
from shardwright.config.checks.check import job_faults
from shardwright.config.job import JobSpec
from shardwright.config.load import load_job, make_job
from shardwright.config.plan import PlanSpec, ep_ranks_of_node
from shardwright.config.rank_order import AXES, DEFAULT_ORDER, ORDERS, STAGES_INSIDE, full_order, order_words

FULL = {
    "pp-dp": STAGES_INSIDE, "tp-pp-dp": STAGES_INSIDE, "ep-pp-dp": STAGES_INSIDE, "tp-cp-ep-pp-dp": STAGES_INSIDE,
    "pp": STAGES_INSIDE, "dp": DEFAULT_ORDER, "dp-pp": DEFAULT_ORDER, "tp-dp-pp": DEFAULT_ORDER,
    "tp-pp-ep-dp": "tp-cp-pp-ep-dp", "dp-tp": "cp-ep-dp-tp-pp", "pp-tp-dp": "pp-tp-cp-ep-dp",
}  # fmt: skip


@pytest.mark.parametrize(("short", "full"), FULL.items())
def test_axes_may_be_left_out(short: str, full: str) -> None:
    assert PlanSpec(order=short).order == full == full_order(full)


def refusal(text: str) -> str:
    """Why an order is refused; nothing where it is not."""
    try:
        full_order(text)
    except ValueError as error:
        return str(error)
    return ""


def test_there_are_all_orders_that_do_not_cut_a_stage() -> None:
    """Those with tp first or last among cp, ep and dp; a refusal names one."""
    why = {"-".join(axes): refusal("-".join(axes)) for axes in permutations(AXES)}
    assert {order for order, of in why.items() if not of} == set(map(str, ORDERS)) and len(ORDERS) == 60
    assert all("tp lies outside of" in of and full_order(of.split('"')[1]) for of in why.values() if of)
    assert str(ORDERS[0]) == DEFAULT_ORDER == PlanSpec().order


@given(st.text("tpcdexy-", max_size=20) | st.text(max_size=9))
def test_any_other_text_is_refused_in_one_sentence(text: str) -> None:
    why = refusal(text)
    assert (DEFAULT_ORDER in why or "tp lies outside of" in why) if why else full_order(text) in map(str, ORDERS)


def test_a_fault_names_the_field_and_a_way_out() -> None:
    with pytest.raises(PlanError, match=r'plan\.order = "tp-xp": it should be axes .* \'xp\' is none; such as "tp-cp'):
        load_job("quickstart", ['plan.order="tp-xp"'])


def test_an_order_in_words_names_axes_with_several_ranks() -> None:
    assert order_words(PlanSpec(dp=2, pp=2, order="pp-dp")) == "pp-dp"
    assert order_words(PlanSpec(dp=2, tp=2, cp=2)) == "tp-cp-dp"


def job_of(plan: dict[str, Any], **cluster: Any) -> JobSpec:
    world = PlanSpec(**plan).world
    model = {"layers": 6, "hidden": 48, "heads": 12, "kv_heads": 12, "ffn": 48, "vocab": 96, "sequence": 48}
    fields = {"model": model | {"moe": {"experts": 12, "ffn": 24}}, "plan": plan, "batch": {"global_batch_size": 48}}
    return make_job(fields | {"cluster": {"devices_per_node": 4, "nodes": world // 4} | cluster})


def test_experts_that_do_not_fit_a_block_are_refused() -> None:
    """With a way out that is one."""
    plan: dict[str, Any] = {"dp": 12, "cp": 2, "pp": 2, "ep": 3, "order": "tp-cp-ep-pp-dp"}
    with pytest.raises(PlanError, match="2 neighbouring ranks of a stage and 3 as experts fold them, and neither"):
        job_of(plan)
    assert job_faults(job_of(plan | {"order": "tp-cp-pp-ep-dp"})) == []
    assert job_faults(job_of(plan | {"pp": 1})) == []  # no stages, no blocks


def test_nodes_that_cut_blocks_unevenly_do_not_go_with_dispatch_by_node() -> None:
    plan: dict[str, Any] = {"dp": 4, "pp": 3, "ep": 4, "order": "pp-dp", "dispatch": "node-aware"}
    assert job_faults(job_of(plan)) == []  # all of an ep line are neighbours
    with pytest.raises(
        PlanError, match=r"plan.order tp-cp-pp-ep-dp 1 neighbouring.*nodes of 4 cut them unevenly; .*'direct'"
    ):
        job_of(plan | {"order": "pp-ep-dp"})
    assert [ep_ranks_of_node(PlanSpec(dp=8, pp=2, ep=8, order="pp-ep-dp"), node) for node in (0, 1, 2, 4, 8, 16)] == [
        0, 1, 1, 2, 4, 8,
    ]  # fmt: skip


def test_parts_of_a_cluster_hold_whole_stages() -> None:
    parts = [
        {"device": "h100-sxm", "devices_per_node": 4, "nodes": 1},
        {"device": "a100-sxm-80g", "devices_per_node": 4, "nodes": 1},
    ]
    fields = {"model": {"name": "llama3-8b"}, "cluster": {"parts": parts}, "batch": {"global_batch_size": 8}}
    assert make_job(fields | {"plan": {"dp": 4, "pp": 2}}).plan.order == DEFAULT_ORDER
    with pytest.raises(PlanError, match="1 of the 4 ranks of a stage behind each other"):
        make_job(fields | {"plan": {"dp": 4, "pp": 2, "order": "pp-dp"}})
