"""A schedule written by hand: lowered to sends and receives, checked, played and drawn. It needs no torch.

python examples/own_schedule.py
"""

from shardwright.report.timeline.terminal import draw
from shardwright.schedule.action import parse
from shardwright.schedule.lowering.lower import lower
from shardwright.schedule.program_check import program_faults
from shardwright.schedule.schedule import Schedule
from shardwright.schedule.timing import Costs, play
from shardwright.sharding.stage_placement import in_line
from shardwright.simulate.timeline import make_timeline

# 2F1 is the forward of microbatch 1 through stage 2, 2B1 its backward. Each rank has its list.
ROWS = (
    "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
    "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
    "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
)


def main() -> None:
    """Print the program, and the timeline in which a backward takes twice as long as a forward."""
    schedule = Schedule("mine", 4, in_line(3), tuple(tuple(map(parse, row.split())) for row in ROWS))
    program = lower(schedule)
    print(program.text())
    print("faults:", program_faults(program) or "none")
    timeline = make_timeline(program, play(program, Costs.uniform(3)))
    print(draw(timeline, width=100))
    idle = sum(sum(row.idle_by_cause().values()) for row in timeline.ranks)
    print(f"bubble: {100 * idle / (timeline.makespan * program.num_ranks):.0f} % of {timeline.makespan:g}")


if __name__ == "__main__":
    main()
