"""Groups cross the links that they cross: switches above the nodes, rails, the rings of a torus."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.model_shape import ModelShape
from shardwright.config.network_facts import NETWORKS
from shardwright.cost.calibration import rates_of, shipped
from shardwright.cost.collective_time import all_to_all_s, ring_pass_s, ring_s
from shardwright.cost.from_job import run_of
from shardwright.cost.group_links import Groups
from shardwright.cost.topology import Group, group_of, reach_of_ranks
from shardwright.layers.query import PlanGrid, Run, Topology
from shardwright.sharding.groups import PP, SHARDS, AxisGroups, layout
from shardwright.simulate.closed_form import step_time

CONSTANTS = shipped()
LLAMA = ModelShape(16, 4096, 32, 8, 128, 14336, True, 128256, 4096)
RUN = Run(
    LLAMA,
    PlanGrid(dp=8, global_batch=64),
    device="h100-sxm",
    software="megatron-core",
    devices_per_node=8,
    node_bytes_per_s=450e9,
    network_bytes_per_s=50e9,
)
RATES = rates_of(RUN, CONSTANTS)
BIG = 1e13  # bytes, so that latency is nothing

POWERS = st.sampled_from([1, 2, 4, 8, 16, 64])
CUTS = st.builds(
    PlanGrid, dp=POWERS, tp=st.sampled_from([1, 2, 8]), pp=st.sampled_from([1, 2, 4]), cp=st.sampled_from([1, 2]),
    zero=st.sampled_from([0, 1, 3]), global_batch=st.just(128),
)  # fmt: skip
COLLECTIVES = (ring_s, all_to_all_s, ring_pass_s)


def seconds(run: Run) -> float:
    return step_time(run, CONSTANTS).total


@settings(max_examples=40, deadline=None)
@given(CUTS, st.sampled_from([(32, 1.0), (64, 1.0)]))
def test_a_level_that_is_not_oversubscribed_is_a_flat_network(grid: PlanGrid, level: tuple[int, float]) -> None:
    run = replace(RUN, grid=grid)
    assert seconds(replace(run, topology=Topology((level,)))) == pytest.approx(seconds(run), rel=1e-12)


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(CUTS, st.sampled_from([0.1, 0.25, 0.5]))
def test_more_bandwidth_upward_is_never_slower(grid: PlanGrid, share: float) -> None:
    flat = replace(RUN, grid=grid)
    wide, narrow = (replace(flat, topology=Topology(((32, s),))) for s in (2 * share, share))
    assert seconds(flat) <= seconds(wide) <= seconds(narrow)
    if grid.world <= 32:  # nothing passes that switch
        assert seconds(flat) == seconds(narrow)


@given(POWERS, POWERS)
def test_a_ring_leaves_a_switch_once(size: int, stride: int) -> None:
    """Groups of one kind fill a switch: each has its part of the links upward for what passes a rank once."""
    group = group_of(size, stride, reach_of_ranks(8, Topology(((32, 0.25),))))
    expected = BIG * (size - 1) / size
    passed = [expected / RATES.link_bytes_per_s] if group.inside > 1 else []
    if size * stride > 8 and size > 1:
        passed.append(expected / RATES.network_bytes_per_s / group.inside)
    if size * stride > 32 and size > 1:
        passed.append(expected / RATES.network_bytes_per_s / (max(1, 32 // stride) * 0.25))
    assert ring_s(RATES, group, BIG) == pytest.approx(max(passed, default=0.0), rel=1e-3)


@given(POWERS, POWERS, st.sampled_from([Topology(), Topology(((32, 0.5),)), Topology(torus=(4, 4, 4))]))
def test_one_rank_communicates_nothing(stride: int, domain: int, topology: Topology) -> None:
    group = group_of(1, stride, reach_of_ranks(domain, topology))
    assert [float(collective(RATES, group, 1e9)) for collective in COLLECTIVES] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("size", "stride", "links"),
    [(4, 1, 2), (4, 4, 2), (4, 16, 2), (16, 1, 4), (16, 4, 4), (64, 1, 6), (2, 1, 1), (2, 4, 1), (8, 1, 3)],
)
def test_a_group_on_a_torus_gets_its_rings(size: int, stride: int, links: int) -> None:
    """A full axis of 4 is a ring, both ways; a part of one is a line; several axes carry a part each."""
    group = group_of(size, stride, reach_of_ranks(64, Topology(torus=(4, 4, 4))))
    one = RATES.link_bytes_per_s / 6
    assert ring_s(RATES, group, BIG) == pytest.approx(BIG * (size - 1) / size / (links * one), rel=1e-3)


def test_an_all_to_all_on_a_torus_is_bound_by_its_bisection() -> None:
    """On a ring of n, half of what n / 2 ranks send crosses 2 links each way: size n / 8 a link."""
    group = group_of(16, 1, reach_of_ranks(256, Topology(torus=(16, 16))))
    assert all_to_all_s(RATES, group, BIG) == pytest.approx(BIG * 16 / 8 / (RATES.link_bytes_per_s / 4), rel=1e-3)


def test_pods_of_a_torus_are_joined_by_a_network() -> None:
    group = group_of(128, 1, reach_of_ranks(64, Topology(torus=(4, 4, 4))))
    assert (int(group.domains), int(group.inside)) == (2, 64)
    assert ring_s(RATES, group, BIG) > ring_s(RATES, Group(64, 64, lanes=group.lanes), BIG)


def job(**cluster: Any) -> JobSpec:
    base = {"device": "h100-sxm", "devices_per_node": 8, "nodes": 8}
    sections = {"cluster": base | cluster, "plan": {"dp": 64}, "batch": {"global_batch_size": 64}}
    return make_job(sections | {"precision": {"compute": "bf16"}})


@pytest.mark.parametrize(
    ("gbit_per_s", "ports", "reached"),
    [(10, 1, 0.8 * 1.25), (25, 1, 0.8 * 3.125), (100, 1, 5.1), (200, 1, 2 * 5.1), (100, 4, 4 * 5.1), (100, 8, 8 * 5.1)],
)
def test_sockets_carry_less_than_a_fast_port(gbit_per_s: float, ports: int, reached: float) -> None:
    """GB/s of a node of 8 over TCP: a share of slow ports, and of each 100 Gbit/s what a few threads copy."""
    links = {"inter_node": {"bandwidth_gb_per_s": gbit_per_s / 8}, "topology": {"rails": ports}}
    by_kind = {
        kind: 8e-9 * rates_of(run_of(job(**links, network={"kind": kind})), CONSTANTS).network_bytes_per_s
        for kind in ("tcp", "infiniband")
    }
    assert by_kind["tcp"] == pytest.approx(reached)
    assert by_kind["infiniband"] == pytest.approx(0.94 * ports * gbit_per_s / 8)


def test_a_job_says_what_joins_its_nodes() -> None:
    result = run_of(job(topology={"levels": [{"devices": 32, "share": 0.5}]}))
    assert result.topology == Topology(((32, 0.5),))
    links = {"inter_node": {"bandwidth_gb_per_s": 50.0, "latency_us": 7.0}}
    whole, half = (run_of(job(**links, topology={"rails": rails})) for rails in (0, 4))
    assert half.network_bytes_per_s == whole.network_bytes_per_s / 2
    assert rates_of(whole, CONSTANTS).network_latency_s == pytest.approx(7e-6)
    assert rates_of(RUN, CONSTANTS).network_latency_s == NETWORKS["unknown"].step_s
    over_efa = rates_of(run_of(job(network={"kind": "efa"})), CONSTANTS)
    assert over_efa.network_latency_s == NETWORKS["efa"].step_s
    assert over_efa.network_bytes_per_s == pytest.approx(50e9 * NETWORKS["efa"].share)
    torus = run_of(job(topology={"torus": [4, 4, 4]}))
    assert (torus.devices_per_node, torus.topology.torus) == (math.prod((4, 4, 4)), (4, 4, 4))


def test_what_does_not_fit_together_is_said() -> None:
    with pytest.raises(PlanError, match=r"levels\[0\].devices 12 is no multiple .*12 / 8 = 1.50"):
        job(topology={"levels": [{"devices": 12}]})
    with pytest.raises(PlanError, match=r"torus 3 x 3 = 9 devices does not divide the cluster's 64"):
        job(topology={"torus": [3, 3]})


def test_one_of_the_stages_below_a_switch_sends_upward() -> None:
    """16 stages of 1,024 ranks on pods of 3,072, seven times oversubscribed: three share what one of them needs."""
    topology = Topology(levels=((3072, 1 / 7),))
    group = group_of(16, 1024, reach_of_ranks(8, topology))
    assert group.oversubscription_slowdown == pytest.approx(1 + 5 / 15 * (7 / 3 - 1))
    assert group.narrowest == pytest.approx(3 / 7)
    assert group_of(3, 1024, reach_of_ranks(8, topology)).oversubscription_slowdown == 1  # all in one pod


@pytest.mark.parametrize(
    ("pp", "tp", "dp"), [(8, 2, 1), (8, 1, 1), (4, 2, 1), (2, 4, 2), (4, 2, 4), (8, 8, 2), (2, 1, 4)]
)
def test_mirrored_replicas_cross_the_domains_between_the_ends(pp: int, tp: int, dp: int) -> None:
    """DualPipe reduces over the ranks at both positions of a stage, which lie p - 1 stages apart at the ends."""
    grid = PlanGrid(pp=pp, tp=tp, dp=dp, schedule="dualpipe", global_batch=64 * dp)
    mirrored = AxisGroups("dp", layout(grid, SHARDS[False]), world=grid.stage_ranks * pp, pipeline=layout(grid, PP))
    domains = max(len({rank // RUN.devices_per_node for rank in line}) for line in mirrored.lines())
    group = Groups(replace(RUN, grid=grid)).shard
    assert group.size == 2 * dp == mirrored.size
    assert group.domains == domains
