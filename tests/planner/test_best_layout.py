"""The best layout of a job: the pieces agree with the cost model, and what comes out is a legal plan."""

from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from shardwright.config.base import PlanError
from shardwright.config.checks.check import job_faults
from shardwright.config.job import JobSpec
from shardwright.config.load import load_job, make_job
from shardwright.config.plan import PlanSpec
from shardwright.cost.calibration import device_of, shipped
from shardwright.cost.from_job import run_of
from shardwright.memory.rank_estimate import rank_memory
from shardwright.planner.search.constraints import constraints_of
from shardwright.planner.search.search import search
from shardwright.planner.stages.best_layout import best_layout, most_gain
from shardwright.planner.stages.mixed_devices import best_mixed
from shardwright.planner.stages.piece_prices import pipeline_slots
from shardwright.planner.stages.pieces import stages_of
from shardwright.report.layout_text import layout_dict, layout_text
from shardwright.report.toml_files import write_toml
from shardwright.schedule.job_program import plan_faults
from shardwright.sharding.stage_placement import placement_of
from shardwright.simulate.closed_form import step_time
from shardwright.simulate.full_step import simulated_step
from support.languages import assert_same_in_chinese

pytestmark = pytest.mark.long

CONSTANTS = shipped()
LINKS = {"intra_node": {"bandwidth_gb_per_s": 300.0}, "inter_node": {"bandwidth_gb_per_s": 25.0}}
MODEL = {"name": "m", "layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "vocab": 128000, "sequence": 2048}
EXPERTS = {"experts": 8, "top_k": 2, "ffn": 2048, "first_dense": 3}


def job(nodes: int = 2, device: str = "a100-sxm-80g", batch: int = 64, **fields: Any) -> JobSpec:
    cluster = {"device": device, "nodes": nodes, "devices_per_node": 8, **LINKS}
    plan = {"tp": 4, "pp": 4, "sequence_parallel": True}
    return make_job({"model": MODEL, "cluster": cluster, "plan": plan, "batch": {"global_batch_size": batch}} | fields)


def mixed(*parts: tuple[str, int], **plan: Any) -> JobSpec:
    of = [{"device": device, "nodes": nodes, "devices_per_node": 8, **LINKS} for device, nodes in parts]
    pp = 2 * sum(nodes for _, nodes in parts)
    degrees = {"tp": 4, "pp": pp, "sequence_parallel": True, "recompute": "selective"} | plan
    return job(cluster={"parts": of}, plan=degrees, precision={"compute": "fp16"})


@pytest.mark.parametrize(
    "given",
    [
        job(),
        job(plan={"tp": 2, "pp": 4, "dp": 2, "zero": 1, "recompute": "full"}),
        job(plan={"tp": 2, "pp": 4, "dp": 2, "zero": 3}),
        job(plan={"tp": 2, "pp": 4, "dp": 2, "schedule": "interleaved-1f1b", "virtual_stages": 2}),
        job(plan={"tp": 4, "pp": 4, "schedule": "zb-v"}),
        job(plan={"tp": 4, "pp": 4, "schedule": "dualpipe", "recompute": "selective"}),
        job(plan={"pp": 4, "dp": 4, "ep": 4, "zero": 1}, model=MODEL | {"moe": EXPERTS}),
        # This one keeps something for each stage, too.
        job(cluster={"device": "a100-sxm-80g", "nodes": 2, "devices_per_node": 8, "software": "megatron-deepspeed"}),
    ],
    ids=["dense", "all again", "zero 3", "interleaved", "zb-v", "dualpipe", "experts", "kept by stage"],
)
def test_pieces_add_up_to_what_the_cost_model_says_of_the_whole(given: JobSpec) -> None:
    run, plan, m = run_of(given), given.plan, given.num_microbatches
    places = pipeline_slots(run, plan, CONSTANTS)
    grid = stages_of(
        plan.stage_layers(given.model.layers), places, placement_of(plan.schedule, plan.pp, plan.stages_per_rank), m
    )
    room = device_of(run.device).offered_bytes
    process = [taken + room - seat.memory_bytes for taken, seat in zip(grid.rank_bytes, places, strict=True)]
    # The ids of a microbatch that the embedding keeps are counted on every rank.
    assert process == pytest.approx([memory.process for memory in rank_memory(run, CONSTANTS)], rel=1e-5)
    time = step_time(run, CONSTANTS)
    pipeline_s = time.compute + time.again + time.tensor + time.context + time.expert + time.bubble
    if plan.zero < 3 and plan.schedule in ("1f1b", "interleaved-1f1b"):
        # The others wait less. Gathers of stage 3 are in the stages, and told with all else between replicas.
        assert grid.pipeline_s == pytest.approx(pipeline_s, rel=1e-6)
    result = best_layout(given, CONSTANTS)
    assert result.step_s == pytest.approx(simulated_step(result.job, CONSTANTS).total, rel=1e-9)
    assert result.even_step_s == pytest.approx(simulated_step(given, CONSTANTS).total, rel=1e-9)
    assert result.step_s <= result.even_step_s
    assert result.even is not None
    gain = max(result.even.rank_s) / max(result.stages.rank_s) - 1
    bound = most_gain(result.even, places, placement_of(plan.schedule, plan.pp, plan.stages_per_rank))
    assert gain <= bound * (1 + 1e-9) + 1e-9
    assert not job_faults(result.job) and not plan_faults(result.job)


def test_a_heavy_head_takes_layers_from_the_last_stage() -> None:
    given = job(model=MODEL | {"hidden": 2048, "heads": 16, "ffn": 5504, "vocab": 256000})
    result = best_layout(given, CONSTANTS)
    assert result.job.plan.layout[-1] < min(result.job.plan.layout[:-1])
    assert result.even is not None
    assert result.stages.pipeline_s < 0.95 * result.even.pipeline_s


def test_older_devices_get_fewer_layers_wherever_they_are_named() -> None:
    steps_s = set()
    for parts in ([("a100-sxm-80g", 2), ("v100-sxm-32g", 2)], [("v100-sxm-32g", 2), ("a100-sxm-80g", 2)]):
        given = mixed(*parts)
        results = best_layout(given, CONSTANTS)
        by_device = {"a100-sxm-80g": 0, "v100-sxm-32g": 0}
        for device, layers in zip(results.devices, results.job.plan.layout, strict=True):
            by_device[device] += layers
        assert 0 < by_device["v100-sxm-32g"] < by_device["a100-sxm-80g"] * 0.7
        assert results.even is not None and results.stages.pipeline_s < 0.8 * results.even.pipeline_s
        assert [part.device for part in results.job.cluster.parts] == [results.devices[0], results.devices[-1]]
        steps_s.add(results.step_s)
        assert not job_faults(results.job)
    assert len(steps_s) == 1


def test_a_layout_is_told_with_what_it_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    results = best_layout(mixed(("a100-sxm-80g", 1), ("v100-sxm-32g", 1)), CONSTANTS)
    text, answer = layout_text(results), layout_dict(results)
    assert f"plan.layout = {answer['layout']}" in text
    assert_same_in_chinese(lambda language: layout_text(results, language), monkeypatch, 50)
    assert "cluster.parts, and so of the nodes' ranks: v100-sxm-32g, then a100-sxm-80g." in text
    assert [line.split()[1:3] for line in text.splitlines() if line[:1].isdigit()] == [
        [device, str(layers)] for device, layers in zip(results.devices, answer["layout"], strict=True)
    ]
    assert f"would take {answer['even_step_s']:.3g} s" in " ".join(text.split())
    assert answer["even_step_s"] > answer["step_s"]
    with pytest.raises(PlanError, match=r"cluster\.device is unknown"):
        best_layout(make_job({}), CONSTANTS)


def test_a_cluster_of_two_equal_parts_is_one_cluster() -> None:
    whole = best_layout(job(nodes=2, precision={"compute": "fp16"}), CONSTANTS)
    parts = best_layout(mixed(("a100-sxm-80g", 1), ("a100-sxm-80g", 1), recompute="none"), CONSTANTS)
    assert parts.job.plan.layout == whole.job.plan.layout
    assert parts.stages.pipeline_s == pytest.approx(whole.stages.pipeline_s)
    assert parts.step_s == pytest.approx(whole.step_s, rel=1e-2)


def test_what_fits_under_no_layout_is_refused() -> None:
    with pytest.raises(PlanError, match="no cut of 32 layers into 4 stages fits"):
        best_layout(job(plan={"tp": 4, "pp": 4, "microbatch_size": 64}), CONSTANTS)


def test_the_best_plan_on_parts_is_among_the_best_of_all(tmp_path: Path) -> None:
    """Beside every plan of a small space laid out; and read back from the file that says it."""
    given = mixed(("a100-sxm-80g", 1), ("v100-sxm-32g", 1))
    batch = given.batch.model_copy(update={"global_batch_size": 32})
    given = given.model_copy(update={"batch": batch})
    kept = [
        "plan.recompute=selective",
        "plan.cp=1",
        "plan.zero=1",
        "plan.offload_optimizer=0",
        "plan.microbatch_size=1",
    ]
    constraints = constraints_of(kept, ["plan.pp=2,4"])
    result, steps = best_mixed(given, constraints, CONSTANTS), []
    for tp, pp, is_sequence in product((1, 2, 4, 8), (2, 4), (False, True)):
        if tp * pp > 16 or (is_sequence and tp == 1):
            continue
        fields: dict[str, Any] = {"dp": 16 // (tp * pp), "tp": tp, "pp": pp, "sequence_parallel": is_sequence}
        planned = given.model_copy(update={"plan": PlanSpec(zero=1, recompute="selective", **fields)})
        if not job_faults(planned) and not plan_faults(planned):
            with suppress(PlanError):
                steps.append(best_layout(planned, CONSTANTS).step_s)
    assert len(steps) > 6
    assert result.step_s <= min(steps) * (1 + 1e-9)  # the space recomputes other operators too
    write_toml(tmp_path / "job.toml", result.job)
    again = load_job(str(tmp_path / "job.toml"))
    assert (again.plan, again.cluster) == (result.job.plan, result.job.cluster)
    with pytest.raises(PlanError, match="layout JOB --search"):
        search(given, constraints, CONSTANTS)
