"""Playable bars of time: a step by the degree of tensor parallelism, and what failures and checkpoints take."""

from collections.abc import Mapping
from typing import Any

from shardwright.api.loaded_job import load
from shardwright.config.phrase import say
from shardwright.config.units import seconds_text
from shardwright.cost.calibration import shipped
from shardwright.cost.failures import best_interval_s, goodput, reliability_of
from shardwright.cost.run_goodput import job_checkpoint_bytes
from shardwright.learn.playable_figure import FigureControl, FigureFrame, FigureJob, PlayableFigure
from shardwright.simulate.full_step import simulated_step

_MODEL, _DEVICES = "llama3-8b", 16
# Fields of a step's prediction, with their names on a bar; the remainder of the step is "the rest".
_PARTS_OF_STEP = {
    "compute": say("computing"),
    "again": say("recomputing"),
    "tensor": say("tensor parallel"),
    "data": say("data parallel"),
}
_PARTS_OF_LOSS = {
    "checkpoints": say("checkpoints"),
    "lost_work": say("lost work"),
    "restarts": say("restarts"),
}
_FAILING_JOB = "llama3-405b-16k"
_TIMES_THE_BEST = (0.1, 0.3, 1.0, 3.0, 10.0)


def _tensor_parallel(device: str) -> FigureFrame:
    """The parts of a step by the degree of tensor parallelism on nodes of 8, the last of which leaves a node."""
    rows, asked_jobs = list[Mapping[str, Any]](), list[FigureJob]()
    for tp in (1, 2, 4, 8, 16):
        sets = (
            f"plan.tp={tp}",
            f"plan.dp={_DEVICES // tp}",
            f"plan.sequence_parallel={str(tp > 1).lower()}",
            "plan.zero=1",
            "plan.microbatch_size=1",
            "model.kv_heads=32",
            "cluster.inter_node.bandwidth_gb_per_s=50",
        )
        asked = FigureJob(_MODEL, _DEVICES, device, sets)
        step = simulated_step(asked.spec, shipped())
        seconds = {name: float(getattr(step, part)) for part, name in _PARTS_OF_STEP.items()}
        parts = seconds | {say("the rest"): float(step.total) - sum(seconds.values())}
        drawn = [[name, part_s, seconds_text(part_s)] for name, part_s in parts.items() if part_s > 0]
        rows.append({"label": f"tp {tp}", "parts": drawn, "total": seconds_text(float(step.total))})
        asked_jobs.append(asked)
    command = "\n".join(asked.command("estimate") for asked in asked_jobs)
    return FigureFrame({"rows": rows}, command=command)


def _lost_time(storage: str, hours: str) -> FigureFrame:
    """The shares of the time in which no training stays, by the time between checkpoints."""
    sets = (
        f"cluster.checkpoint_gb_per_s={storage.replace(',', '')}",
        f"cluster.hours_between_failures={hours.replace(',', '')}",
    )
    job = load(_FAILING_JOB, *sets).spec
    reliability = reliability_of(job.cluster, job.plan.world, job_checkpoint_bytes(job))
    assert reliability is not None  # both of its numbers are set
    best_s, rows = float(best_interval_s(reliability)), list[Mapping[str, Any]]()
    for times in _TIMES_THE_BEST:
        shares = goodput(reliability, times * best_s)
        lost = [(name, float(getattr(shares, part))) for part, name in _PARTS_OF_LOSS.items()]
        interval = seconds_text(times * best_s)
        label = say("{interval}, the best", interval=interval) if times == 1 else interval
        trains = say("{share:.1f} % trains", share=100 * float(shares.training))
        rows.append(
            {"label": label, "parts": [[name, share, f"{100 * share:.1f} %"] for name, share in lost], "total": trains}
        )
    numbers = [
        (say("a checkpoint takes"), seconds_text(float(reliability.checkpoint_s))),
        (say("a failure every"), seconds_text(float(reliability.between_failures_s))),
        (say("best interval"), seconds_text(best_s)),
    ]
    command = " ".join((f"shardwright estimate {_FAILING_JOB}", *(f"--set {override}" for override in sets)))
    return FigureFrame({"rows": rows}, numbers, command)


def time_lost() -> list[tuple[str, dict[str, float]]]:
    """The bars of the picture of time that is lost, as its controls begin: labels, and shares by their names."""
    rows = _lost_time("100", "50,000").picture["rows"]
    return [(row["label"], {name: share for name, share, _ in row["parts"]}) for row in rows]


TIME_BARS: Mapping[str, PlayableFigure] = {
    "tensor-parallel": PlayableFigure(
        say("A step of llama3-8b with 32 key heads on 16 devices, nodes of 8, by the degree of tensor parallelism"),
        "bars",
        [FigureControl(say("device"), ("a100-sxm-80g", "h100-pcie", "h100-sxm", "b200-sxm"), 2)],
        _tensor_parallel,
    ),
    "checkpoint-interval": PlayableFigure(
        say("llama3-405b on 16,384 devices: time without training, by the time between checkpoints"),
        "bars",
        [
            FigureControl(say("storage, GB/s"), ("50", "100", "500", "2,000"), 1),
            FigureControl(say("hours between failures of a device"), ("10,000", "25,000", "50,000", "100,000"), 2),
        ],
        _lost_time,
    ),
}
