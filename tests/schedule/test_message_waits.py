"""The messages that a step waits for, one after the other: each schedule's formula, against the schedule played."""

import pytest

from shardwright.config.schedule_facts import SCHEDULES
from shardwright.schedule.pipeline_shape import PipelineShape
from shardwright.schedule.shape_program import shape_program
from shardwright.schedule.timing import Costs, play

SHAPES = [(2, 8), (4, 8), (4, 32), (6, 24), (8, 16), (8, 64), (16, 64)]
# A solver makes `auto` anew for each cost of a message.
PLAYED = [facts for facts in SCHEDULES.values() if facts.name != "auto"]


def waits_when_played(name: str, shape: PipelineShape) -> float:
    """Latencies by which a step takes longer, if all passes take the same and a message a fiftieth of a pass."""
    program = shape_program(name, shape)
    latency = 0.02
    first, last = (play(program, Costs.uniform(program.num_stages, latency=c)).makespan for c in (0.0, latency))
    return (last - first) / latency


@pytest.mark.parametrize("facts", PLAYED, ids=lambda facts: facts.name)
def test_formula_counts_the_messages_of_the_critical_path(facts) -> None:
    for p, m in SHAPES:
        v = facts.stages_per_rank or 2
        counted = facts.num_waits(p, m, v, 0)
        # V-Min's pattern has a period of p for p = 2, 4, 6 alone; its formula is within an eighth elsewhere.
        assert counted == pytest.approx(waits_when_played(facts.name, PipelineShape(p, m, v)), rel=0.125), (p, m)


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_extra_warmup_hides_the_messages_in_the_steady_state(p: int, m: int) -> None:
    played = waits_when_played("1f1b", PipelineShape(p, m, extra_warmup=p - 1))
    assert SCHEDULES["1f1b"].num_waits(p, m, 1, p - 1) == pytest.approx(played) == 2 * (p - 1)
