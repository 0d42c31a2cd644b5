"""The playable figures of the pages, by the name of the picture that each replaces, from predictions and schedules."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwright.api.one_collective import CollectiveQuestion, one_collective
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.units import bytes_text, memory_text, seconds_text, size_bytes
from shardwright.cost.collective_algorithms import PricedCollective
from shardwright.explain.rank_collectives import Crossing
from shardwright.explain.story import tell
from shardwright.learn.playable_figure import FigureControl, FigureFrame, FigureJob, PlayableFigure
from shardwright.memory.job_memory import job_memory
from shardwright.planner.own_plan import Estimate, estimate
from shardwright.report.collective_text import piece_name
from shardwright.report.fit_verdict import device_room_bytes
from shardwright.report.timeline.colours import NAMES, colour_of, ink_on
from shardwright.report.timeline.job_study import study_job
from shardwright.schedule.action import Kind
from shardwright.schedule.schedule import Program
from shardwright.sharding.collective_steps import KINDS, SUMS
from shardwright.sharding.memory_account import DEVICE_KINDS, RankMemory
from shardwright.sharding.mesh import MeshShape
from shardwright.simulate.timeline import RankTimeline

_DEVICE, _MODEL = "h100-sxm", "llama3-8b"
_TICKS_PER_S = 1e4  # times of a timeline are whole numbers of 0.1 ms
_KINDS_OF_WORK = {
    "F": say("forward"),
    "B": say("backward"),
    "I": say("input gradient"),
    "W": say("weight gradient"),
    "S": say("optimizer step"),
}
_SIZES = ("1KiB", "16KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB", "256MiB", "1GiB", "4GiB")
_SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h2", "zb-v", "dualpipe")


def _fullest(job: JobSpec) -> RankMemory:
    """The account of the rank that holds most."""
    return max(job_memory(job), key=lambda rank: rank.total_bytes)


def _memory_bar(label: str, memory: RankMemory, step: str) -> dict[str, Any]:
    """A bar of one rank's memory by kind, with the seconds of its step beside."""
    sizes = memory.as_dict()
    parts = [[name, sizes[f"{kind}_bytes"], memory_text(sizes[f"{kind}_bytes"])] for kind, name in DEVICE_KINDS.items()]
    return {"label": label, "parts": parts, "total": f"{memory_text(sizes['total_bytes'])}, {step}"}


def _memory_bars(devices: int, rows: Sequence[tuple[str, Sequence[str]]]) -> FigureFrame:
    """Memory of the fullest rank by kind and seconds of a step, a bar for each (label, overrides)."""
    asked = [FigureJob(_MODEL, devices, _DEVICE, sets) for _, sets in rows]
    jobs = [one.spec for one in asked]
    bars = [
        _memory_bar(label, _fullest(job), seconds_text(float(estimate(job).step.total)))
        for (label, _), job in zip(rows, jobs, strict=True)
    ]
    room = device_room_bytes(jobs[0]) or 0
    limit = {"amount": room, "text": say("a plan can fill {room}", room=memory_text(room))}
    return FigureFrame({"rows": bars, "limit": limit}, command="\n".join(one.command("estimate") for one in asked))


def _zero(replicas: str) -> FigureFrame:
    """Memory of a rank under each stage of ZeRO, and the step."""
    common = (f"plan.dp={replicas}", "plan.recompute=full")
    return _memory_bars(int(replicas), [(f"ZeRO {stage}", (*common, f"plan.zero={stage}")) for stage in range(4)])


def _recomputation(sequence: str) -> FigureFrame:
    """Memory and seconds by what is computed again, at a length of the sequence; a step has as many tokens at each."""
    length = int(sequence.replace(",", ""))
    batch = (f"model.sequence={length}", f"batch.global_batch_size={2**21 // length}")
    rows = [
        (policy, ("plan.dp=8", "plan.zero=3", f"plan.recompute={policy}", *batch))
        for policy in ("none", "selective", "full")
    ]
    return _memory_bars(8, rows)


def _numbers_of_step(job: JobSpec, prediction: Estimate) -> list[tuple[str, str]]:
    """The numbers below a timeline."""
    step, memory, room = prediction.step, _fullest(job).as_dict(), device_room_bytes(job) or 0
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
    timeline = study_job(job, 0.0, 1).simulated.timeline
    colours: dict[tuple[str, str], int] = {}  # by (colour, letter), its number
    picture = {
        "ranks": [list(_blocks(timeline.program, row, colours)) for row in timeline.ranks],
        "end": round(timeline.makespan * _TICKS_PER_S),
        "ticks": _TICKS_PER_S,
        "colours": [[colour, ink_on(colour), _KINDS_OF_WORK.get(letter, NAMES[letter])] for colour, letter in colours],
    }
    return FigureFrame(picture, _numbers_of_step(job, estimate(job)), asked.command("simulate"))


def _blocks(program: Program, row: RankTimeline, colours: dict[tuple[str, str], int]) -> Iterator[list[int]]:
    """The blocks of a rank: start and end in ticks, number of the colour, microbatch (-1: the update), and the half of
    the lane that it takes (0: all, 1 and 2: a forward and a backward that run as one). Numbers new colours."""
    for action, start, end in row.work(1e9):
        actions = action.computes() or (action,)
        for half, part in enumerate(actions):
            number = colours.setdefault((colour_of(program, part), str(part.kind)), len(colours))
            place = 0 if len(actions) == 1 else half + 1
            name = -1 if part.kind is Kind.STEP else part.microbatch
            yield [round(start * _TICKS_PER_S), round(end * _TICKS_PER_S), number, name, place]


def _collective(kind: str, ranks: str) -> FigureFrame:
    """The pieces of each rank before and after each step, and the messages of a step."""
    question = CollectiveQuestion(kind, 10**9, int(ranks), _DEVICE)  # type: ignore[arg-type]  # a kind by its name
    priced = one_collective(question).priced
    row = next(row for row in priced.rows if row.name == priced.drawn)
    moves = [[[move.sender, move.receiver, list(move.pieces), move.adds] for move in step] for step in priced.steps]
    picture = {"states": [_state(priced, number) for number in range(len(moves) + 1)], "moves": moves}
    numbers = [
        (say("algorithm"), priced.drawn),
        (say("steps"), str(row.num_steps)),
        (say("sent by the busiest rank, of 1 GB"), bytes_text(round(row.inside_bytes))),
        (say("time on {device}", device=_DEVICE), seconds_text(row.seconds)),
    ]
    command = f"shardwright collective {kind} --ranks {ranks} --bytes 1GB --device {_DEVICE}"
    return FigureFrame(picture, numbers, command)


def _by_size(size: str, ranks: str) -> FigureFrame:
    """Seconds of an all-reduce by each algorithm: few steps win for small tensors, few bytes for large ones."""
    question = CollectiveQuestion("all-reduce", size_bytes(size), int(ranks), _DEVICE)
    priced = one_collective(question).priced
    rows = [
        {
            "label": row.name + " *" * row.is_predicted,
            "parts": [[say("seconds"), row.seconds, seconds_text(row.seconds)]],
            "total": seconds_text(row.seconds),
        }
        for row in sorted(priced.rows, key=lambda row: row.seconds)
    ]
    fastest_s = min(row.seconds for row in priced.rows)
    numbers = [
        (say("fastest"), seconds_text(fastest_s)),
        (say("bytes of the tensor by the time"), f"{question.num_bytes / fastest_s / 1e9:.3g} GB/s"),
        (say("* what predictions of a step take"), next((row.name for row in priced.rows if row.is_predicted), "-")),
    ]
    command = f"shardwright collective all-reduce --ranks {ranks} --bytes {size} --device {_DEVICE}"
    return FigureFrame({"rows": rows}, numbers, command)


def _state(collective: PricedCollective, num_steps: int) -> list[list[Any]]:
    """Names of pieces, and the share of all ranks that each sums, by rank and piece; 0 where a rank lacks it."""
    size, held = collective.num_ranks, collective.held(num_steps)
    is_sum = collective.kind in SUMS
    return [
        [
            [
                piece_name(piece, held[rank][piece], size if is_sum else 0),
                len(held[rank][piece]) / size if is_sum else 0.5,
            ]
            if piece in held[rank]
            else 0
            for piece in range(size)
        ]
        for rank in range(size)
    ]


def _mesh(tp: str, pp: str, order: str) -> FigureFrame:
    """Ranks on nodes with their places on the axes, and the bytes that leave rank 0 along each."""
    replicas = 32 // int(tp) // int(pp)
    sets = [
        f"plan.tp={tp}",
        f"plan.pp={pp}",
        f"plan.dp={replicas}",
        f"plan.order={order}",
        "plan.zero=1",
        "plan.recompute=full",
        f"plan.sequence_parallel={str(tp != '1').lower()}",
    ]
    asked = FigureJob(_MODEL, 32, _DEVICE, sets)
    job = asked.spec
    story, shape = tell(job), MeshShape.of(job.plan)
    places = [shape.coordinates(rank) for rank in range(shape.world)]
    numbers: list[tuple[str, str]] = [(say("step"), seconds_text(float(estimate(job).step.total)))]
    for group in story.groups:
        sent = [crossing.sent for crossing in story.crossings if crossing.axis == group.axis]
        if len(group.ranks) > 1 and sent:
            numbers.append(
                (
                    say("sent by a rank along {axis}", axis=group.axis),
                    _sent_text(sum(one.inside for one in sent), sum(one.between for one in sent)),
                )
            )
    picture = {
        "node": 8,
        "axes": ["pp", "dp", "tp"],
        "places": [[place[axis] for axis in ("pp", "dp", "tp")] for place in places],
    }
    return FigureFrame(picture, numbers, asked.command("explain"))


def _sent_text(inside_bytes: float, between_bytes: float) -> str:
    """The bytes that a rank sends in a step, inside its node and out of it."""
    inside, between = memory_text(round(inside_bytes)), memory_text(round(between_bytes))
    if not between_bytes:
        return say("{inside} inside a node", inside=inside)
    if not inside_bytes:
        return say("{between} between nodes", between=between)
    return say("{inside} inside a node, {between} between nodes", inside=inside, between=between)


def _overlap(replicas: str, zero: str) -> FigureFrame:
    """Computing of a step above the replicas' communication, of which nothing hides the part that sticks out. That part
    has what communication slows, too, and may be longer than the communication by itself."""
    sets = [f"plan.dp={replicas}", f"plan.zero={zero}", "plan.recompute=full", "batch.global_batch_size=256"]
    asked = FigureJob("llama-7b", int(replicas), _DEVICE, sets)
    job = asked.spec
    step = estimate(job).step
    replica_crossings: list[Crossing] = [crossing for crossing in tell(job).crossings if crossing.axis == "dp"]
    alone_s = sum(float(crossing.seconds or 0.0) for crossing in replica_crossings)
    computing, exposed = float(step.compute + step.again), float(step.data)
    hidden = max(0.0, alone_s - exposed)
    rows: list[Mapping[str, Any]] = [
        {
            "label": say("computing"),
            "parts": [[say("computing"), computing, seconds_text(computing)]],
            "total": seconds_text(computing),
        },
        {
            "label": say("gradients and parameters"),
            "offset": max(0.0, computing - hidden),
            "parts": [
                [say("hidden"), hidden, seconds_text(hidden)],
                [say("exposed"), exposed, seconds_text(exposed)],
            ],
            "total": say("{seconds} by itself", seconds=seconds_text(alone_s)),
        },
    ]
    numbers = [
        (say("step"), seconds_text(float(step.total))),
        (say("sequences a replica"), str(256 // int(replicas))),
        (say("exposed, of the step"), f"{100 * exposed / step.total:.1f} %"),
        ("MFU", f"{100 * step.mfu:.1f} %"),
    ]
    return FigureFrame({"rows": rows}, numbers, asked.command("explain"))


PLAYABLE: Mapping[str, PlayableFigure] = {
    "zero": PlayableFigure(
        say("Memory of a rank and seconds of a step of llama3-8b, 256 sequences, by the stage of ZeRO"),
        "bars",
        [FigureControl(say("replicas"), ("1", "2", "4", "8", "16", "64"), 3)],
        _zero,
    ),
    "recomputation": PlayableFigure(
        say("Memory of a rank and seconds of a step of llama3-8b on 8 replicas, by the work that is done again"),
        "bars",
        [FigureControl(say("tokens of a sequence"), ("4,096", "8,192", "16,384", "32,768"), 1)],
        _recomputation,
    ),
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
    "ring-all-reduce": PlayableFigure(
        say("A collective step by step: who holds which piece"),
        "pieces",
        [
            FigureControl(say("collective"), KINDS, KINDS.index("all-reduce")),
            FigureControl(say("number of ranks"), ("2", "4", "8"), 1),
        ],
        _collective,
        say("Step number"),
    ),
    "alpha-beta": PlayableFigure(
        say("Seconds of an all-reduce on h100-sxm by algorithm, each size on a scale of its own"),
        "bars",
        [
            FigureControl(say("size of the tensor"), _SIZES, 4),
            FigureControl(say("number of ranks"), ("2", "8", "64"), 2),
        ],
        _by_size,
    ),
    "mesh": PlayableFigure(
        say("32 ranks on 4 nodes: the lines of a rank along each axis"),
        "ranks",
        [
            FigureControl("tp", ("2", "4", "8"), 1),
            FigureControl("pp", ("1", "2", "4"), 1),
            FigureControl(say("order"), ("dp-pp", "pp-dp")),
        ],
        _mesh,
        say("Rank"),
    ),
    "data-parallel": PlayableFigure(
        say("llama-7b, a step of 256 sequences: computing, and the communication of replicas beneath it"),
        "bars",
        [
            FigureControl(say("replicas"), ("8", "32", "128", "256"), 1),
            FigureControl("ZeRO", ("1", "2", "3")),
        ],
        _overlap,
    ),
}
