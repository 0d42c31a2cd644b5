"""A slow rank makes all others wait, and waits least itself."""

import pytest

from shardwright.report.timeline.study import study_schedule
from shardwright.schedule.pipeline_shape import PipelineShape
from shardwright.simulate.bubbles import Work
from shardwright.simulate.slow_rank import SlowRank
from shardwright.simulate.timeline import Timeline


def played(name: str, slow: SlowRank | None, num_stages: int = 1) -> Timeline:
    shape = PipelineShape(4, 16, num_stages, num_steps=1, most_alive=0.0)
    return study_schedule(name, shape, Work(1.0, 1.0, 1.0), slow=slow).timeline


@pytest.mark.parametrize(("name", "num_stages"), [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("zb-v", 1)])
@pytest.mark.parametrize("rank", range(4))
def test_the_slow_rank_waits_least(name: str, num_stages: int, rank: int) -> None:
    equal, slowed = (played(name, slow, num_stages) for slow in (None, SlowRank(rank, 1.5)))
    assert slowed.program.ranks == equal.program.ranks  # the order stays
    assert [row.busy for row in slowed.ranks] == [72 if place == rank else 48 for place in range(4)]
    waits = [slowed.makespan - row.busy for row in slowed.ranks]
    assert min(range(4), key=waits.__getitem__) == rank
    assert slowed.makespan > equal.makespan + 0.4 * 48


def test_as_long_as_the_others_is_not_slow() -> None:
    assert played("1f1b", SlowRank(2, 1.0)).makespan == played("1f1b", None).makespan


def test_a_rank_that_shares_its_stages_is_refused() -> None:
    with pytest.raises(ValueError, match="two ranks hold each stage"):
        played("dualpipe", SlowRank(0, 2.0))
