"""The figures of the pages, each computed when it is asked for: predictions of jobs, schedules, collectives, the mesh.

A figure is computed once and drawn in each language: its function gives one that takes a language.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from shardwright.api.loaded_job import load
from shardwright.api.one_collective import CollectiveQuestion, one_collective
from shardwright.config.cluster_facts import device_entry, device_hours_between_failures
from shardwright.config.compression_facts import COMPRESSIONS
from shardwright.config.job import JobSpec
from shardwright.config.percent import percent_text, whole_percent_text
from shardwright.config.phrase import in_language, say
from shardwright.config.units import bytes_text, counted_phrase, memory_text, seconds_text
from shardwright.cost.collective_time import ring_s
from shardwright.cost.failures import Reliability, best_interval_s, goodput
from shardwright.learn.cut_tensors_figure import placement_figure, tensor_cut_figure
from shardwright.learn.drawing import Drawing
from shardwright.learn.hierarchy_figure import hierarchy_figure
from shardwright.learn.ladder_figure import ladder_figure
from shardwright.learn.mesh_cube_figure import mesh_cube_figure
from shardwright.learn.mesh_rows_figure import mesh_rows_figure
from shardwright.learn.narrow_numbers_figure import narrow_numbers_figure
from shardwright.learn.network_shapes_figure import network_shapes_figure
from shardwright.learn.pipeline_figures import bubble_figure, versions_figure
from shardwright.learn.playable_figure import WHOLE_PLAN
from shardwright.learn.playable_memory import RECOMPUTED
from shardwright.learn.playable_shares import time_lost
from shardwright.learn.playable_tree import branch_picture
from shardwright.learn.system_figures import SYSTEM_PLANS, grids_of_products, system_figure
from shardwright.learn.tree_figure import tree_figure
from shardwright.learn.two_cuts_figure import two_cuts_figure
from shardwright.memory.job_memory import job_memory
from shardwright.planner.critical_batch import rebatched_tokens
from shardwright.planner.own_plan import estimate
from shardwright.report import svg
from shardwright.report.bars_picture import StackedBars
from shardwright.report.fit_verdict import device_room_bytes
from shardwright.report.timeline.picture import picture
from shardwright.report.timeline.study import study_schedule
from shardwright.schedule.pipeline_shape import PipelineShape
from shardwright.simulate.bubbles import Work
from shardwright.simulate.slow_rank import SlowRank

_DEVICE, _MODEL = "h100-sxm", "llama3-8b"
_TIMELINE_PX = 900  # narrower than the column of a page, which would else shrink its letters
_GENERATIONS = ("v100-sxm-32g", "a100-sxm-80g", "h100-sxm", "h200-sxm", "b200-sxm")
_PARTS_OF_TIME = {
    "compute": say("computing"),
    "again": say("recomputing"),
    "tensor": say("tensor parallel"),
    "context": say("context parallel"),
    "expert": say("experts"),
    "data": say("data parallel"),
    "messages": say("messages"),
    "bubble": say("bubble"),
    "optimizer": say("update"),
    "other": say("the rest"),
}

Rows = Sequence[tuple[str, Sequence[str]]]  # label, overrides of a job
Bars = list[tuple[str, dict[str, float]]]  # label, amount by part


def _jobs(model: str, devices: int, rows: Rows) -> list[tuple[str, JobSpec]]:
    """One model under several plans, on as many devices. No field is searched for: rows differ in what they state."""
    return [(label, load(model, *sets, WHOLE_PLAN, devices=devices, device=_DEVICE).spec) for label, sets in rows]


def _memory(title: str, jobs: Sequence[tuple[str, JobSpec]]) -> Drawing:
    """Bars of what a plan holds on its fullest rank by kind, beside the memory that a plan can fill."""
    bars = Bars()
    for label, job in jobs:
        fullest = max((rank.as_dict() for rank in job_memory(job)), key=lambda sizes: sizes["total_bytes"])
        kinds = {key.removesuffix("_bytes"): float(size) for key, size in fullest.items() if size}
        bars.append((label, {say(kind): size for kind, size in kinds.items() if kind not in ("total", "host")}))
    room = device_room_bytes(jobs[0][1]) or 0
    can_fill = say("a plan can fill {room}", room=memory_text(room))
    return StackedBars(title, bars, _memory_text, float(room), can_fill).svg


def _of_replicas(model: str, replicas: int, zero: int | None = None) -> str:
    """The title of bars of memory."""
    if zero is None:
        return say("{model} on {replicas} replicas: memory of a rank", model=model, replicas=replicas)
    return say(
        "{model} on {replicas} replicas, ZeRO {zero}: memory of a rank", model=model, replicas=replicas, zero=zero
    )


def _memory_text(size: float) -> str:
    return memory_text(round(size))


def _shares(job: JobSpec) -> dict[str, float]:
    """The seconds of a step by part."""
    step = estimate(job).step
    return {name: float(getattr(step, part)) for part, name in _PARTS_OF_TIME.items() if getattr(step, part) > 0}


def memory_wall() -> Drawing:
    """FLOPs that a device can do for each byte that its memory delivers, by generation."""
    devices = [device_entry(name) for name in _GENERATIONS]
    rows: Bars = [
        (
            device.name,
            {
                say("FLOP a byte"): device.peak_tflops.get("bfloat16", device.peak_tflops["float16"])
                * 1e3
                / device.memory_gb_per_s
            },
        )
        for device in devices
    ]
    return StackedBars(say("FLOP by byte of memory traffic, 16 bits"), rows, "{:.0f}".format).svg


def device_memory() -> Drawing:
    """The memory of one rank that holds a whole model, by kind."""
    rows = [(say("one {device}", device=_DEVICE), ["plan.dp=1", "plan.zero=0"])]
    title = say("{model} on one device: weights, gradients, AdamW, activations", model=_MODEL)
    return _memory(title, _jobs(_MODEL, 1, rows))


def ring_all_reduce() -> Drawing:
    """The pieces of each rank after each step of a ring."""
    return one_collective(CollectiveQuestion("all-reduce", 2**30, 4, _DEVICE)).svg


def alpha_beta() -> Drawing:
    """The bandwidth that an all-reduce reaches by the size of the tensor."""
    sizes = [2**power for power in range(10, 33)]
    named_points = []
    for ranks in (2, 8, 64):
        collective = one_collective(CollectiveQuestion("all-reduce", sizes[0], ranks, _DEVICE)).priced
        seconds = [float(ring_s(collective.rates, collective.group, size, 2)) for size in sizes]
        points = [(float(place), size / seconds[place] / 1e9) for place, size in enumerate(sizes)]
        named_points.append((counted_phrase(ranks, "rank"), points))
    ticks = {float(place): bytes_text(size) for place, size in enumerate(sizes) if place % 5 == 0}
    box, most = svg.Box(64, 70, 860, 240), max(y for _, points in named_points for _, y in points)
    title = say("all-reduce on {device}: GB/s of the tensor, by its size", device=_DEVICE)

    def drawn(language: str) -> str:
        lines = [
            svg.Line(in_language(name, language), points, colour)
            for (name, points), colour in zip(named_points, svg.LINE_COLOURS, strict=False)
        ]
        chart = svg.LineChart(in_language(title, language), box, lines, most, ticks=ticks)
        label = in_language(say("bandwidth by size"), language)
        return svg.document(label, 960, 350, [*chart.drawn(), *svg.legend(64, 30, lines)])

    return drawn


def data_parallel() -> Drawing:
    """The share of each part of a step as replicas divide one batch."""
    bars = Bars()
    for devices in (8, 32, 128, 256):
        sets = ["plan.zero=1", f"plan.dp={devices}", "batch.global_batch_size=256", "plan.recompute=full"]
        ((label, job),) = _jobs("llama-7b", devices, [(counted_phrase(devices, "replica"), sets)])
        parts = _shares(job)
        bars.append((label, {name: seconds / sum(parts.values()) for name, seconds in parts.items()}))
    title = say("llama-7b, 256 sequences a step: share of the step")
    return StackedBars(title, bars, whole_percent_text).svg


def batch_size() -> Drawing:
    """The tokens to one loss, by the batch."""
    bars = Bars()
    for times in (0.25, 0.5, 1.0, 2.0, 4.0):
        more = rebatched_tokens(1.0, 0.0, times, 1.0) - 1.0
        label = say("{times:g} x the critical batch", times=times)
        bars.append((label, {say("the fewest tokens"): 1.0, say("more than that"): more}))
    return StackedBars(say("Tokens to one loss, as a multiple of the fewest"), bars, "{:.3g} x".format).svg


def compression() -> Drawing:
    """The parts of a step on a slow network, by what is sent of gradients."""
    sets = [
        *("plan.dp=32", "plan.zero=0", "plan.recompute=full", "plan.microbatch_size=4"),
        *("plan.recompute_every=1", "plan.offload_optimizer=0"),
        *("batch.global_batch_size=512", "cluster.inter_node.bandwidth_gb_per_s=1.25"),
    ]
    bars = Bars()
    for method in COMPRESSIONS:
        job = load("gpt2-xl", *sets, f"plan.compress={method}", WHOLE_PLAN, devices=32, device="a100-sxm-40g").spec
        bars.append((method, _shares(job)))
    title = say("gpt2-xl on 4 nodes of 8 A100, 10 Gbit/s between them: a step")
    return StackedBars(title, bars, seconds_text).svg


def zero() -> Drawing:
    """Memory by the stage of ZeRO."""
    rows = [(f"ZeRO {stage}", ["plan.dp=8", f"plan.zero={stage}"]) for stage in range(4)]
    return _memory(_of_replicas(_MODEL, 8), _jobs(_MODEL, 8, rows))


def offload() -> Drawing:
    """Memory with and without the optimizer's state on the device."""
    common = ["plan.dp=8", "plan.zero=1", "plan.recompute=full"]
    rows = [
        (say("on the device"), common),
        (say("half on the host"), [*common, "plan.offload_optimizer=0.5"]),
        (say("on the host"), [*common, "plan.offload_optimizer=1"]),
    ]
    return _memory(_of_replicas("llama2-13b", 8, 1), _jobs("llama2-13b", 8, rows))


def tensor_parallel() -> Drawing:
    """The parts of a step by the degree of tensor parallelism, up to one that leaves the node."""
    rows = [
        (
            f"tp {tp}",
            [
                f"plan.tp={tp}",
                f"plan.dp={16 // tp}",
                f"plan.sequence_parallel={str(tp > 1).lower()}",
                "plan.zero=1",
                "plan.microbatch_size=1",
                "model.kv_heads=32",
            ],
        )
        for tp in (1, 2, 4, 8, 16)
    ]
    bars = [(label, _shares(job)) for label, job in _jobs(_MODEL, 16, rows)]
    title = say("{model} with 32 key heads on 16 {device}, nodes of 8: a step", model=_MODEL, device=_DEVICE)
    return StackedBars(title, bars, seconds_text).svg


def context_parallel() -> Drawing:
    """Memory of a long sequence by the degree of context parallelism."""
    rows = [
        (
            f"cp {cp}",
            [
                f"plan.cp={cp}",
                f"plan.dp={8 // cp}",
                "plan.zero=3",
                "plan.recompute=full",
                "model.sequence=131072",
                "batch.global_batch_size=8",
            ],
        )
        for cp in (1, 2, 4, 8)
    ]
    title = say("{model}, sequences of 131,072 tokens: memory of a rank", model=_MODEL)
    return _memory(title, _jobs(_MODEL, 8, rows))


def _schedule(name: str, virtual: int = 1, slow: SlowRank | None = None, microbatches: int = 8) -> Drawing:
    shape = PipelineShape(4, microbatches, virtual, num_steps=1, most_alive=0.0)
    timeline = study_schedule(name, shape, Work(1.0, 1.0, 1.0, 0.0), "none", slow=slow).timeline
    return lambda language: picture(timeline, name, _TIMELINE_PX, language)


def experts() -> Drawing:
    """The parts of a step by the degree of expert parallelism."""
    rows = [
        (f"ep {ep}", [f"plan.ep={ep}", "plan.dp=32", "plan.zero=1", "plan.recompute=full", "plan.microbatch_size=1"])
        for ep in (1, 2, 4, 8)
    ]
    return _memory(_of_replicas("mixtral-8x7b", 32), _jobs("mixtral-8x7b", 32, rows))


def recomputation() -> Drawing:
    """Memory by what is recomputed."""
    rows = [(policy, ["plan.dp=8", "plan.zero=1", *sets]) for policy, sets in RECOMPUTED.items()]
    return _memory(_of_replicas(_MODEL, 8, 1), _jobs(_MODEL, 8, rows))


def mixed_precision() -> Drawing:
    """Memory by number types."""
    rows = [
        ("float32", ["precision.compute=float32"]),
        (say("bf16, fp32 gradients"), ["precision.compute=bf16"]),
        (say("bf16, bf16 gradients"), ["precision.compute=bf16", "precision.gradients=compute"]),
    ]
    sized = [(label, [*sets, "plan.dp=8", "plan.zero=0", "plan.recompute=full"]) for label, sets in rows]
    return _memory(say("{model}, no sharding: memory of a rank", model=_MODEL), _jobs(_MODEL, 8, sized))


def choosing() -> Drawing:
    """The parts of a step under plans of several families, with as many devices."""
    common = ["plan.microbatch_size=1", "plan.recompute=full"]
    sharded = ["plan.zero=1", "plan.sequence_parallel=true", *common]
    rows = [
        ("dp 64, ZeRO 3", ["plan.dp=64", "plan.zero=3", *common]),
        ("tp 8, dp 8", ["plan.tp=8", "plan.dp=8", *sharded]),
        ("tp 4, pp 2, dp 8", ["plan.tp=4", "plan.pp=2", "plan.dp=8", *sharded]),
        ("pp 8, dp 8", ["plan.pp=8", "plan.dp=8", "plan.zero=1", *common]),
    ]
    bars = [(label, _shares(job)) for label, job in _jobs("llama2-70b", 64, rows)]
    title = say("{model} on 64 {device}: a step", model="llama2-70b", device=_DEVICE)
    return StackedBars(title, bars, seconds_text).svg


def failures() -> Drawing:
    """The shares of the time of a job, by its number of devices; a checkpoint takes a minute."""
    job = load("llama3-405b-16k").spec
    rows = Bars()
    for devices in (1024, 4096, 16384, 65536):
        between_s = 3600 * device_hours_between_failures(job.cluster) / devices
        reliability = Reliability(between_s, 60.0, job.cluster.restart_s)
        shares = goodput(reliability, best_interval_s(reliability))
        parts = {
            say("training"): shares.training,
            say("checkpoints"): shares.checkpoints,
            say("lost work"): shares.lost_work,
            say("restarts"): shares.restarts,
        }
        rows.append((counted_phrase(devices, "device"), {name: float(share) for name, share in parts.items()}))
    title = say("{device}, checkpoints of 60 s at the best interval: shares of the time", device=_DEVICE)
    return StackedBars(title, rows, whole_percent_text).svg


def checkpoint_interval() -> Drawing:
    """The shares of the time that checkpoints and failures take, by the interval between checkpoints."""
    title = say("llama3-405b on 16,384 devices, checkpoints of 56.8 s: time without training, by the interval")
    return StackedBars(title, time_lost(), percent_text).svg


def told_plan() -> Drawing:
    """A plan that is often told, and the memory that it needs; and with the width that makes the told size."""
    rows = [
        (say("hidden {width:,}", width=job.model.hidden), job)
        for job in (load(name).spec for name in ("gpt-100b-told", "gpt-100b-32xa100"))
    ]
    return _memory(say("25 of 100 layers on a GPU of 80 GB: memory of a rank"), rows)


FIGURES: Mapping[str, Callable[[], Drawing]] = {
    "memory-wall": memory_wall,
    "device-memory": device_memory,
    "ring-all-reduce": ring_all_reduce,
    "hierarchical": hierarchy_figure,
    "alpha-beta": alpha_beta,
    "data-parallel": data_parallel,
    "batch-size": batch_size,
    "compression": compression,
    "zero": zero,
    "tensor-parallel": tensor_parallel,
    "context-parallel": context_parallel,
    "pipeline-naive": lambda: _schedule("gpipe", microbatches=1),
    "pipeline-gpipe": lambda: _schedule("gpipe"),
    "pipeline-bubble": bubble_figure,
    "pipeline-versions": versions_figure,
    "tensor-or-pipeline": two_cuts_figure,
    "pipeline-1f1b": lambda: _schedule("1f1b"),
    "pipeline-interleaved": lambda: _schedule("interleaved-1f1b", 2),
    "pipeline-zb-h2": lambda: _schedule("zb-h2"),
    "pipeline-dualpipe": lambda: _schedule("dualpipe"),
    "tensor-cut": tensor_cut_figure,
    "placement-changes": placement_figure,
    "slow-rank": lambda: _schedule("1f1b", slow=SlowRank(2, 1.5)),
    "experts": experts,
    "recomputation": recomputation,
    "mixed-precision": mixed_precision,
    "narrow-numbers": narrow_numbers_figure,
    "mesh": mesh_rows_figure,
    "mesh-cube": mesh_cube_figure,
    "choosing": choosing,
    "choosing-tree": tree_figure,
    "choosing-branch": branch_picture,
    "told-plan": told_plan,
    "networks": ladder_figure,
    "network-shapes": network_shapes_figure,
    "offload": offload,
    "failures": failures,
    "checkpoint-interval": checkpoint_interval,
    "tensor-grids": grids_of_products,
    **{name: partial(system_figure, name) for name in SYSTEM_PLANS},
}
