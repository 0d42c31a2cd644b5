"""Orders of the axes over the ranks: every one trains as one rank does, and moves what the default moves."""

from typing import Any

import pytest

from shardwright.config.checks.check import job_faults
from shardwright.config.job import JobSpec
from shardwright.config.rank_order import DEFAULT_ORDER
from shardwright.measure.verdict import Record, compare
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.sharding.groups import CP, DP, EP, PP, axis_groups
from shardwright.sharding.mesh import MeshShape
from shardwright.train.build import build
from shardwright.train.train_step import train_step
from support.cases import by_one_rank, my_tokens, record, record_after, small_job
from support.mesh_lines import mesh_array
from support.ranks import leaves_nothing, run_on_mesh
from support.rounding import check_rounding

STEPS = 2
Ledger = dict[str, dict[str, int]]
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "stages inside": ("llama", {"dp": 2, "pp": 2, "order": "pp-dp"}),
    "tied ends": ("gpt-tied", {"dp": 2, "pp": 4, "zero": 1, "order": "pp-dp"}),
    "zero 3": ("llama", {"dp": 2, "pp": 2, "tp": 2, "zero": 3, "order": "tp-pp-dp"}),
    "tp outside": ("llama", {"dp": 2, "tp": 2, "pp": 2, "sequence_parallel": True, "order": "dp-pp-tp"}),
    "hybrid": ("gpt", {"dp": 4, "pp": 2, "zero": 2, "zero_ranks": 2, "order": "pp-dp"}),
    "stages between replicas": ("llama", {"dp": 2, "cp": 2, "pp": 2, "zero": 1, "order": "cp-pp-dp"}),
    "dp inside cp": ("llama", {"dp": 2, "cp": 2, "zero": 3, "order": "dp-cp"}),
    "both copies": ("llama", {"dp": 2, "pp": 2, "schedule": "dualpipe", "zero": 2, "order": "pp-dp"}),
    "experts inside": ("mixtral", {"dp": 4, "pp": 2, "ep": 2, "zero": 1, "order": "ep-pp-dp"}),
    "experts across": ("mixtral", {"dp": 4, "pp": 2, "ep": 2, "order": "pp-ep-dp"}),
    "experts outside": ("mixtral", {"dp": 4, "ep": 2, "zero": 2, "order": "dp-ep"}),
    "whole experts": (
        "deepseek",
        {"dp": 2, "tp": 2, "pp": 2, "ep": 2, "expert_tp": 1, "sequence_parallel": True, "order": "tp-pp-ep-dp"},
    ),
}  # fmt: skip


@leaves_nothing
def trained(mesh: Mesh, job: JobSpec) -> tuple[Record, Ledger, dict[str, tuple[int, ...]]]:
    """The results of a rank in some steps, its traffic in the last of them, and its partners on each axis."""
    replica, steps = build(job, mesh), []
    for step in range(STEPS):
        mesh.ledger.clear()
        steps.append(train_step(replica, step, my_tokens(mesh, job, step)))
    table = mesh.ledger.table()
    lines = {axis: getattr(mesh, axis).ranks for axis in ("pp", "dp", "cp", "tp")}
    return record_after(steps, replica, mesh, job), table, lines


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PLANS)
def test_an_order_trains_as_one_rank_and_moves_what_the_default_moves(name: str) -> None:
    kind, fields = PLANS[name]
    job = small_job(kind, batch=8, **fields)
    plain = job.model_copy(update={"plan": job.plan.model_copy(update={"order": DEFAULT_ORDER})})
    assert job.plan.order != DEFAULT_ORDER
    own, others = run_on_mesh(job, trained, job), run_on_mesh(plain, trained, plain)
    check_rounding(compare([record for record, _, _ in own], by_one_rank(job, record, STEPS)), job)
    here, there, places = MeshShape.of(job.plan), MeshShape.of(plain.plan), mesh_array(job.plan)
    by_place = {tuple(sorted(there.coordinates(rank).items())): of for rank, of in enumerate(others)}
    assert any(
        axis_groups(job.plan, kind).lines() != axis_groups(plain.plan, kind).lines() for kind in (PP, CP, DP, EP)
    )
    routes = "moe" in job.model.model_dump(exclude_defaults=True)  # what experts are sent may hang on a last bit
    for rank, (_, table, lines) in enumerate(own):
        place = here.coordinates(rank)
        default = by_place[tuple(sorted(place.items()))][1]
        if not routes:
            assert table == default
        assert {key: of["count"] for key, of in table.items()} == {key: of["count"] for key, of in default.items()}
        at = [place[axis] for axis in ("pp", "dp", "cp", "tp")]
        for dim, axis in enumerate(("pp", "dp", "cp", "tp")):
            along = tuple(slice(None) if n == dim else index for n, index in enumerate(at))
            assert lines[axis] == tuple(places[along].tolist())


@leaves_nothing
def losses_and_bytes(mesh: Mesh, job: JobSpec) -> tuple[list[float], dict[str, int]]:
    """The losses of some steps, and bytes that a rank has sent inside its node and out of it."""
    replica = build(job, mesh)
    losses = [train_step(replica, step, my_tokens(mesh, job, step)).loss for step in range(STEPS)]
    return losses, mesh.ledger.by_link()


def on_nodes(order: str, per_node: int) -> JobSpec:
    """A job whose tokens go once to each node."""
    job = small_job("mixtral", batch=8, dp=4, ep=4, pp=2, order=order)
    cluster = job.cluster.model_copy(update={"devices_per_node": per_node, "nodes": job.plan.world // per_node})
    plan = job.plan.model_copy(update={"dispatch": "node-aware"})
    return job.model_copy(update={"cluster": cluster, "plan": plan})


def test_tokens_go_once_to_each_node_whatever_lies_between() -> None:
    """On nodes of four with two stages each, as on nodes of two with one: two ranks of four share a node."""
    apart, plain = on_nodes("pp-ep-dp", 4), on_nodes(DEFAULT_ORDER, 2)
    assert job_faults(apart) == []
    results, expected = run_on_mesh(apart, losses_and_bytes, apart), run_on_mesh(plain, losses_and_bytes, plain)
    here, there = MeshShape.of(apart.plan), MeshShape.of(plain.plan)
    for rank, (losses, links) in enumerate(results):
        same = next(
            r for r in range(plain.plan.world) if there.coordinates(r).items() == here.coordinates(rank).items()
        )
        alike, other_links = expected[same]
        assert losses == pytest.approx(alike, rel=1e-6)
        of_experts = {name: size for name, size in links.items() if name.startswith("ep ")}
        assert len(of_experts) == 2
        assert of_experts == {name: size for name, size in other_links.items() if name.startswith("ep ")}
