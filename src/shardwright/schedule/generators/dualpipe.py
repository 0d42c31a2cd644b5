"""DualPipe: two pipelines in opposite directions, so that a forward always has a backward to hide it. DeepSeek-AI 2024
(arXiv 2412.19437), section 3.2.1 and figure 5; github.com/deepseek-ai/DualPipe.

Each rank holds two stages, r and p - 1 - r: the pipeline holds the model twice, and half of the microbatches enter at
either end. Most of the time a rank runs a forward of one direction and a backward of the other as one action, F&B, in
which the communication of each (above all of expert parallelism) overlaps the computation of the other. The bubble is
(p / 2 - 1)(F&B + B - 3W), exact if F = I >= W. Every rank keeps p + 1 microbatches alive. The price is the second copy
of the parameters: the gradients of the two copies, on different ranks, are summed before the optimizer step.
"""

from typing import Any

from shardwright.config.array_math import least, most, where
from shardwright.config.phrase import any_of, say
from shardwright.config.schedule_facts import ScheduleFacts
from shardwright.schedule.generators.row_writer import Row
from shardwright.schedule.pipeline_shape import of_size
from shardwright.schedule.schedule import Schedule
from shardwright.sharding.stage_placement import bidirectional


def dualpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """The eight phases on each rank; the ranks of the second half mirror the first half, with directions swapped."""
    rows = []
    half = num_microbatches // 2
    down, up = range(half), range(half, num_microbatches)
    for rank in range(num_ranks):
        near_end = min(rank, num_ranks - 1 - rank)
        if rank == near_end:
            row = Row([rank, num_ranks - 1 - rank], [down, up])
        else:
            row = Row([num_ranks - 1 - rank, rank], [up, down])
        eight_phases(row, near_end, num_ranks // 2, half)
        rows.append(row.actions())
    return Schedule("dualpipe", num_microbatches, bidirectional(num_ranks, num_microbatches), tuple(rows))


def eight_phases(row: Row, rank: int, last: int, num_microbatches: int) -> None:
    """Write the figure, left to right, for rank `rank` of the `last` ranks from an end to the turn, with
    `num_microbatches` of each chunk.

    Chunk 0 comes from the near end, chunk 1 back from the turn, which is between ranks last - 1 and last (DualPipe)
    or at the last rank itself (DualPipeV).
    """
    before_turn = last - 1 - rank
    row.write("F0", times=2 * before_turn)
    row.write("F0 F1", times=rank + 1)
    row.write("I1 W F1", times=before_turn)
    pairs = num_microbatches - 2 * last + rank + 1
    # At the turn, the next rank waits for the forward of the first pair, so the two do not run as one action.
    row.write("F0 B1 F1+B0" if before_turn == 0 else "F0+B1 F1+B0")
    row.write("F0+B1 F1+B0", times=pairs - 1)
    row.write("B1 F1+B0", times=before_turn)
    # The remaining backwards of both chunks in turn; the second half is split, so that gradients are sent sooner.
    for n in range(2 * (rank + 1)):
        row.write(f"{'B' if n <= rank else 'I'}{1 - n % 2}")
    row.write("W I0", times=before_turn)
    row.write("W", times=rank + 1)


def dualpipe_faults(num_ranks: int, num_microbatches: int) -> list[str]:
    """Why a shape is not admitted."""
    faults: list[str] = []
    if num_ranks % 2:
        faults.append(
            say(
                "dualpipe pairs rank r with rank p - 1 - r, and p {ranks} is odd; use {choices}, or dualpipev",
                ranks=num_ranks,
                choices=_even_neighbours(num_ranks, 1),
            )
        )
    least = 2 * num_ranks
    if num_microbatches < least:
        faults.append(
            say(
                "dualpipe needs m >= 2p microbatches and an even number: m {m} < 2 x {ranks} = {least}; use {least} or "
                "more",
                m=num_microbatches,
                ranks=num_ranks,
                least=least,
            )
        )
    elif num_microbatches % 2:
        faults.append(
            say(
                "dualpipe needs m >= 2p microbatches and an even number: m {m} is odd; use {choices}",
                m=num_microbatches,
                choices=_even_neighbours(num_microbatches, least),
            )
        )
    return faults


def _even_neighbours(number: int, least: int) -> str:
    """The even numbers next to an odd one; the larger one alone where the number is not above `least`."""
    return any_of([*[str(number - 1)] * (number > least), str(number + 1)])


def paired_idle_s(turns: Any, from_turn: Any, f: Any, i: Any, w: Any) -> Any:
    """Seconds that a rank idles if forwards and backwards run as pairs: the longest of three paths, for `turns` on the
    way to the turn and back; the second path has `from_turn` forwards."""
    return most(turns * (2 * f + i - w), from_turn * f + turns * (2 * i - w), 2 * turns * f)


def _idle_s(p: Any, m: Any, v: Any, f: Any, i: Any, w: Any) -> Any:
    turns = p / 2 - 1
    return paired_idle_s(turns, most(0, turns - 1), f, i, w)


def _waiting(p: Any, rank: Any, m: Any) -> tuple[Any, Any]:
    near_end = least(rank, p - 1 - rank)
    return where(near_end == 0, p - 1, p / 2 - 1 - near_end) / 2, (near_end + 1) / 2


FACTS = ScheduleFacts(
    name="dualpipe",
    place=110,
    make=of_size(dualpipe),
    faults=of_size(dualpipe_faults),
    admits=lambda p, m: (p % 2 == 0) & (m >= 2 * p) & (m % 2 == 0),
    placement=lambda num_ranks, stages_per_rank: bidirectional(num_ranks, 2),
    num_copies=2,
    pairs=True,
    # If a pair takes less time than its parts, this is the bubble of the ranks at the turn: they run most pairs.
    bubble="(p / 2 - 1) * (FB + B - 3 * W)",
    when="F == I and W <= I",
    idle_s=_idle_s,
    # A rank has twice the layers, and a microbatch uses half of them.
    alive=lambda p, rank, m, v, extra_warmup: least(m, p + 1) / 2,
    keeps_as_1f1b=True,
    waiting=_waiting,
    num_gathers=lambda p, m, v: least(m, 1.25 + 0.6 * p),
    num_waits=lambda p, m, v, extra_warmup: 1.0 * (p - 1) * m / p + most(1, 1.5 * (p - 2)),
    search_place=80,
)
