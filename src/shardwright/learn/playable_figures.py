"""The playable figures of the pages, by the name of the picture that each replaces, from predictions and schedules."""

from collections.abc import Mapping
from typing import Any

from shardwright.api.one_collective import CollectiveQuestion, one_collective
from shardwright.config.phrase import say
from shardwright.config.units import bytes_text, seconds_text, size_bytes
from shardwright.cost.calibration import shipped
from shardwright.cost.collective_algorithms import PricedCollective
from shardwright.explain.rank_collectives import Crossing
from shardwright.explain.step_traffic import step_traffic
from shardwright.learn.context_ring import CONTEXT_RING
from shardwright.learn.playable_figure import FigureControl, FigureFrame, FigureJob, PlayableFigure
from shardwright.learn.playable_memory import MEMORY_BARS
from shardwright.learn.playable_shares import TIME_BARS
from shardwright.learn.playable_systems import SYSTEM_LINKS
from shardwright.learn.playable_timelines import TIMELINES
from shardwright.learn.playable_tree import TREE
from shardwright.learn.system_figures import sent_text
from shardwright.report.collective_text import piece_name
from shardwright.sharding.collective_steps import KINDS, SUMS
from shardwright.sharding.mesh import MeshShape
from shardwright.simulate.full_step import simulated_step

_DEVICE, _MODEL = "h100-sxm", "llama3-8b"
_SIZES = ("1KiB", "16KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB", "256MiB", "1GiB", "4GiB")


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
    step, shape = simulated_step(job, shipped()), MeshShape.of(job.plan)
    traffic = step_traffic(job, step)
    places = [shape.coordinates(rank) for rank in range(shape.world)]
    numbers: list[tuple[str, str]] = [(say("step"), seconds_text(float(step.total)))]
    for group in traffic.groups:
        sent = [crossing.sent for crossing in traffic.crossings if crossing.axis == group.axis]
        if len(group.ranks) > 1 and sent:
            numbers.append(
                (
                    say("sent by a rank along {axis}", axis=group.axis),
                    sent_text(sum(one.inside for one in sent), sum(one.between for one in sent)),
                )
            )
    picture = {
        "node": 8,
        "axes": ["pp", "dp", "tp"],
        "places": [[place[axis] for axis in ("pp", "dp", "tp")] for place in places],
    }
    return FigureFrame(picture, numbers, asked.command("explain"))


def _overlap(replicas: str, zero: str) -> FigureFrame:
    """Computing of a step above the replicas' communication, of which nothing hides the part that sticks out. That part
    has what communication slows, too, and may be longer than the communication by itself."""
    sets = [f"plan.dp={replicas}", f"plan.zero={zero}", "plan.recompute=full", "batch.global_batch_size=256"]
    asked = FigureJob("llama-7b", int(replicas), _DEVICE, sets)
    job = asked.spec
    step = simulated_step(job, shipped())
    replica_crossings: list[Crossing] = [
        crossing for crossing in step_traffic(job, step).crossings if crossing.axis == "dp"
    ]
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
                [say("overlapped"), hidden, seconds_text(hidden)],
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
    **MEMORY_BARS,
    **TIMELINES,
    **TIME_BARS,
    **TREE,
    **SYSTEM_LINKS,
    **CONTEXT_RING,
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
