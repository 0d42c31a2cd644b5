"""The figures of the pages, each computed when it is drawn: predictions of jobs, schedules, collectives, the mesh."""

from collections.abc import Callable, Mapping, Sequence

from shardwright.api.loaded_job import load
from shardwright.api.one_collective import CollectiveQuestion, one_collective
from shardwright.config.cluster_facts import device_entry, device_hours_between_failures
from shardwright.config.compression_facts import COMPRESSIONS
from shardwright.config.job import JobSpec
from shardwright.config.units import bytes_text, memory_text, seconds_text
from shardwright.cost.collective_time import ring_s
from shardwright.cost.failures import Reliability, best_interval_s, goodput
from shardwright.learn.playable_shares import time_lost
from shardwright.memory.job_memory import job_memory
from shardwright.planner.critical_batch import rebatched_tokens
from shardwright.planner.own_plan import estimate
from shardwright.report import svg
from shardwright.report.bars_picture import StackedBars
from shardwright.report.fit_verdict import device_room_bytes
from shardwright.report.timeline.picture import picture
from shardwright.report.timeline.study import study_schedule
from shardwright.schedule.pipeline_shape import PipelineShape
from shardwright.sharding.mesh import MeshShape
from shardwright.simulate.bubbles import Work
from shardwright.simulate.slow_rank import SlowRank

_DEVICE, _MODEL = "h100-sxm", "llama3-8b"
_GENERATIONS = ("v100-sxm-32g", "a100-sxm-80g", "h100-sxm", "h200-sxm", "b200-sxm")
_PARTS_OF_TIME = {
    "compute": "computing",
    "again": "recomputing",
    "tensor": "tensor parallel",
    "context": "context parallel",
    "expert": "experts",
    "data": "replicas",
    "messages": "messages",
    "bubble": "bubble",
    "optimizer": "update",
    "other": "the rest",
}

Rows = Sequence[tuple[str, Sequence[str]]]  # label, overrides of a job


def _jobs(model: str, devices: int, rows: Rows) -> list[tuple[str, JobSpec]]:
    """One model under several plans, on as many devices."""
    return [(label, load(model, *sets, devices=devices, device=_DEVICE).spec) for label, sets in rows]


def _memory(title: str, jobs: Sequence[tuple[str, JobSpec]]) -> str:
    """Bars of what a plan holds on its fullest rank by kind, beside the memory that a plan can fill."""
    bars = []
    for label, job in jobs:
        fullest = max((rank.as_dict() for rank in job_memory(job)), key=lambda sizes: sizes["total_bytes"])
        kinds = {key.removesuffix("_bytes"): float(size) for key, size in fullest.items() if size}
        bars.append((label, {kind: size for kind, size in kinds.items() if kind not in ("total", "host")}))
    room = device_room_bytes(jobs[0][1]) or 0
    return StackedBars(title, bars, _memory_text, float(room), f"a plan can fill {memory_text(room)}").svg()


def _memory_text(size: float) -> str:
    return memory_text(round(size))


def _shares(job: JobSpec) -> dict[str, float]:
    """The seconds of a step by part."""
    step = estimate(job).step
    return {name: float(getattr(step, part)) for part, name in _PARTS_OF_TIME.items() if getattr(step, part) > 0}


def memory_wall() -> str:
    """FLOPs that a device can do for each byte that its memory delivers, by generation."""
    devices = [device_entry(name) for name in _GENERATIONS]
    rows = [
        (
            device.name,
            {
                "FLOP a byte": device.peak_tflops.get("bfloat16", device.peak_tflops["float16"])
                * 1e3
                / device.memory_gb_per_s
            },
        )
        for device in devices
    ]
    return StackedBars("FLOP by byte of memory traffic, 16 bits", rows, "{:.0f}".format).svg()


def device_memory() -> str:
    """The memory of one rank that holds a whole model, by kind."""
    rows = [("one h100-sxm", ["plan.dp=1", "plan.zero=0"])]
    return _memory(f"{_MODEL} on one device: weights, gradients, AdamW, activations", _jobs(_MODEL, 1, rows))


def ring_all_reduce() -> str:
    """The pieces of each rank after each step of a ring."""
    return one_collective(CollectiveQuestion("all-reduce", 2**30, 4, _DEVICE)).svg()


def alpha_beta() -> str:
    """The bandwidth that an all-reduce reaches by the size of the tensor."""
    sizes = [2**power for power in range(10, 33)]
    lines = []
    for number, ranks in enumerate((2, 8, 64)):
        collective = one_collective(CollectiveQuestion("all-reduce", sizes[0], ranks, _DEVICE)).priced
        seconds = [float(ring_s(collective.rates, collective.group, size, 2)) for size in sizes]
        points = [(float(place), size / seconds[place] / 1e9) for place, size in enumerate(sizes)]
        lines.append(svg.Line(f"{ranks} ranks", points, svg.LINE_COLOURS[number]))
    ticks = {float(place): bytes_text(size) for place, size in enumerate(sizes) if place % 5 == 0}
    box = svg.Box(64, 70, 860, 240)
    most = max(y for line in lines for _, y in line.points)
    chart = svg.LineChart("all-reduce on h100-sxm: GB/s of the tensor, by its size", box, lines, most, ticks=ticks)
    return svg.document("bandwidth by size", 960, 350, [*chart.drawn(), *svg.legend(64, 30, lines)])


def networks() -> str:
    """Bandwidth of a device's links in one direction."""
    rows = []
    for name in _GENERATIONS:
        device = device_entry(name)
        links = {
            device.link_name: device.link_gb_per_s,
            "network": device.network_gb_per_s,
            "host": device.host_gb_per_s,
        }
        rows += [(f"{name}, {link}", {"GB/s": rate}) for link, rate in links.items() if rate]
    return StackedBars("GB/s in one direction, as stated", rows, "{:g}".format).svg()


def data_parallel() -> str:
    """The share of each part of a step as replicas divide one batch."""
    bars = []
    for devices in (8, 32, 128, 256):
        sets = ["plan.zero=1", f"plan.dp={devices}", "batch.global_batch_size=256", "plan.recompute=full"]
        ((label, job),) = _jobs("llama-7b", devices, [(f"{devices} replicas", sets)])
        parts = _shares(job)
        bars.append((label, {name: seconds / sum(parts.values()) for name, seconds in parts.items()}))
    return StackedBars("llama-7b, 256 sequences a step: share of the step", bars, "{:.0%}".format).svg()


def batch_size() -> str:
    """The tokens to one loss, by the batch."""
    bars = []
    for times in (0.25, 0.5, 1.0, 2.0, 4.0):
        more = rebatched_tokens(1.0, 0.0, times, 1.0) - 1.0
        bars.append((f"{times:g} x the critical batch", {"the fewest tokens": 1.0, "more": more}))
    return StackedBars("Tokens to one loss, as a multiple of the fewest", bars, "{:.3g} x".format).svg()


def compression() -> str:
    """The parts of a step on a slow network, by what is sent of gradients."""
    sets = [
        *("plan.dp=32", "plan.zero=0", "plan.recompute=full", "plan.microbatch_size=4"),
        *("plan.recompute_every=1", "plan.offload_optimizer=0"),
        *("batch.global_batch_size=512", "cluster.inter_node.bandwidth_gb_per_s=1.25"),
    ]
    bars = []
    for method in COMPRESSIONS:
        job = load("gpt2-xl", *sets, f"plan.compress={method}", devices=32, device="a100-sxm-40g").spec
        bars.append((method, _shares(job)))
    return StackedBars("gpt2-xl on 4 nodes of 8 A100, 10 Gbit/s between them: a step", bars, seconds_text).svg()


def zero() -> str:
    """Memory by the stage of ZeRO."""
    rows = [(f"ZeRO {stage}", ["plan.dp=8", f"plan.zero={stage}"]) for stage in range(4)]
    return _memory(f"{_MODEL} on 8 replicas: memory of a rank", _jobs(_MODEL, 8, rows))


def offload() -> str:
    """Memory with and without the optimizer's state on the device."""
    common = ["plan.dp=8", "plan.zero=1", "plan.recompute=full"]
    rows = [
        ("on the device", common),
        ("half on the host", [*common, "plan.offload_optimizer=0.5"]),
        ("on the host", [*common, "plan.offload_optimizer=1"]),
    ]
    return _memory("llama2-13b on 8 replicas, ZeRO 1: memory of a rank", _jobs("llama2-13b", 8, rows))


def tensor_parallel() -> str:
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
    return StackedBars(f"{_MODEL} with 32 key heads on 16 h100-sxm, nodes of 8: a step", bars, seconds_text).svg()


def context_parallel() -> str:
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
    return _memory(f"{_MODEL}, sequences of 131,072 tokens: memory of a rank", _jobs(_MODEL, 8, rows))


def _schedule(name: str, virtual: int = 1, slow: SlowRank | None = None) -> str:
    shape = PipelineShape(4, 8, virtual, num_steps=1, most_alive=0.0)
    return picture(study_schedule(name, shape, Work(1.0, 1.0, 1.0, 0.0), "none", slow=slow).timeline, name)


def experts() -> str:
    """The parts of a step by the degree of expert parallelism."""
    rows = [
        (f"ep {ep}", [f"plan.ep={ep}", "plan.dp=32", "plan.zero=1", "plan.recompute=full", "plan.microbatch_size=1"])
        for ep in (1, 2, 4, 8)
    ]
    return _memory("mixtral-8x7b on 32 replicas: memory of a rank", _jobs("mixtral-8x7b", 32, rows))


def recomputation() -> str:
    """Memory by what is recomputed."""
    rows = [
        (policy, ["plan.dp=8", "plan.zero=1", f"plan.recompute={policy}"]) for policy in ("none", "selective", "full")
    ]
    return _memory(f"{_MODEL} on 8 replicas, ZeRO 1: memory of a rank", _jobs(_MODEL, 8, rows))


def mixed_precision() -> str:
    """Memory by number types."""
    rows = [
        ("float32", ["precision.compute=float32"]),
        ("bf16, fp32 gradients", ["precision.compute=bf16"]),
        ("bf16, bf16 gradients", ["precision.compute=bf16", "precision.gradients=compute"]),
    ]
    sized = [(label, [*sets, "plan.dp=8", "plan.zero=0", "plan.recompute=full"]) for label, sets in rows]
    return _memory(f"{_MODEL}, no sharding: memory of a rank", _jobs(_MODEL, 8, sized))


def mesh() -> str:
    """Ranks as cells: columns are nodes, and colours are stages; the tensor-parallel group of rank 0 is framed."""
    job = load(_MODEL, "plan.pp=2", "plan.tp=4", "plan.dp=4", "plan.zero=1", devices=32, device=_DEVICE)
    shape = MeshShape.of(job.spec.plan)
    node, cell = 8, 58.0
    drawn = [svg.text(16, 24, "pp 2 x dp 4 x tp 4 on 4 nodes of 8: a row is a node, a colour a stage", "name", 13)]
    for rank in range(shape.world):
        place = shape.coordinates(rank)
        x, y = 70 + (rank % node) * (cell + 6), 50 + (rank // node) * (cell - 14)
        drawn.append(
            f'<rect x="{svg.px(x)}" y="{svg.px(y)}" width="{cell:g}" height="{cell - 22:g}" rx="4" '
            f'fill="{svg.LINE_COLOURS[place["pp"]]}" fill-opacity="{0.25 + 0.18 * place["dp"]:.2f}"/>'
        )
        drawn.append(svg.text(x + cell / 2, y + 15, f"rank {rank}", "name", 11, "middle"))
        drawn.append(
            svg.text(x + cell / 2, y + 28, f"p{place['pp']} d{place['dp']} t{place['tp']}", "name", 10, "middle")
        )
        if rank % node == 0:
            drawn.append(svg.text(60, y + 22, f"node {rank // node}", anchor="end"))
    return svg.document("mesh", 70 + node * (cell + 6) + 10, 50 + shape.world // node * (cell - 14) + 8, drawn)


def choosing() -> str:
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
    return StackedBars("llama2-70b on 64 h100-sxm: a step", bars, seconds_text).svg()


def failures() -> str:
    """The shares of the time of a job, by its number of devices; a checkpoint takes a minute."""
    job = load("llama3-405b-16k").spec
    rows = []
    for devices in (1024, 4096, 16384, 65536):
        between_s = 3600 * device_hours_between_failures(job.cluster) / devices
        reliability = Reliability(between_s, 60.0, job.cluster.restart_s)
        shares = goodput(reliability, best_interval_s(reliability))
        parts = {"training": shares.training, "checkpoints": shares.checkpoints, "lost work": shares.lost_work}
        row = {name: float(share) for name, share in (parts | {"restarts": shares.restarts}).items()}
        rows.append((f"{devices:,} devices", row))
    title = "h100-sxm, checkpoints of 60 s at the best interval: shares of the time"
    return StackedBars(title, rows, lambda share: f"{share:.0%}").svg()


def checkpoint_interval() -> str:
    """The shares of the time that checkpoints and failures take, by the interval between checkpoints."""
    title = "llama3-405b on 16,384 devices, checkpoints of 56.8 s: time without training, by the interval"
    return StackedBars(title, time_lost(), "{:.1%}".format).svg()


def told_plan() -> str:
    """A plan that is often told, and the memory that it needs."""
    return _memory("gpt-100b-32xa100: 25 of 100 layers on a GPU", [("as told", load("gpt-100b-32xa100").spec)])


FIGURES: Mapping[str, Callable[[], str]] = {
    "memory-wall": memory_wall,
    "device-memory": device_memory,
    "ring-all-reduce": ring_all_reduce,
    "alpha-beta": alpha_beta,
    "data-parallel": data_parallel,
    "batch-size": batch_size,
    "compression": compression,
    "zero": zero,
    "tensor-parallel": tensor_parallel,
    "context-parallel": context_parallel,
    "pipeline-1f1b": lambda: _schedule("1f1b"),
    "pipeline-interleaved": lambda: _schedule("interleaved-1f1b", 2),
    "pipeline-zb-h2": lambda: _schedule("zb-h2"),
    "slow-rank": lambda: _schedule("1f1b", slow=SlowRank(2, 1.5)),
    "experts": experts,
    "recomputation": recomputation,
    "mixed-precision": mixed_precision,
    "mesh": mesh,
    "choosing": choosing,
    "told-plan": told_plan,
    "networks": networks,
    "offload": offload,
    "failures": failures,
    "checkpoint-interval": checkpoint_interval,
}
