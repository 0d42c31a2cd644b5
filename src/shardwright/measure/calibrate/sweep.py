"""The sizes to time and their repeats, and the sweep over them that all ranks run at the same time."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from itertools import product as combinations
from math import prod
from pathlib import Path
from typing import Literal, get_args

import torch

from shardwright.config.job import JobSpec
from shardwright.config.measured_table import Carried, Work
from shardwright.config.phrase import fixed, in_language, language_of_locale, say
from shardwright.config.units import GIB, counted_phrase
from shardwright.measure.calibrate.collective_probes import collective_call, copy_call, leak_call
from shardwright.measure.calibrate.measuring_place import Call, Place
from shardwright.measure.calibrate.operator_probes import ELEMENTWISE, attention_call, product_call
from shardwright.parallel.comm.collectives import all_reduce_max, barrier
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.build import build
from shardwright.train.step_metrics import measure_shares
from shardwright.train.train_step import train_step

# Besides the tables of a device: the samples for its constants.
Extra = Literal["leak", "copy", "host copy", "step"]
MORE_LAYERS = 6  # of a small job whose steps are timed, next to a job of a single layer
_SLOWEST_FP16 = 4.0  # slower than this ratio to float32, fp16 is emulated and not used


@dataclass(frozen=True)
class Sweep:
    """Sizes along each side, and the time for each point. Points with more FLOPs than `most_flops` are extrapolated
    from smaller ones."""

    product_rows: tuple[int, ...] = (32, 128, 512, 2048)
    product_sides: tuple[int, ...] = (64, 160, 384, 1024, 2560)
    lengths: tuple[int, ...] = (32, 128, 512, 2048)
    heads: tuple[int, ...] = (2, 8, 32)
    elements: tuple[int, ...] = (2**12, 2**15, 2**18, 2**20, 2**22)
    collective_bytes: tuple[int, ...] = (2**8, 2**14, 2**17, 2**20, 2**20 + 2**10, 2**22, 2**24, 2**26)
    most_flops: float = 2.2e9
    passes: int = 2
    point_s: float = 0.03
    numbers: tuple[str, ...] = ("float32", "bf16", "fp16")
    least_calls: int = 2
    is_quick: bool = False


QUICK = Sweep(
    product_rows=(64, 512),
    product_sides=(64, 384),
    lengths=(64, 256),
    heads=(2, 8),
    elements=(2**13, 2**18),
    collective_bytes=(2**10, 2**18, 2**22),
    most_flops=5e8,
    passes=1,
    point_s=0.0,
    numbers=("float32",),
    least_calls=1,
    is_quick=True,
)


# For a device whose products of 1e12 FLOPs take a millisecond, and whose caches hold 50 MB. No other programs run on
# it.
LARGE = Sweep(
    product_rows=(128, 1024, 8192, 16384),
    product_sides=(256, 1024, 4096, 14336),
    lengths=(128, 512, 2048, 8192),
    elements=(2**14, 2**18, 2**22, 2**25),
    collective_bytes=(2**10, 2**16, 2**20, 2**24, 2**27, 2**30),
    most_flops=1e12,
    passes=1,
    point_s=0.05,
    least_calls=3,
)


def sweep_on(machine: "Machine", sweep: Sweep) -> Sweep:
    """The sweep for a machine. On a device the largest tensor has a GiB in float32, or a tenth of its memory if that is
    less."""
    if machine.kind == "cpu" or sweep.is_quick:
        return sweep
    most_elements = int(min(GIB, machine.memory_bytes / 10)) // 4
    elements = (*(number for number in LARGE.elements if number < most_elements), most_elements)
    return replace(
        LARGE, elements=elements, collective_bytes=tuple(n for n in LARGE.collective_bytes if n <= 4 * most_elements)
    )


@dataclass(frozen=True)
class Machine:
    """The machine that is measured: a CPU, or a device with its name, its memory and the bytes of its driver's
    context."""

    kind: str = "cpu"
    name: str = ""
    memory_bytes: float = 0.0
    context_bytes: float = 0.0
    multiprocessors: int = 0


def machine_of(device: torch.device) -> Machine:
    """The description of a device. Its context is the used memory outside torch's allocator."""
    if device.type != "cuda":
        return Machine()
    properties = torch.cuda.get_device_properties(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    context = total_bytes - free_bytes - torch.cuda.memory_reserved(device)
    return Machine("cuda", properties.name, float(total_bytes), float(context), properties.multi_processor_count)


@dataclass(frozen=True)
class Probe:
    """A point to time: some work in a dtype at some sizes."""

    work: Work | Extra
    number: str
    sizes: tuple[int, ...]


Samples = dict[Probe, list[tuple[float, ...]]]


@dataclass
class RankReport:
    """The measurements of one rank, in their order; for a device also its description."""

    samples: Samples = field(default_factory=dict)
    numbers: list[str] = field(default_factory=list)
    machine: Machine = Machine()


def points(sweep: Sweep, numbers: list[str], ranks: int) -> Iterator[Probe]:
    """All points of a sweep with `ranks` ranks."""
    sides = sweep.product_sides
    for number in numbers:
        for rows, inner, columns in combinations(sweep.product_rows, sides, sides):
            if 2.0 * rows * inner * columns <= sweep.most_flops:
                yield Probe("product", number, (rows, inner, columns))
        for length, heads in combinations(sweep.lengths, sweep.heads):
            if 128.0 * length**2 * heads <= sweep.most_flops:
                yield Probe("attention", number, (length, heads))
        for work, elements in combinations(ELEMENTWISE, sweep.elements):
            yield Probe(work, number, (elements,))
    yield Probe("copy", "float32", (max(sweep.elements),))
    yield Probe("host copy", "float32", (max(sweep.elements),))
    if ranks > 1:
        for kind, num_bytes in combinations(get_args(Carried), sweep.collective_bytes):
            for number in numbers if kind in ("all_reduce", "reduce_scatter") else ["float32"]:
                yield Probe(kind, number, (ranks, num_bytes))
        yield Probe("leak", "float32", ())


def call_of(point: Probe, mesh: Mesh) -> Call:
    """The call that times a point. Ranks of an axis must time the same point at once."""
    axis = mesh.world
    place = Place.of(axis, mesh.device, point.number)
    if point.work in get_args(Carried):
        return collective_call(place, axis, point.work, point.sizes[1])  # type: ignore[arg-type]
    match point.work:
        case "product":
            return product_call(place, *point.sizes)
        case "attention":
            return attention_call(place, *point.sizes)
        case "leak":
            return leak_call(place, axis)
        case "copy" | "host copy":
            return copy_call(place, 4 * point.sizes[0], to_host=point.work == "host copy")
        case _:
            return ELEMENTWISE[point.work](place, *point.sizes)  # type: ignore[index]


def measure_machine(sweep: Sweep, job: JobSpec, mesh: Mesh, folder: Path) -> RankReport:
    """Run the whole sweep, several times over, and some of the job's steps. Every rank of the job calls this; its ranks
    share no layer. Rank 0 prints the progress on standard error."""
    sweep = sweep_on(machine_of(mesh.device), sweep)
    report = RankReport(numbers=computed_numbers(sweep.numbers, mesh))
    all_points = list(points(sweep, report.numbers, mesh.world.size))
    for number in range(sweep.passes):
        for (work, kind), group in groupby(all_points, key=lambda point: (point.work, point.number)):
            group_points, start_s = list(group), time.perf_counter()
            for point in group_points:
                samples = report.samples.setdefault(point, [])
                samples += _timed(partial(call_of, point, mesh), sweep, mesh)
            if mesh.rank == 0:
                taken_s = time.perf_counter() - start_s
                line = say(
                    "{ranks} busy, {number} of {passes}: {work} in {kind}: {sizes} in {seconds:.1f} s",
                    ranks=counted_phrase(mesh.world.size, "rank"),
                    number=number + 1,
                    passes=sweep.passes,
                    work=fixed(work),
                    kind=kind,
                    sizes=counted_phrase(len(group_points), "size"),
                    seconds=taken_s,
                )
                print(in_language(line, language_of_locale()), file=sys.stderr, flush=True)
    for layers in (1, MORE_LAYERS):
        deeper = job.model_copy(update={"model": job.model.model_copy(update={"layers": layers})})
        report.samples[Probe("step", "float32", (layers,))] = _steps(deeper, mesh, 10 * sweep.passes)
    report.machine = machine_of(mesh.device)  # with all that was loaded in the sweep
    return report


def _timed(make: Callable[[], Call], sweep: Sweep, mesh: Mesh) -> list[tuple[float, ...]]:
    """Samples of one point, equally many on all ranks, which begin together."""
    call = make()
    call()
    barrier(mesh.world)
    start_s = time.perf_counter()
    samples = [call()]
    longest = torch.tensor(time.perf_counter() - start_s, device=mesh.device)
    longest_s = float(all_reduce_max(longest.reshape(1), mesh.world))
    num_more = min(60, max(sweep.least_calls, round(sweep.point_s / max(1e-6, longest_s)))) - 1
    return samples + [call() for _ in range(num_more)]


def computed_numbers(numbers: tuple[str, ...], mesh: Mesh) -> list[str]:
    """The dtypes among `numbers` that the device computes in; the same on all ranks."""
    if "fp16" not in numbers or mesh.device.type == "cuda":
        return list(numbers)
    without_fp16 = [number for number in numbers if number != "fp16"]
    seconds = []
    for number in ("float32", "fp16"):
        call = product_call(Place.of(mesh.world, mesh.device, number), 128, 256, 256)
        seconds.append(min(sum(call()) for _ in range(4)))
    ratio = torch.tensor([seconds[1] / seconds[0]])
    return [*without_fp16, "fp16"] if float(all_reduce_max(ratio, mesh.world)) < _SLOWEST_FP16 else without_fp16


def _steps(job: JobSpec, mesh: Mesh, count: int) -> list[tuple[float, ...]]:
    """Seconds of steps of the job, with the metrics that a run measures after each."""
    replica = build(job, mesh)
    shape = (job.batch.global_batch_size // job.plan.dp, job.model.sequence + 1)
    tokens_BS = torch.randint(job.model.vocab, shape).to(mesh.device)
    seconds: list[tuple[float, ...]] = []
    for step in range(count):
        barrier(mesh.world)
        start_s = time.perf_counter()
        train_step(replica, step, tokens_BS)
        measure_shares(mesh, 1.0)
        seconds.append((time.perf_counter() - start_s,))
    return seconds[2:]


def undisturbed(samples: list[tuple[float, ...]]) -> tuple[float, ...]:
    """The first quartile of each part of a call: its time if other programs do not disturb the machine."""
    return tuple(sorted(part)[len(part) // 4] for part in zip(*samples, strict=True))


def spread(samples: list[tuple[float, ...]]) -> float:
    """Half the distance of the quartiles of the calls' total times, as a share of their median."""
    totals = sorted(map(sum, samples))
    low, middle, high = (totals[round(share * (len(totals) - 1))] for share in (0.25, 0.5, 0.75))
    return (high - low) / 2 / middle if middle else 0.0


def num_calls(samples: Samples) -> int:
    """Number of calls that were timed."""
    return sum(map(len, samples.values()))


def work_of(point: Probe) -> float:
    """The amount of work of a point, for rates: FLOPs of a product, bytes of a collective or a copy, else elements."""
    return 2.0 * prod(point.sizes) if point.work == "product" else float(point.sizes[-1]) if point.sizes else 0.0
