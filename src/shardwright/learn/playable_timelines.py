"""Playable timelines: a step through a pipeline in true seconds, and one in which a rank is slow."""

from collections.abc import Iterator, Mapping
from typing import Any

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.units import memory_text, seconds_text
from shardwright.cost.calibration import shipped
from shardwright.learn.playable_figure import FigureControl, FigureFrame, FigureJob, PlayableFigure
from shardwright.learn.playable_memory import fullest
from shardwright.report.fit_verdict import device_room_bytes
from shardwright.report.timeline.colours import NAMES, colour_of, ink_on
from shardwright.report.timeline.job_study import study_job
from shardwright.report.timeline.study import number, study_schedule
from shardwright.schedule.action import Kind
from shardwright.schedule.pipeline_shape import PipelineShape
from shardwright.schedule.schedule import Program
from shardwright.simulate.bubbles import Work
from shardwright.simulate.full_step import simulated_step
from shardwright.simulate.slow_rank import SlowRank
from shardwright.simulate.timeline import RankTimeline, Timeline

_DEVICE, _MODEL = "h100-sxm", "llama3-8b"
_TICKS = 1e4  # of a unit of time: times of a timeline are whole numbers
_KINDS_OF_WORK = {
    "F": say("forward"),
    "B": say("backward"),
    "I": say("input gradient"),
    "W": say("weight gradient"),
    "S": say("optimizer step"),
}
_SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h2", "zb-v", "dualpipe")
_SLOW_PIPELINE = 4  # ranks of the pipeline in which one is slow


def numbers_of_step(job: JobSpec) -> list[tuple[str, str]]:
    """The numbers below the picture of a step."""
    step, memory, room = simulated_step(job, shipped()), fullest(job).as_dict(), device_room_bytes(job) or 0
    return [
        (say("step"), seconds_text(float(step.total))),
        (say("bubble"), f"{100 * step.bubble / step.total:.1f} %"),
        ("MFU", f"{100 * step.mfu:.1f} %"),
        (say("activations of the fullest rank"), memory_text(memory["activations_bytes"])),
        (say("memory of the fullest rank"), f"{memory_text(memory['total_bytes'])} / {memory_text(room)}"),
    ]


def _pipeline(schedule: str, stages: str, microbatches: str) -> FigureFrame:
    """The timeline of a step in true seconds."""
    sets = [f"plan.pp={stages}", "plan.dp=1", f"plan.schedule={schedule}", f"batch.global_batch_size={microbatches}"]
    sets += ["plan.virtual_stages=2"] * (schedule == "interleaved-1f1b")
    asked = FigureJob(_MODEL, int(stages), _DEVICE, sets)
    job = asked.spec
    picture = _picture(study_job(job, 0.0, 1).simulated.timeline, "s")
    return FigureFrame(picture, numbers_of_step(job), asked.command("simulate"))


def _slow_rank(rank: str, times: str, microbatches: str) -> FigureFrame:
    """The timeline of a step in which a rank computes longer, in units of a forward, and the wait of each rank."""
    shape = PipelineShape(_SLOW_PIPELINE, int(microbatches), 1, num_steps=1, most_alive=0.0)
    equal, slowed = (
        study_schedule("1f1b", shape, Work(), slow=slow).timeline for slow in (None, SlowRank(int(rank), float(times)))
    )
    step, equal_step = slowed.makespan, equal.makespan
    numbers: list[tuple[str, str]] = [
        (say("step"), number(step)),
        (say("longer than with equal ranks"), f"{100 * (step / equal_step - 1):.1f} %"),
    ]
    for place, row in enumerate(slowed.ranks):
        wait = step - row.busy
        numbers.append((say("rank {rank} waits", rank=place), f"{number(wait)} ({100 * wait / step:.0f} %)"))
    command = f"shardwright schedule 1f1b --stages {_SLOW_PIPELINE} --microbatches {microbatches} --slow {rank} {times}"
    return FigureFrame(_picture(slowed, "F"), numbers, command)


def _picture(timeline: Timeline, unit: str) -> dict[str, Any]:
    """A timeline as its painter reads it; `unit` is that of its times."""
    colours: dict[tuple[str, str], int] = {}  # by (colour, letter), its number
    return {
        "ranks": [list(_blocks(timeline.program, row, colours)) for row in timeline.ranks],
        "end": round(timeline.makespan * _TICKS),
        "ticks": _TICKS,
        "unit": unit,
        "colours": [[colour, ink_on(colour), _KINDS_OF_WORK.get(letter, NAMES[letter])] for colour, letter in colours],
    }


def _blocks(program: Program, row: RankTimeline, colours: dict[tuple[str, str], int]) -> Iterator[list[int]]:
    """The blocks of a rank: start and end in ticks, number of the colour, microbatch (-1: the update), and the half of
    the lane that it takes (0: all, 1 and 2: a forward and a backward that run as one). Numbers new colours."""
    for action, start, end in row.work(1e9):
        actions = action.computes() or (action,)
        for half, part in enumerate(actions):
            colour = colours.setdefault((colour_of(program, part), str(part.kind)), len(colours))
            place = 0 if len(actions) == 1 else half + 1
            name = -1 if part.kind is Kind.STEP else part.microbatch
            yield [round(start * _TICKS), round(end * _TICKS), colour, name, place]


TIMELINES: Mapping[str, PlayableFigure] = {
    "pipeline-1f1b": PlayableFigure(
        say("A step of llama3-8b through a pipeline, in true time"),
        "timeline",
        [
            FigureControl(say("schedule"), _SCHEDULES, 1),
            FigureControl(say("stages"), ("2", "4", "8"), 1),
            FigureControl(say("microbatches"), ("4", "8", "16"), 1),
        ],
        _pipeline,
        say("Moment"),
    ),
    "slow-rank": PlayableFigure(
        say("1F1B with one slow rank: times as multiples of a forward"),
        "timeline",
        [
            FigureControl(say("slow rank"), ("0", "1", "2", "3"), 2),
            FigureControl(say("times as long"), ("1", "1.1", "1.25", "1.5", "2"), 3),
            FigureControl(say("microbatches"), ("4", "8", "16"), 1),
        ],
        _slow_rank,
        say("Moment"),
    ),
}
