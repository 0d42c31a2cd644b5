"""An order laid out in rounds: the ends of its steps are those of the whole simulation, action by action."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.schedule_facts import SCHEDULES
from shardwright.schedule.action import ADDS, Kind, parse
from shardwright.schedule.lowering.lower import with_step
from shardwright.schedule.lowering.zero3_gathers import reduce_often
from shardwright.schedule.pipeline_shape import PipelineShape
from shardwright.schedule.schedule import Schedule
from shardwright.schedule.shape_program import shape_order, shape_program
from shardwright.schedule.timing import Costs, play
from shardwright.sharding.stage_placement import in_line
from shardwright.simulate.round_layout import rounds_of

NAMES = sorted(set(SCHEDULES) - {"auto", "pipedream", "pipedream-2bw"})
SECONDS = st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0])


def shape_of(draw: st.DrawFn, name: str) -> PipelineShape:
    if name.startswith("dualpipe"):
        return PipelineShape(draw(st.sampled_from([2, 4])), draw(st.sampled_from([8, 10])))
    virtual = draw(st.integers(2, 3)) if name in ("interleaved-1f1b", "looped-bfs") else 1
    extra_warmup = draw(st.integers(0, 3)) if name == "1f1b" else 0
    return PipelineShape(draw(st.integers(1, 6)), draw(st.integers(1, 14)), virtual, extra_warmup)


def costs(draw: st.DrawFn, num_stages: int, has_collectives: bool) -> Costs:
    def by_stage() -> tuple[float, ...]:
        return tuple(draw(st.lists(SECONDS, min_size=num_stages, max_size=num_stages)))

    return Costs(
        by_stage(), by_stage(), by_stage(), transfer=(draw(st.sampled_from([0.0, 0.2, 3.0])),) * (num_stages - 1),
        latency=draw(st.sampled_from([0.0, 0.3])), pair=draw(st.sampled_from([1.0, 0.8])),
        reduce=by_stage() if has_collectives else (), gather=by_stage() if has_collectives else (),
        step=draw(st.sampled_from([0.0, 0.5])),
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["none", "stage"]),
    st.booleans(),
    st.sampled_from(["step", "run", "microbatch"]),
    st.booleans(),
    st.data(),
)
def test_steps_end_when_the_whole_simulation_says(
    name: str, recompute: str, gathers: bool, reduces: str, has_collectives: bool, data: st.DataObject
) -> None:
    """Stages that differ, messages that are late or queue, collectives beside, with several costs at once."""
    shape = shape_of(data.draw, name)
    program, alone = (make(name, shape, recompute, gathers) for make in (shape_program, shape_order))
    if reduces != "step":
        program, alone = (reduce_often(of, reduces == "microbatch") for of in (program, alone))
    under = [costs(data.draw, program.num_stages, has_collectives) for _ in range(2)]
    rounds = rounds_of(alone, has_collectives)
    ends = rounds.ends(under, 3)
    for number, of in enumerate(under):
        for num_steps in (1, 3):
            assert ends[num_steps - 1, number] == pytest.approx(play(program, of, num_steps).makespan, rel=1e-12)
        work = [sum(of.compute(a) for a in row if a.computes()) + of.step for row in program.ranks]
        assert rounds.busy(under)[number] == pytest.approx(max(work), rel=1e-12)
        if has_collectives:
            seconds = {Kind.REDUCE: of.reduce, Kind.GATHER: of.gather}
            queues = [sum(seconds[a.kind][a.stage] for a in row if a.kind in seconds) for row in program.ranks]
            assert rounds.queued(under)[number] == pytest.approx(max(queues), rel=1e-12)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2", "gpipe"])
def test_a_rank_with_one_stage_reduces_it_once(name: str) -> None:
    """So what a job's order says of ZeRO-1 and of ZeRO-2 is one order there."""
    order = shape_order(name, PipelineShape(4, 6))
    assert reduce_often(order, by_microbatch=False).ranks == order.ranks


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "interleaved-1f1b"])
def test_gradients_are_reduced_with_each_microbatch(name: str) -> None:
    order = reduce_often(
        shape_order(name, PipelineShape(4, 8, 2 if name.startswith("inter") else 1)), by_microbatch=True
    )
    for row in order.ranks:
        kinds = [action.kind for action in row]
        assert kinds.count(Kind.REDUCE) == sum(kind in ADDS for kind in kinds)
        assert all(before in ADDS for before, kind in pairwise(kinds) if kind is Kind.REDUCE)


def test_an_order_that_stops_is_not_laid_out() -> None:
    row = tuple(map(parse, ("1F0", "1B0")))
    stuck = Schedule("stuck", 1, in_line(2), ((parse("0B0"), parse("0F0")), row))
    with pytest.raises(ValueError, match="stuck stops for ever"):
        rounds_of(with_step(stuck), has_collectives=False)
    going = replace(stuck, ranks=((parse("0F0"), parse("0B0")), row))
    assert rounds_of(with_step(going), has_collectives=False).ends([Costs.uniform(2)])[0, 0] == 2 * 1 + 2 * 2
