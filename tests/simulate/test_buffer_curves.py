"""The memory of a rank over time is that of a plain list of births and deaths, sorted by time."""

from itertools import accumulate

import numpy as np
import pytest

from shardwright.config.load import load_job
from shardwright.schedule.buffer_lifetimes import Buffer
from shardwright.schedule.job_program import job_order
from shardwright.schedule.timing import Costs, play
from shardwright.simulate.action_columns import Array, columns_by_rank
from shardwright.simulate.buffer_curves import Lives, kept_on_rank, lives_on_rank

FOUR_RANKS = ("plan.pp=4", "plan.dp=1", "plan.tp=1", "plan.sequence_parallel=false", "model.layers=8")
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe", "pipedream")


def plain(lives: Lives, starts: Array, ends: Array, num_steps: int) -> tuple[list[float], list[int]]:
    """The times and counts of buffers, one birth and one death after the other. At the same time changes are in the
    order of the program; of messages the deaths come first, and one that leaves as it arrives was never there."""
    changes = list[tuple[float, int, int]]()
    length = len(starts) // num_steps
    for born, dies, is_taken in zip(lives.born.tolist(), lives.dies.tolist(), lives.is_taken.tolist(), strict=True):
        for step in range(num_steps):
            birth, death = step * length + born, step * length + dies
            end = starts[death] if is_taken else ends[death]
            if not lives.is_message:
                changes += [(starts[birth], 2 * birth, 1), (end, 2 * death + (not is_taken), -1)]
            elif ends[birth] < end:
                changes += [(ends[birth], 1, 1), (end, 0, -1)]
    changes.sort(key=lambda change: change[:2])
    return [time for time, _, _ in changes], list(accumulate(added for _, _, added in changes))


@pytest.mark.parametrize("latency", [0.0, 0.25])
@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_counts_are_those_of_a_plain_list(schedule: str, num_steps: int, latency: float) -> None:
    copies = ("plan.virtual_stages=2",) if schedule == "interleaved-1f1b" else ()
    program = job_order(load_job("quickstart", (*FOUR_RANKS, *copies, f"plan.schedule={schedule}"))).program()
    stages = program.num_stages
    costs = Costs((1.0,) * stages, (1.5,) * stages, (0.5,) * stages, transfer=(0.125,) * (stages - 1), latency=latency)
    times = play(program, costs, num_steps)
    for rank, columns in enumerate(columns_by_rank(program)):
        starts, ends = np.array(times.start[rank]), np.array(times.end[rank])
        lives = lives_on_rank(columns, program.trains)
        curves = kept_on_rank(lives, program.sizes, starts, ends, num_steps)
        assert curves[Buffer.ACTIVATIONS].most > 0
        for buffer, curve in curves.items():
            assert (curve.times.tolist(), curve.counts.tolist()) == plain(lives[buffer], starts, ends, num_steps)
