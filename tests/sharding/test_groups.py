"""Who shares what: the one table, against lines that numpy cuts from the mesh, and that there is no second one."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import shardwright
from shardwright.config.plan import PlanSpec
from shardwright.config.rank_order import ORDERS, RankOrder, inside_pipeline, number_of, of_stage_on_node
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.layers.query import PlanGrid, stacked
from shardwright.sharding import groups, mesh
from shardwright.sharding.groups import (
    AxisGroups,
    GroupKind,
    axis_groups,
    ends,
    is_hybrid,
    layout,
    num_replicas,
    of_stage,
    zero_stage,
)
from shardwright.sharding.mesh import MeshShape
from shardwright.sharding.stage_placement import placement_of
from support.mesh_lines import by_first, expert_array, lines, mesh_array, stage_array

SOURCE = Path(shardwright.__file__).parent
PP, DP, CP, TP = range(4)  # dims of mesh_array; of expert_array they are pp, edp, ep, etp
KINDS: dict[str, GroupKind] = {
    "tp": groups.TP, "cp": groups.CP, "dp": groups.DP, "pp": groups.PP, "ep": groups.EP, "etp": groups.ETP,
    "world": groups.WORLD, "replicas": groups.REPLICAS[False], "expert replicas": groups.REPLICAS[True],
    "shards": groups.SHARDS[False], "expert shards": groups.SHARDS[True],
    "copies": groups.COPIES[False], "expert copies": groups.COPIES[True],
}  # fmt: skip


def divisors(number: int) -> st.SearchStrategy[int]:
    return st.sampled_from([d for d in range(1, number + 1) if number % d == 0])


@st.composite
def plans(draw: st.DrawFn, orders: tuple[RankOrder, ...] = ORDERS) -> PlanSpec:
    """Degrees with everything that changes who is with whom, as checks of a job admit it."""
    dp, cp, tp = (draw(st.integers(1, 4)) for _ in range(3))
    is_mirrored = draw(st.booleans())
    expert_tp = draw(st.sampled_from([0, 1]))
    zero = draw(st.integers(0, 3))
    plan = PlanSpec(
        dp=dp, cp=cp, tp=tp, pp=draw(st.sampled_from([2, 4] if is_mirrored else [1, 2, 3, 4])),
        schedule="dualpipe" if is_mirrored else "1f1b", zero=zero, expert_tp=expert_tp,
        zero_ranks=0 if is_mirrored else draw(st.just(0) | divisors(dp * cp)),
        ep=draw(divisors(dp * cp * (tp if expert_tp == 1 else 1))), order=str(draw(st.sampled_from(orders))),
    )  # fmt: skip
    inside = ORDERS[number_of(plan.order)].inside
    if inside is not None:
        sizes = inside_pipeline(plan, inside)
        assume(max(sizes) % min(sizes) == 0)
    return plan


def expected(plan: PlanSpec, kind: str) -> list[list[int]]:
    """The groups of a kind, from the words of the papers."""
    dense, experts = mesh_array(plan), expert_array(plan)
    simple = {
        "tp": (dense, TP), "cp": (dense, CP), "dp": (dense, DP), "pp": (dense, PP), "ep": (experts, CP),
        "etp": (experts, TP), "world": (dense, PP, DP, CP, TP), "replicas": (dense, DP, CP),
        "expert replicas": (experts, DP),
    }  # fmt: skip
    if kind in simple:
        return lines(*simple[kind])
    *experts_of, part = kind.split()
    replicas = lines(*simple["expert replicas" if experts_of else "replicas"])
    count = len(replicas[0])
    is_hybrid = plan.zero > 0 and 0 < plan.zero_ranks < count and count % plan.zero_ranks == 0
    sharing = plan.zero_ranks if is_hybrid else count
    if part == "copies":
        return by_first([line[place::sharing] for line in replicas for place in range(sharing)])
    shards = [line[begin : begin + sharing] for line in replicas for begin in range(0, count, sharing)]
    if plan.schedule == "dualpipe":
        at = {rank: (stage, place) for stage, row in enumerate(stage_array(plan)) for place, rank in enumerate(row)}
        mirror = {at[line[0]]: line for line in shards}
        shards = [
            line + mirror[plan.pp - 1 - stage, place] for (stage, place), line in mirror.items() if stage < plan.pp // 2
        ]
    return by_first(shards)


@settings(deadline=None)
@given(plans())
def test_lines_are_those_that_are_cut_from_the_mesh(plan: PlanSpec) -> None:
    for name, kind in KINDS.items():
        result = axis_groups(plan, kind)
        rows = result.lines()
        assert rows == expected(plan, name)
        assert sorted(rank for line in rows for rank in line) == list(range(plan.world))
        assert {len(line) for line in rows} == {result.size} and len(rows) == result.num_groups
        for line in rows:
            assert result.line(line[0]) == line
            assert result.nodes(line[0], 3) == [rank // 3 for rank in line]
        assert set(result.nodes(0, 0)) == {0}
        if result.size > 1 and not result.is_mirrored and plan.block == plan.stage_ranks:
            assert {line[1] - line[0] for line in rows} == {result.layout.stride}


@settings(deadline=None)
@given(plans(), st.data())
def test_a_line_is_split_at_the_borders_of_nodes(plan: PlanSpec, data: st.DataObject) -> None:
    """Neighbours on a line of experts, and those with one place among such neighbours, make up the line."""
    num = data.draw(divisors(plan.ep))
    inside, between = axis_groups(plan, groups.EP).split(num)
    whole = axis_groups(plan, groups.EP).lines()
    assert inside.lines() == by_first([line[i : i + num] for line in whole for i in range(0, plan.ep, num)])
    assert between.lines() == by_first([line[i::num] for line in whole for i in range(num)])


DEFAULT = (ORDERS[0],)


@given(plans(DEFAULT))
def test_the_default_is_one_line_of_numpy(plan: PlanSpec) -> None:
    """The layout in the words of mesh.py, which no order of axes may move."""
    ranks = np.arange(plan.world).reshape(plan.pp, plan.dp, plan.cp, plan.tp)
    folded = np.arange(plan.world).reshape(plan.pp, -1, plan.ep, plan.expert_tp or plan.tp)
    assert (ranks == mesh_array(plan)).all() and (folded == expert_array(plan)).all()
    along = {"tp": (TP,), "cp": (CP,), "dp": (DP,), "pp": (PP,), "world": (PP, DP, CP, TP), "replicas": (DP, CP)}
    for name, dims in along.items():
        assert axis_groups(plan, KINDS[name]).lines() == lines(ranks, *dims)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@settings(max_examples=15)
@given(data=st.data())
def test_ranks_follow_an_order_as_one_line_of_numpy(order: RankOrder, data: st.DataObject) -> None:
    """Without experts to fold: arange(world) in the shape of the axes, slowest first."""
    degrees = {axis: data.draw(st.integers(1, 3)) for axis in ("pp", "dp", "cp", "tp")}
    plan = PlanSpec(**degrees, order=str(order))
    axes = [axis for axis in reversed(order.axes) if axis != "ep"]
    ranks = np.arange(plan.world).reshape([degrees[axis] for axis in axes])
    shape = MeshShape.of(plan)
    for place in np.ndindex(ranks.shape):
        assert shape.coordinates(int(ranks[place])) == dict(zip(axes, place, strict=True))
    for axis in axes:
        assert axis_groups(plan, KINDS[axis]).lines() == lines(ranks, axes.index(axis))


@settings(deadline=None)
@given(plans())
def test_places_of_the_mesh_are_those_of_its_lines(plan: PlanSpec) -> None:
    shape, dense = MeshShape.of(plan), mesh_array(plan)
    for place in np.ndindex(dense.shape):
        assert [shape.coordinates(int(dense[place]))[axis] for axis in mesh.AXES] == [*place]


@settings(deadline=None)
@given(plans(), st.integers(1, 24))
def test_ranks_of_a_stage_among_neighbours_are_counted(plan: PlanSpec, num_ranks: int) -> None:
    """How many of the first ranks are of the first stage, where its ranks are not all neighbours."""
    if plan.block == plan.stage_ranks:
        assert of_stage(plan, num_ranks) == num_ranks
        return
    result = of_stage(plan, num_ranks)
    stages = (
        stage_array(plan)[0] + plan.world * np.arange(num_ranks // plan.world + 1)[:, None]
    )  # were there more ranks
    assert result == (stages < num_ranks).sum()
    mirrored = of_stage(plan, num_ranks, 2)
    assert mirrored == (2 * result if num_ranks >= plan.block * plan.pp else result)


@settings(deadline=None)
@given(plans(), st.data())
def test_nodes_that_cut_a_stage_evenly_have_neighbours_of_it(plan: PlanSpec, data: st.DataObject) -> None:
    per_node = data.draw(divisors(plan.world))
    count = of_stage_on_node(plan, per_node)
    if plan.block == plan.stage_ranks:
        assert count == per_node
        return
    nodes = [rank // per_node for rank in stage_array(plan)[0].tolist()]
    parts = [nodes[at : at + count] for at in range(0, len(nodes), count)] if count else []
    if count:
        assert all(len(part) == count and len(set(part)) == 1 for part in parts) and len(set(nodes)) == len(parts)


def grid_of(plan: PlanSpec) -> PlanGrid:
    numbers = {name: getattr(plan, name) for name in ("dp", "tp", "pp", "cp", "ep", "zero", "zero_ranks", "schedule")}
    return PlanGrid(**numbers, expert_tp=plan.expert_tp_size, order_number=number_of(plan.order))


@settings(deadline=None)
@given(st.lists(plans(), min_size=1, max_size=8))
def test_arrays_are_the_plans_one_by_one(each: list[PlanSpec]) -> None:
    cuts = [grid_of(plan) for plan in each]
    numbers = np.array([SCHEDULES.names.index(plan.schedule) for plan in each])
    together = replace(stacked(cuts), schedule_number=numbers)

    def said(plan: Any) -> list[Any]:
        layouts = [layout(plan, kind) for kind in KINDS.values()]
        holders = [num_replicas(plan, is_expert) for is_expert in (False, True)]
        reached = [of_stage(plan, 8), of_stage(plan, 8, plan.num_copies), of_stage_on_node(plan, 4)]
        numbers = [number for of in layouts for number in (of.size, of.stride, of.block, of.pitch)]
        return numbers + holders + reached

    columns = [np.broadcast_to(np.asarray(number), len(each)) for number in said(together)]
    for number, (plan, cut) in enumerate(zip(each, cuts, strict=True)):
        assert [column[number].item() for column in columns] == said(plan) == said(cut)
    assert all(np.issubdtype(column.dtype, np.integer) for column in columns)


NAMED: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"dp": 2}, {"dp": "dp", "replicas": "dp", "shards": "dp", "copies": "dp copies", "expert shards": "dp"}),
    ({"dp": 2, "tp": 2}, {"tp": "tp", "etp": "tp", "expert replicas": "dp", "expert copies": "dp copies"}),
    ({"dp": 2, "cp": 2}, {"dp": "dp", "cp": "cp", "replicas": "dp cp", "shards": "dp cp", "copies": "dp cp copies"}),
    ({"dp": 4, "zero": 1, "zero_ranks": 2}, {"replicas": "dp", "shards": "dp shards", "copies": "dp copies"}),
    ({"dp": 4, "zero": 1, "zero_ranks": 4}, {"replicas": "dp", "shards": "dp", "copies": "dp copies"}),
    ({"dp": 4, "ep": 2, "zero": 1, "zero_ranks": 2}, {"shards": "dp shards", "expert shards": "edp", "ep": "ep"}),
    (
        {"dp": 8, "ep": 2, "zero": 1, "zero_ranks": 2, "tp": 2},
        {"expert shards": "edp shards", "expert copies": "edp copies", "expert replicas": "edp", "etp": "tp"},
    ),
    ({"dp": 2, "tp": 2, "expert_tp": 1}, {"expert shards": "edp", "etp": "etp", "shards": "dp"}),
    ({"tp": 2, "ep": 2, "expert_tp": 1}, {"expert shards": "edp", "etp": "etp", "ep": "ep"}),
    ({"dp": 2, "pp": 2, "schedule": "dualpipe"}, {"shards": "dp", "replicas": "dp", "pp": "pp", "world": "world"}),
]


@pytest.mark.parametrize(("fields", "names"), NAMED)
def test_axes_have_the_names_of_the_ledger(fields: dict[str, Any], names: dict[str, str]) -> None:
    assert {kind: axis_groups(PlanSpec(**fields), KINDS[kind]).axis for kind in names} == names


@settings(deadline=None)
@given(plans())
def test_groups_of_one_name_are_one(plan: PlanSpec) -> None:
    """A rank makes one communicator for all; a mirrored line has the name of a line, and communicators of its own."""
    by_name: dict[tuple[str, bool], AxisGroups] = {}
    for kind in KINDS.values():
        result = axis_groups(plan, kind)
        alike = by_name.setdefault((result.axis, result.is_mirrored), result)
        assert result == alike and hash(result) == hash(alike)


def test_hybrid_sharding_cuts_replicas_evenly_or_not_at_all() -> None:
    assert [is_hybrid(zero_ranks, 4) for zero_ranks in range(6)] == [False, True, True, False, False, False]


def test_a_published_run_may_have_more_experts_apart_than_ranks() -> None:
    """Tables of runs leave out what they do not know; a row counts at least one rank for each expert."""
    assert layout(PlanGrid(dp=2, ep=4, zero=1), groups.SHARDS[True]).size == 1


@pytest.mark.parametrize("schedule", SCHEDULES.names)
def test_ends_are_where_the_first_and_the_last_stage_are(schedule: str) -> None:
    plan = PlanSpec.model_validate({"pp": 4, "dp": 3, "schedule": schedule, "virtual_stages": 2})
    placement = placement_of(schedule, plan.pp, plan.stages_per_rank)
    assert plan.num_copies == placement.num_copies
    result = ends(plan, placement)
    is_shared = schedule == "dualpipe" or placement.stages_of(0) == (0, plan.num_stages - 1)
    assert result.lines() == [[rank] if is_shared else [rank, rank + 9] for rank in range(3)]
    assert (result.size, result.num_groups, result.axis) == (1 if is_shared else 2, 3, "ends")


def test_what_zero_shards_among_nobody_is_whole() -> None:
    assert zero_stage(PlanSpec(zero=2)) == 0 and zero_stage(PlanSpec(zero=2, dp=2)) == 2
    assert zero_stage(PlanSpec(zero=2, pp=2, schedule="dualpipe")) == 2  # the two copies of a stage
    assert zero_stage(PlanSpec(zero=3, offload_parameters=True)) == 3
    assert [zero_stage(PlanSpec(zero=2, dp=2, ep=2), is_expert) for is_expert in (False, True)] == [2, 0]
    assert zero_stage(PlanSpec(zero=2, dp=4, zero_ranks=1)) == 0


TELLTALES = {
    "how far apart ranks lie": r"\.(?:dp|cp|tp)\s*\*\s*[\w.]*\.(?:dp|cp|tp)\b",
    "whether experts fold the ranks": r"expert_tp_size\s*!=|\bep\s*(?:==|>)\s*1\s+(?:and|or)\s[\w.]*expert_tp_size",
    "how many ranks share shards": r"%\s*[\w.(,\s]*zero_ranks\b|zero_ranks\s*<\s*[\w.]*replicas",
    "how often a stage is held": r"2 if [\w.]+ == .dualpipe",
}
ALLOWED = {
    "sharding/groups.py", "sharding/mesh.py",
    "config/rank_order.py",  # places in a stage, and where the pipeline comes in
    "config/plan.py",  # the number of ranks, and of those that share a stage
    "config/checks/check_zero.py",  # says which zero_ranks there may be, with the arithmetic
}  # fmt: skip


def test_there_is_no_second_table() -> None:
    """Strides, folding, hybrid sharding and the names that follow are said here alone; others ask."""
    results = set()
    for file in sorted(SOURCE.rglob("*.py")):
        where, text = str(file.relative_to(SOURCE)), file.read_text(encoding="utf-8")
        results |= {(where, what) for what, pattern in TELLTALES.items() if re.search(pattern, text)}
        if re.search(r"""["'](edp|dp cp| shards| copies)["']""", text):
            results.add((where, "the name of an axis"))
    assert {(where, what) for where, what in results if where not in ALLOWED} == set()
    assert {what for where, what in results if where.startswith("sharding/")} >= {"how far apart ranks lie"}


SECOND = [
    "stage = plan.dp * plan.cp * plan.tp", "stride = job.plan.cp * job.plan.tp",
    "is_folded = plan.ep > 1 or plan.expert_tp_size != plan.tp", "if 0 < plan.zero_ranks < plan.replicas:",
    "replicas % np.maximum(1, cut.zero_ranks) == 0", 'copies = 2 if plan.schedule == "dualpipe" else 1',
]  # fmt: skip


@pytest.mark.parametrize("line", SECOND)
def test_a_second_table_would_be_found(line: str) -> None:
    assert any(re.search(pattern, line) for pattern in TELLTALES.values())
