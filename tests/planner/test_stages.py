"""Uneven stages: against all cuts there are, and on clusters of mixed devices."""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.base import PlanError
from shardwright.config.load import make_job
from shardwright.planner.stages import partition_exchange
from shardwright.planner.stages.partition_dp import NoFitError, best_stages
from shardwright.planner.stages.partition_exchange import best_chunks
from shardwright.planner.stages.pieces import (
    Piece,
    PipelineSlot,
    Stages,
    may_be_empty,
    rank_seconds,
    stages_of,
)
from shardwright.sharding.stage_placement import StagePlacement, bidirectional, in_line, looped, vee

TIMES = st.sampled_from([0.5, 1.0, 1.25, 2.0, 3.0])


def piece(seconds: float, kept_bytes: float = 1.0, held_bytes: float = 2.0) -> Piece:
    return Piece(seconds / 3, 2 * seconds / 3, kept_bytes, held_bytes)


def all_cuts(seats: Sequence[PipelineSlot], placement: StagePlacement, num_microbatches: int) -> Iterator[Stages]:
    """Every cut that the spec allows and that fits."""
    num_layers, num_stages = len(seats[0].pieces) - 2, placement.num_stages
    least = [int(not may_be_empty(stage, num_stages)) for stage in range(num_stages)]
    spare = num_layers - sum(least)
    for ends in combinations_with_replacement(range(spare + 1), num_stages - 1):
        more = [end - start for start, end in pairwise((0, *ends, spare))]
        cut = stages_of([a + b for a, b in zip(least, more, strict=True)], seats, placement, num_microbatches)
        if all(b <= s.memory_bytes * (1 + 1e-12) for b, s in zip(cut.rank_bytes, seats, strict=True)):
            yield cut


@st.composite
def lines(draw: st.DrawFn) -> tuple[list[PipelineSlot], int]:
    """Seats on up to two kinds of devices, with layers that differ and memory that may be short."""
    num_layers, num_stages = draw(st.integers(2, 8)), draw(st.integers(1, 4))
    of_kind = [
        tuple(piece(slower * t, kept, held) for t, kept, held in draw(
            st.lists(st.tuples(TIMES, st.sampled_from([0.5, 1.0]), st.sampled_from([1.0, 2.0])),
                     min_size=num_layers + 2, max_size=num_layers + 2)))
        for slower in (1, draw(st.sampled_from([1, 3, 8])))
    ]  # fmt: skip
    room = draw(st.sampled_from([math.inf, 30.0, 15.0, 10.0]))
    kinds = draw(st.lists(st.integers(0, 1), min_size=num_stages, max_size=num_stages))
    seats = [PipelineSlot(of_kind[kind], room, num_stages - rank) for rank, kind in enumerate(kinds)]
    return seats, draw(st.sampled_from([1, 2, 3, 20]))


@pytest.mark.long
@settings(max_examples=250, deadline=None)
@given(lines())
def test_a_line_is_cut_as_the_best_of_all_cuts(line: tuple[list[PipelineSlot], int]) -> None:
    seats, m = line
    num_layers = len(seats[0].pieces) - 2
    if num_layers < len(seats) - 2:
        with pytest.raises(ValueError, match="at most"):
            best_stages(seats, m)
        return
    best = min((cut.pipeline_s for cut in all_cuts(seats, in_line(len(seats)), m)), default=None)
    if best is None:
        with pytest.raises(NoFitError):
            best_stages(seats, m)
    else:
        results = best_stages(seats, m)
        assert results.pipeline_s == pytest.approx(best, rel=1e-6)
        assert all(b <= s.memory_bytes * (1 + 1e-9) for b, s in zip(results.rank_bytes, seats, strict=True))


PLACEMENTS = st.sampled_from([looped(2, 2), looped(3, 2), looped(2, 3), vee(2), vee(3), bidirectional(4, 8)])


@settings(max_examples=60, deadline=None)
@given(PLACEMENTS, st.integers(0, 4), TIMES, TIMES, TIMES, st.sampled_from([math.inf, 40.0, 16.0, 12.0]))
def test_several_stages_a_rank_are_cut_as_the_best_of_all_cuts(
    placement: StagePlacement, more: int, layer: float, embedding: float, head: float, room: float
) -> None:
    pieces = (piece(embedding), *[piece(layer)] * (placement.num_stages + more - 1), piece(head))
    seats = [PipelineSlot(pieces, room, placement.num_ranks - rank) for rank in range(placement.num_ranks)]
    best = min((cut.pipeline_s for cut in all_cuts(seats, placement, 16)), default=None)
    if best is None:
        with pytest.raises(NoFitError):
            best_chunks(seats, placement, 16)
    else:
        assert best_chunks(seats, placement, 16).pipeline_s == pytest.approx(best)


def test_where_layers_differ_nearly_all_cuts_of_several_stages_a_rank_are_the_best() -> None:
    """No proof there: what may be missed is held down, over layers of which the first or every second is another."""
    ratios = []
    for placement, layer, head in product(
        [looped(2, 2), looped(3, 2), vee(3), bidirectional(4, 8)], [0.5, 2.0], [1, 3]
    ):
        for others in (range(1), range(3), range(0, 99, 2)):
            layers = [layer if n in others else 1.0 for n in range(placement.num_stages + 2)]
            seats = [PipelineSlot([piece(t) for t in (0.1, *layers, head)])] * placement.num_ranks
            best = min(cut.pipeline_s for cut in all_cuts(seats, placement, 16))
            ratios.append(best_chunks(seats, placement, 16).pipeline_s / best)
    assert min(ratios) > 1 - 1e-9
    assert max(ratios) < 1.2
    assert sum(ratio < 1.0001 for ratio in ratios) >= 0.9 * len(ratios)


def test_126_layers_get_an_even_cut_with_fewer_beside_embedding_and_head() -> None:
    """Llama 3 405B on 16 stages: the paper took one layer from the first and the last (arXiv 2407.21783, 3.3.2)."""
    pieces = (piece(0.8), *[piece(1.0)] * 126, piece(1.2))
    result = best_stages([PipelineSlot(pieces, in_flight=16.0 - rank) for rank in range(16)], 64)
    assert result.layout == (7, *[8] * 14, 7)
    assert best_chunks([PipelineSlot(pieces)] * 16, looped(16, 4), 64).rank_s == pytest.approx(result.rank_s)


def test_slow_devices_get_fewer_layers_and_short_memory_moves_them() -> None:
    fast, slow = ((piece(0.1 * t), *[piece(t)] * 24, piece(t)) for t in (1.0, 2.5))
    seats = [PipelineSlot(kind, math.inf, 4.0 - rank) for rank, kind in enumerate((fast, fast, slow, slow))]
    free = best_stages(seats, 32)
    assert min(free.layout[:2]) > max(free.layout[2:])
    assert free.imbalance < 0.2
    even = stages_of((6, 6, 6, 6), seats, in_line(4), 32)
    assert free.pipeline_s < 0.65 * even.pipeline_s
    # The first rank keeps four microbatches, so it is the first that runs out.
    tight = best_stages([PipelineSlot(s.pieces, 45.0, s.in_flight) for s in seats], 32)
    assert tight.layout[0] == 6 < free.layout[0]
    assert tight.pipeline_s > free.pipeline_s


def test_what_fits_nowhere_says_by_how_much() -> None:
    seats = [PipelineSlot([piece(1.0, 0.0, 2**31)] * 6, 2.0**30)] * 2
    with pytest.raises(NoFitError, match="4 layers into 2 stages") as raised:
        best_stages(seats, 4)
    assert raised.value.excess_bytes == 3 * 2**31 - 2**30


@pytest.mark.parametrize(("num_microbatches", "layout"), [(1, (12, 0)), (2, (12, 0)), (64, (11, 1))])
def test_few_microbatches_pass_a_slow_device_by(num_microbatches: int, layout: tuple[int, int]) -> None:
    seats = [PipelineSlot([piece(0.01), *[piece(seconds)] * 12, piece(0.01)]) for seconds in (1.0, 8.0)]
    assert best_stages(seats, num_microbatches).layout == layout


def test_every_fault_of_a_cluster_of_parts_is_told() -> None:
    parts = [{"device": "a100-sxm-80g", "devices_per_node": 8, "nodes": 2}, {"device": "v101", "devices_per_node": 4}]
    fields = {"cluster": {"device": "h100-sxm", "devices_per_node": 8, "parts": parts}, "plan": {"dp": 8, "pp": 2}}
    with pytest.raises(PlanError) as raised:
        make_job(fields)
    answer = "\n".join(raised.value.faults)
    assert "dp 8 x tp 1 x pp 2 = 16 ranks" in answer
    assert "2 nodes x 8 devices + 1 node x 4 devices = 20" in answer
    assert "cluster.device 'h100-sxm' is of all nodes" in answer
    assert "cluster.parts has 2 x 8 + 1 x 4 = 20" in answer
    assert "cluster.parts[1].device 'v101' is not in the catalog" in answer
    assert "cluster.parts[1] has 1 x 4 = 4 devices, and a stage takes dp 8 x tp 1 = 8" in answer
    assert len(raised.value.faults) == 5
    with pytest.raises(PlanError, match=r"cluster\.parts\.0\.devices_per_node is missing"):
        make_job({"cluster": {"parts": [{"device": "h100-sxm"}]}})


@pytest.mark.parametrize("placement", [in_line(6), looped(3, 2), vee(3), bidirectional(6, 2)])
def test_many_layouts_have_the_seconds_of_each(placement: StagePlacement) -> None:
    layout = (3, 2, 4, 1, 2, 0)
    moves = [(giver, taker) for giver, taker in product(range(6), range(6)) if giver != taker and layout[giver]]
    layouts = [[n - (stage == giver) + (stage == taker) for stage, n in enumerate(layout)] for giver, taker in moves]
    slot = PipelineSlot(tuple(piece(0.1 * (n % 4 + 1)) for n in range(14)))  # sums in another order differ
    seconds = rank_seconds(np.array(layouts), slot, placement)
    for row, moved in zip(seconds, layouts, strict=True):
        assert tuple(row.tolist()) == stages_of(moved, [slot] * placement.num_ranks, placement, 4).rank_s


@settings(max_examples=30, deadline=None)
@given(
    placement=st.sampled_from([looped(4, 2), looped(2, 5), vee(4), bidirectional(6, 2)]),
    layers=st.integers(12, 40),
    times=st.lists(TIMES, min_size=9, max_size=9),
    room=st.sampled_from([math.inf, 24.0, 18.0, 12.0]),
)
def test_exchanges_that_are_left_out_would_not_be_made(
    placement: StagePlacement, layers: int, times: list[float], room: float
) -> None:
    """Layers are alike; devices, their memory and the ends of the model are not."""
    layer_s, *ends_s = times[-3:]
    slots = [
        PipelineSlot(
            tuple(piece(slower * seconds) for seconds in (ends_s[0], *[layer_s] * layers, ends_s[1])),
            room + 4 * rank,
            placement.num_ranks - rank,
        )
        for rank, slower in enumerate(times[: placement.num_ranks])
    ]
    answers = list[Stages | str]()
    for many in (0, 10**9):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(partition_exchange, "_MANY", many)
            try:
                answers.append(best_chunks(slots, placement, 4))
            except NoFitError as error:
                answers.append(str(error))
    assert answers[0] == answers[1]
