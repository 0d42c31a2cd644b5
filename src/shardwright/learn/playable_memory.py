"""Playable bars of memory: what the fullest rank holds by kind, under the plans that a control leads through."""

from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.units import memory_text, seconds_text
from shardwright.cost.calibration import shipped
from shardwright.learn.playable_figure import FigureControl, FigureFrame, FigureJob, PlayableFigure
from shardwright.memory.job_memories import job_accounts
from shardwright.report.fit_verdict import device_room_bytes
from shardwright.sharding.memory_account import DEVICE_KINDS, RankMemory
from shardwright.simulate.full_step import simulated_step

_DEVICE, _MODEL = "h100-sxm", "llama3-8b"
# Policies of recomputation. A selective one has the operators that are cheap and keep much; of attention hardly any
# tensor is kept.
RECOMPUTED: Mapping[str, Sequence[str]] = {
    "none": ("plan.recompute=none",),
    "selective": ("plan.recompute=selective", 'plan.recompute_operators=["norm","activation"]'),
    "full": ("plan.recompute=full",),
}


def fullest(job: JobSpec) -> RankMemory:
    """The account of the rank that holds most."""
    return max(job_accounts(job), key=lambda rank: rank.total_bytes)


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
        _memory_bar(label, fullest(job), seconds_text(float(simulated_step(job, shipped()).total)))
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
    rows = [(policy, ("plan.dp=8", "plan.zero=3", *sets, *batch)) for policy, sets in RECOMPUTED.items()]
    return _memory_bars(8, rows)


def _context_parallel(sequence: str) -> FigureFrame:
    """Memory and seconds by the degree of context parallelism, at a length of the sequence; a step has as many tokens
    at each."""
    length = int(sequence.replace(",", ""))
    batch = (f"model.sequence={length}", f"batch.global_batch_size={2**20 // length}")
    rows = [
        (f"cp {cp}", (f"plan.cp={cp}", f"plan.dp={8 // cp}", "plan.zero=3", "plan.recompute=full", *batch))
        for cp in (1, 2, 4, 8)
    ]
    return _memory_bars(8, rows)


MEMORY_BARS: Mapping[str, PlayableFigure] = {
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
    "context-parallel": PlayableFigure(
        say("Memory of a rank and seconds of a step of llama3-8b on 8 devices, by the degree of context parallelism"),
        "bars",
        [FigureControl(say("tokens of a sequence"), ("16,384", "32,768", "65,536", "131,072"), 3)],
        _context_parallel,
    ),
}
