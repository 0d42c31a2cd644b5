"""Steps that are continued from fewer microbatches end when the whole step ends, whatever the order and the costs."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.config.schedule_facts import SCHEDULES
from shardwright.schedule.job_program import Order
from shardwright.schedule.pipeline_shape import PipelineShape
from shardwright.schedule.timing import Costs
from shardwright.simulate.round_layout import rounds_of
from shardwright.simulate.steady_state import continued, with_fewer

NAMES = sorted(set(SCHEDULES) - {"auto", "pipedream", "pipedream-2bw"})
SECONDS = st.one_of(st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0]), st.floats(0.1, 2.0))


@st.composite
def orders(draw: st.DrawFn, name: str) -> Order:
    num_ranks = draw(st.sampled_from([2, 4] if SCHEDULES[name].num_copies > 1 else [2, 3, 4]))
    num_microbatches = num_ranks * draw(st.integers(24, 40)) + draw(st.sampled_from([0, 2]))
    virtual = draw(st.integers(2, 3)) if SCHEDULES[name].stages_per_rank == 0 else 1
    extra_warmup = draw(st.integers(0, 3)) if name == "1f1b" else 0
    shape = PipelineShape(num_ranks, num_microbatches, virtual, extra_warmup)
    recompute, reduces = draw(st.sampled_from(["none", "stage"])), draw(st.sampled_from(["step", "run", "microbatch"]))
    return Order(name, shape, recompute, gathers=draw(st.booleans()), reduces=reduces)


@st.composite
def costs(draw: st.DrawFn, num_stages: int, has_collectives: bool) -> Costs:
    def by_stage() -> tuple[float, ...]:
        return tuple(draw(st.lists(SECONDS, min_size=num_stages, max_size=num_stages)))

    return Costs(
        by_stage(), by_stage(), by_stage(), transfer=(draw(st.sampled_from([0.0, 0.2, 3.0])),) * (num_stages - 1),
        latency=draw(st.sampled_from([0.0, 0.3])), pair=draw(st.sampled_from([1.0, 0.8])),
        reduce=by_stage() if has_collectives else (), gather=by_stage() if has_collectives else (), step=0.5,
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(has_collectives=st.booleans(), data=st.data())
def test_a_continued_step_ends_when_the_whole_one_does(name: str, has_collectives: bool, data: st.DataObject) -> None:
    """Of costs whose window is steady; the rank that computes longest and its queue too."""
    order = data.draw(orders(name))
    fewer = with_fewer(order)
    if fewer is None:
        assert SCHEDULES[name].overlaps_steps or order.shape.num_microbatches < 12 * fewer_period(order)
        return
    left_out = fewer.num_periods * fewer.period * SCHEDULES[name].num_copies
    assert fewer.order.shape.num_microbatches + left_out == order.shape.num_microbatches
    whole, part = (rounds_of(each.without_messages(), has_collectives) for each in (order, fewer.order))
    under = [data.draw(costs(whole.num_stages, has_collectives)) for _ in range(2)]
    end_s, busy_s, is_steady = continued(part, under, fewer)
    assert np.where(is_steady, end_s, 0.0) == pytest.approx(np.where(is_steady, whole.ends(under)[0], 0.0), rel=1e-10)
    assert np.where(is_steady, busy_s, 0.0) == pytest.approx(np.where(is_steady, whole.busy(under), 0.0), rel=1e-10)
    queued_s = part.queued(under), whole.queued(under)
    assert np.where(is_steady, queued_s[0], 0.0) == pytest.approx(np.where(is_steady, queued_s[1], 0.0), rel=1e-10)


def fewer_period(order: Order) -> int:
    return order.shape.num_ranks * SCHEDULES[order.schedule].num_copies


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"gpipe", "looped-bfs", "zb-h2"}))
def test_even_stages_are_in_a_steady_state(name: str) -> None:
    """Without it every step would be played in full, and nobody would notice."""
    virtual = 2 if SCHEDULES[name].stages_per_rank == 0 else 1
    order = Order(name, PipelineShape(4, 192, virtual), "none", gathers=False, reduces="step")
    fewer = with_fewer(order)
    if SCHEDULES[name].overlaps_steps:
        assert fewer is None
        return
    assert fewer is not None
    rounds = rounds_of(fewer.order.without_messages(), False)
    each = (1.0,) * rounds.num_stages
    assert continued(rounds, [Costs(each, each, each)], fewer)[2].all()


def test_forwards_and_backwards_with_periods_apart_are_not_steady() -> None:
    """GPipe, whose backward takes as long as its forward: both have the same period, and a step takes both."""
    order = Order("gpipe", PipelineShape(2, 64), "none", gathers=False, reduces="step")
    fewer = with_fewer(order)
    assert fewer is not None
    rounds = rounds_of(fewer.order.without_messages(), False)
    same = Costs((1.0, 1.0), (0.5, 0.5), (0.5, 0.5))
    assert not continued(rounds, [same], fewer)[2].any()


def test_few_microbatches_are_played() -> None:
    order = Order("1f1b", PipelineShape(4, 44), "none", gathers=False, reduces="step")
    assert with_fewer(order) is None
    assert with_fewer(replace(order, shape=replace(order.shape, num_microbatches=48))) is not None
