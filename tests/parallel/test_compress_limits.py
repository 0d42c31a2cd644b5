"""Compressed reductions: limits, numbers gone wrong, bytes as predicted, state, several buckets, and the plan."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from shardwright.config.base import PlanError
from shardwright.config.compression_facts import BucketCollective
from shardwright.config.plan import PlanSpec
from shardwright.parallel.comm.collectives import Axis
from shardwright.parallel.comm.ledger import Ledger
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.compress.compressor import Reduction, make_compressor
from shardwright.parallel.compress.powersgd import PowerSGD
from shardwright.parallel.compress.wire import Wire
from shardwright.sharding.compression import reduced_bucket, scattered_bucket, wire_bytes
from support.cases import small_job
from support.compressed import (
    BAD,
    NUM_STEPS,
    PLACES,
    PLANS,
    WORLDS,
    Outcome,
    bucket,
    gradient,
    job_over,
    large_gradients,
    large_part,
    num_elements,
    outcomes,
    places_of,
    reduce_steps,
)
from support.ranks import run_on_mesh


def at_full_rank(mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    """PowerSGD of all ranks there are, for which a plan would not choose it; and the state after it."""
    method = PowerSGD(48)
    tensor = torch.randn(64, 48, generator=torch.Generator().manual_seed(mesh.rank))
    for pending in method.sum_over([tensor], Wire(mesh.dp)):
        pending.wait()
    return tensor, method.state_tensors()[0]


@pytest.mark.parametrize("world", WORLDS)
def test_powersgd_at_full_rank_is_exact(world: int) -> None:
    exact = sum(torch.randn(64, 48, generator=torch.Generator().manual_seed(rank)) for rank in range(world))
    by_rank = run_on_mesh(job_over(world), at_full_rank)
    for result, _ in by_rank:
        torch.testing.assert_close(result, exact, rtol=1e-5, atol=1e-5)
    # Where one rank loses something because its matrix has other columns than the sum, the others make up for it.
    together = sum(lost for _, lost in by_rank)
    torch.testing.assert_close(together, torch.zeros_like(together), rtol=0, atol=1e-4)


@pytest.mark.parametrize("world", WORLDS)
def test_topk_of_all_elements_is_exact(world: int) -> None:
    plan = PlanSpec(compress="topk", compress_share=1.0)
    for outcome in run_on_mesh(job_over(world), reduce_steps, plan, False, [0, 1]):
        for step, result in enumerate(outcome.results):
            in_order = sum(large_gradients(world, step)[1:], large_gradients(world, step)[0])
            np.testing.assert_array_equal(large_part(result), in_order)
        assert not any(run.values.any() for run in outcome.errors)


def with_bad_numbers(mesh: Mesh) -> dict[tuple[str, str], tuple[bool, bool, bool]]:
    """(it arrives, the next step is sound, the state is sound), by method and bad number of the last rank."""
    return {(name, str(bad)): with_bad_number(mesh, name, bad) for name in PLANS for bad in BAD}


def with_bad_number(mesh: Mesh, name: str, bad: float) -> tuple[bool, bool, bool]:
    make = make_compressor(PLANS[name])
    assert make is not None
    compressor = make(PLACES)
    sound = []
    for step in range(3):
        flat, tensors = bucket(gradient(mesh.dp.index, step))
        if step == 1 and mesh.dp.index == mesh.dp.size - 1:
            tensors[1][5, 7] = bad
        compressor.start(flat, tensors, mesh.dp).wait()
        sound.append(bool(tensors[1].isfinite().all()))
    return not sound[1], sound[2], all(bool(x.isfinite().all()) for x in compressor.method.state_tensors())


def test_bad_numbers_arrive_and_do_not_stay() -> None:
    for by_case in run_on_mesh(job_over(2), with_bad_numbers):
        assert len(by_case) == len(PLANS) * len(BAD)
        assert {case: outcome for case, outcome in by_case.items() if outcome != (True, True, True)} == {}


def large_numbers(mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Two numbers that float16 holds and whose sum it does not; one that it does not hold; one that it does."""
    make = make_compressor(PlanSpec(compress="fp16", compress_least=1))
    assert make is not None
    gathered, scattered = (torch.tensor([40000.0, 70000.0, 3.0, 0.0]) for _ in range(2))
    make(places_of([(4,)])).start(gathered, [gathered], mesh.dp).wait()
    out = torch.empty(2)
    make(places_of([(4,)])).start_scatter(scattered, [scattered], mesh.dp, out).wait()
    return gathered, out


def test_float16_overflows_to_infinity() -> None:
    first, second = run_on_mesh(job_over(2), large_numbers)
    assert first[0].tolist() == second[0].tolist() == [math.inf, math.inf, 6.0, 0.0]
    # A share is summed in float32 and not rounded: only what one rank could not send is infinite.
    assert torch.cat([first[1], second[1]]).tolist() == [80000.0, math.inf, 6.0, 0.0]


@pytest.mark.parametrize("name", PLANS)
def test_one_replica_communicates_nothing(name: str) -> None:
    make = make_compressor(PLANS[name])
    assert make is not None
    compressor = make(PLACES)
    ledger = Ledger(torch.device("cpu"))
    alone = Axis("dp", (0,), 0, None, ledger, None)
    flat, tensors = bucket(gradient(0, 0))
    before, out = flat.clone(), torch.empty_like(flat)
    compressor.start(flat, tensors, alone).wait()
    compressor.start_scatter(flat, tensors, alone, out).wait()
    assert torch.equal(flat, before) and torch.equal(out, before)
    assert ledger.table() == {} and compressor.bytes_saved == 0 and compressor.method.state_tensors() == []


def only_small(mesh: Mesh) -> dict[str, tuple[torch.Tensor, torch.Tensor, dict[str, dict[str, int]]]]:
    return {name: one_only_small(mesh, plan) for name, plan in PLANS.items()}


def one_only_small(mesh: Mesh, plan: PlanSpec) -> tuple[torch.Tensor, torch.Tensor, dict[str, dict[str, int]]]:
    mesh.ledger.clear()
    make = make_compressor(plan)
    assert make is not None
    whole, share = torch.arange(6.0), torch.empty(3)
    make(places_of([(2, 2), (2,)])).start(whole, [whole[:4].view(2, 2), whole[4:]], mesh.dp).wait()
    flat = torch.arange(6.0)
    make(places_of([(2, 2), (2,)])).start_scatter(flat, [flat[:4].view(2, 2), flat[4:]], mesh.dp, share).wait()
    return whole, share, mesh.ledger.table()


def test_a_bucket_of_small_tensors_alone() -> None:
    for rank, by_method in enumerate(run_on_mesh(job_over(2), only_small)):
        assert by_method.keys() == PLANS.keys()
        for whole, share, table in by_method.values():
            assert whole.tolist() == [0, 2, 4, 6, 8, 10]
            assert share.tolist() == whole.tolist()[3 * rank :][:3]
            assert table == {"all_reduce dp": {"count": 2, "bytes": 48}}


# --- bytes ---


def as_table(collectives: list[BucketCollective], times: int) -> dict[str, dict[str, int]]:
    """As the ledger shows them."""
    table: dict[str, dict[str, int]] = {}
    for collective in collectives:
        row = table.setdefault(f"{collective.kind} dp", {"count": 0, "bytes": 0})
        row["count"] += times
        row["bytes"] += times * collective.num_bytes
    return table


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_bytes_are_those_predicted(name: str, scatter: bool, world: int) -> None:
    plan = PLANS[name]
    if scatter:
        predicted = scattered_bucket(plan, PLACES, world, num_elements())
        plain = wire_bytes(scattered_bucket(PlanSpec(), PLACES, world, num_elements()), world)
    else:
        predicted = reduced_bucket(plan, PLACES, world)
        plain = wire_bytes(reduced_bucket(PlanSpec(), places_of([(num_elements(),)]), world), world)
    for by_method in outcomes(world):
        outcome = by_method[name, scatter]
        assert outcome.table == as_table(predicted, NUM_STEPS)
        assert outcome.bytes_saved == NUM_STEPS * (plain - wire_bytes(predicted, world))


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (PlanSpec(), [("all_reduce", 4_000_400)]),
        (PlanSpec(compress="bf16"), [("all_reduce", 400), ("all_to_all", 2_000_000), ("all_gather", 2_000_000)]),
        # 977 blocks of 260 bytes for each of 4 ranks: 250,000 elements are 976.6 blocks.
        (PlanSpec(compress="int8"), [("all_reduce", 400), ("all_to_all", 1_016_080), ("all_gather", 1_016_080)]),
        (PlanSpec(compress="powersgd"), [("all_reduce", 400), ("all_reduce", 16_000), ("all_reduce", 16_000)]),
        (PlanSpec(compress="topk"), [("all_reduce", 400), ("all_gather", 4 * 10_000 * 8)]),
    ],
)
def test_bytes_by_hand(plan: PlanSpec, expected: list[tuple[str, int]]) -> None:
    """A matrix of 1000 x 1000 and a vector of 100 over four replicas."""
    results = reduced_bucket(plan, places_of([(1000, 1000), (100,)]), 4)
    assert [(collective.kind, collective.num_bytes) for collective in results] == expected


def test_bytes_on_the_wire() -> None:
    collectives = [
        BucketCollective("all_reduce", 100),
        BucketCollective("all_to_all", 10),
        BucketCollective("all_gather", 1),
    ]
    assert wire_bytes(collectives, 4) == 3 * (200 + 10 + 1)
    assert wire_bytes(reduced_bucket(PLANS["int8"], PLACES, 1), 1) == 0
    assert scattered_bucket(PLANS["int8"], PLACES, 1, num_elements()) == []
    with pytest.raises(ValueError, match=r"10 elements has no equal shares for 4 ranks \(10 / 4 = 2.50\); pad it"):
        scattered_bucket(PLANS["int8"], places_of([(10,)]), 4, 10)


# --- state ---


def in_two_parts(mesh: Mesh) -> dict[tuple[str, bool], tuple[Outcome, Outcome]]:
    parts = {}
    for name, plan in PLANS.items():
        for scatter in (False, True):
            first = reduce_steps(mesh, plan, scatter, [0, 1, 2])
            parts[name, scatter] = (first, reduce_steps(mesh, plan, scatter, [3, 4], first))
    return parts


@cache
def halves() -> list[dict[tuple[str, bool], tuple[Outcome, Outcome]]]:
    return run_on_mesh(job_over(2), in_two_parts)


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_a_saved_state_goes_on_bit_for_bit(name: str, scatter: bool) -> None:
    for rank, by_method in enumerate(halves()):
        first, second = by_method[name, scatter]
        without = outcomes(2)[rank][name, scatter]
        for a, b in zip(first.results + second.results, without.results, strict=True):
            assert torch.equal(a, b)
        assert len(second.memory) == len(without.memory)
        assert all(torch.equal(a, b) for a, b in zip(second.memory, without.memory, strict=True))


# --- several buckets, and the plan ---


def two_buckets(mesh: Mesh, end: Callable[[list[Reduction]], None]) -> list[torch.Tensor]:
    make = make_compressor(PLANS["int8"])
    assert make is not None
    flats, reductions = [], []
    for step in range(2):
        flat, tensors = bucket(gradient(mesh.dp.index, step))
        flats.append(flat)
        reductions.append(make(PLACES).start(flat, tensors, mesh.dp))
    assert not any(reduction.is_over() for reduction in reductions)
    end(reductions)
    assert all(reduction.is_over() for reduction in reductions)
    return flats


def one_by_one(reductions: list[Reduction]) -> None:
    for reduction in reductions:
        reduction.wait()


def side_by_side(reductions: list[Reduction]) -> None:
    for reduction in reductions:
        reduction.advance()
    one_by_one(reductions)


def test_buckets_side_by_side() -> None:
    apart, together = (run_on_mesh(job_over(2), two_buckets, end)[0] for end in (one_by_one, side_by_side))
    assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))
    assert torch.equal(apart[0], outcomes(2)[0]["int8", False].results[0])


def test_a_plan_without_compression_has_no_compressor() -> None:
    assert make_compressor(PlanSpec()) is None


@pytest.mark.parametrize(
    ("plan", "fault"),
    [
        (
            {"compress": "topk", "compress_rank": 8},
            "plan.compress_rank is 8, and plan.compress = 'topk' has no rank; leave it out, or use "
            'plan.compress = "powersgd"',
        ),
        (
            {"compress_share": 0.5},
            "plan.compress_share is 0.5, and plan.compress = 'none' has no share; leave it out, or use "
            'plan.compress = "topk"',
        ),
    ],
)
def test_fields_of_another_method(plan: dict[str, Any], fault: str) -> None:
    with pytest.raises(PlanError) as caught:
        small_job(**plan)
    assert caught.value.faults == [fault]


def test_every_method_can_be_planned() -> None:
    for name, plan in PLANS.items():
        fields = plan.model_dump(exclude_unset=True)
        assert small_job(dp=2, **fields).plan.compress == name
        assert small_job(dp=1, pp=2, schedule="pipedream-2bw", **fields).plan.compress == name
