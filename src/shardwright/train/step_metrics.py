"""The metrics of a step: its line in metrics.jsonl, and where their numbers come from.

Shares of a step are means over all ranks: computing, blocked in collectives (exposed communication), and idle in the
pipeline (waiting for another stage).
"""

import math
import resource
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from shardwright.config import catalog
from shardwright.config.cluster import ClusterSpec, DeviceSpec
from shardwright.config.cluster_facts import network_gb_per_s, node_gb_per_s
from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.phrase import say
from shardwright.parallel.comm.collectives import all_reduce, all_reduce_max
from shardwright.parallel.comm.ledger import BETWEEN, INSIDE, Ledger
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.health.gpu_readings import GpuReading
from shardwright.train.health.step_judge import StepCounts
from shardwright.train.train_step import StepResult


@dataclass(frozen=True)
class Shares:
    """The shares of a step, as means over ranks; the largest peak memory of any rank; the bytes that compression saved
    on all ranks; and the bytes that all ranks sent: inside nodes, between nodes, and both again for experts alone. None
    if nodes are unknown."""

    compute: float
    exposed_communication: float
    pipeline_idle: float
    peak_memory_bytes: int
    compression_bytes_saved: int
    sent_bytes: tuple[int, int, int, int] | None = None


@dataclass(frozen=True)
class MeasuredStep:
    """The number and the result of a step, its time and shares, the counts of the run up to it, and readings of the
    GPUs after it."""

    step: int
    result: StepResult
    step_s: float
    shares: Shares
    counts: StepCounts = field(default_factory=StepCounts)
    gpus: Sequence[GpuReading] = ()


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl.

    `loss` is None if no token of the step has one, `mfu` if the device's peak rate is unknown, `grad_norm` if none was
    computed, `loss_scale` if the loss is not scaled, and `compression_bytes_saved`, a sum over all ranks, if gradients
    are not compressed. The bytes that all ranks sent, by kind of link, and the part of these bytes that dispatched
    tokens to experts and back are None if cluster.devices_per_node does not define nodes. A `skipped` step changed no
    weight; `skipped_because` is "overflow" (fp16), "not finite", "spike" or "no target". `num_skipped` and `num_spikes`
    count up to this step. `mtp_losses` are the losses of further tokens, which `loss` does not contain, None without
    any. Link use is the used share of the bandwidth of the cluster's links, None if that is unknown (link_use).
    `gpus` are readings of rank 0's node at progress lines (gpu_readings.py). `experts` has an entry for each layer with
    experts, None without any; in steps with a progress line an entry also counts the experts chosen together. A number
    that is not finite is written as null.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float
    step_s: float
    tokens_per_s: float
    mfu: float | None
    compute_share: float
    exposed_communication_share: float
    pipeline_idle_share: float
    peak_memory_bytes: int
    loss_scale: float | None
    skipped: bool
    skipped_because: str | None
    num_skipped: int
    num_spikes: int
    compression_bytes_saved: int | None
    inside_nodes_bytes: int | None
    between_nodes_bytes: int | None
    experts_inside_nodes_bytes: int | None
    experts_between_nodes_bytes: int | None
    inside_link_use: float | None
    between_link_use: float | None
    gpus: list[dict[str, Any]] | None
    experts: list[dict[str, Any]] | None
    mtp_losses: list[float | None] | None

    @classmethod
    def of(cls, measured: MeasuredStep, job: JobSpec, peak_flops: float | None, with_pairs: bool) -> "StepMetrics":
        """The metrics of a step of a job on devices of this peak rate; with experts chosen together if `with_pairs`."""
        result, shares, step_s = measured.result, measured.shares, measured.step_s
        tokens_per_s = job.at_step(measured.step - 1).tokens_per_step / step_s
        flops_per_s = shape_of(job.model).flops_per_token() * tokens_per_s
        inside, between, experts_inside, experts_between = shares.sent_bytes or (None, None, None, None)
        inside_use, between_use = link_use(
            shares.sent_bytes[:2] if shares.sent_bytes is not None else None, step_s, job.plan.world, job.cluster
        )
        return cls(
            measured.step,
            result.loss,
            result.grad_norm,
            result.learning_rate,
            step_s=step_s,
            tokens_per_s=tokens_per_s,
            mfu=flops_per_s / peak_flops if peak_flops else None,
            compute_share=shares.compute,
            exposed_communication_share=shares.exposed_communication,
            pipeline_idle_share=shares.pipeline_idle,
            peak_memory_bytes=shares.peak_memory_bytes,
            loss_scale=result.loss_scale,
            skipped=result.skipped,
            skipped_because=(result.decision.cause or "overflow") if result.skipped else None,
            num_skipped=measured.counts.skipped,
            num_spikes=measured.counts.spikes,
            compression_bytes_saved=None if job.plan.compress == "none" else shares.compression_bytes_saved,
            inside_nodes_bytes=inside,
            between_nodes_bytes=between,
            experts_inside_nodes_bytes=experts_inside,
            experts_between_nodes_bytes=experts_between,
            inside_link_use=inside_use,
            between_link_use=between_use,
            gpus=[asdict(gpu) for gpu in measured.gpus] or None,
            experts=[layer.numbers(with_pairs=with_pairs) for layer in result.routing] or None,
            mtp_losses=[finite_or_none(loss) for loss in result.mtp_losses] or None,
        )


def finite_or_none(value: Any) -> Any:
    """A value as JSON can have it: a number that is not finite is None, also in lists and by name."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite_or_none(part) for name, part in value.items()}
    return [finite_or_none(part) for part in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class OwnShares:
    """This rank's part of the shares of a span: its seconds, its seconds blocked by axis, its peak memory so far, and
    in one step the bytes that compression saved and those that it sent, as in Shares."""

    span_s: float
    blocked_s: Mapping[str, float]
    peak_memory_bytes: int
    compression_bytes_saved: float
    sent_bytes: tuple[float, ...]


def sent_bytes_of_step(ledger: Ledger, num_steps: int) -> tuple[float, ...]:
    """The bytes that this rank sent in the mean step of a ledger: by kind of link, and both again for experts alone."""
    return tuple(ledger.sent_bytes(link, axis) / num_steps for axis in (None, "ep") for link in (INSIDE, BETWEEN))


def measure_shares(mesh: Mesh, span_s: float, compression_bytes_saved: float = 0.0, num_steps: int = 1) -> Shares:
    """Sum the ledgers of all ranks over `num_steps` steps, which took `span_s`, and the bytes that compression saved in
    a step. Moves two small all-reduces over the world."""
    peak_bytes, sent_bytes = peak_memory_bytes(mesh.device), sent_bytes_of_step(mesh.ledger, num_steps)
    own = OwnShares(span_s, mesh.ledger.blocked_s(), peak_bytes, compression_bytes_saved, sent_bytes)
    return summed_shares(mesh, [own])[0]


def summed_shares(mesh: Mesh, spans: Sequence[OwnShares]) -> list[Shares]:
    """The shares of some spans over all ranks, for which the host waits once. Moves two small all-reduces over the
    world."""
    rows = []
    for span in spans:
        idle_s = span.blocked_s.get("pp", 0.0)
        exposed_s = sum(seconds for axis, seconds in span.blocked_s.items() if axis != "pp")
        rows.append([exposed_s, idle_s, span.span_s, span.compression_bytes_saved, *span.sent_bytes])
    sums = torch.tensor(rows, dtype=torch.float64, device=mesh.device)
    peaks = torch.tensor([span.peak_memory_bytes for span in spans], dtype=torch.int64, device=mesh.device)
    all_reduce(sums, mesh.world)
    all_reduce_max(peaks, mesh.world)
    table = mesh.on_host_or_ones(torch.cat((sums, peaks.double()[:, None]), dim=1))
    return [_shares_of(numbers, has_nodes=bool(mesh.ledger.ranks_per_node)) for numbers in table.tolist()]


def _shares_of(numbers: Sequence[float], has_nodes: bool) -> Shares:
    exposed_s, idle_s, total_s, saved_bytes, *sent, peak_bytes = numbers
    exposed, idle = exposed_s / total_s, idle_s / total_s
    inside, between, experts_inside, experts_between = map(round, sent)
    return Shares(
        1.0 - exposed - idle,
        exposed,
        idle,
        int(peak_bytes),
        compression_bytes_saved=round(saved_bytes),
        sent_bytes=(inside, between, experts_inside, experts_between) if has_nodes else None,
    )


def peak_memory_bytes(device: torch.device) -> int:
    """The peak memory so far: of the allocator on CUDA, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_title(device: torch.device) -> str:
    """The name of a device for people."""
    return say("this CPU") if device.type == "cpu" else torch.cuda.get_device_name(device)


def known_device(job: JobSpec, device: torch.device) -> DeviceSpec | None:
    """The catalog's entry of this device, None if the catalog has none."""
    specs = [DeviceSpec(**catalog.read("devices", name)) for name in catalog.names("devices")]
    if device.type != "cuda":
        return next((spec for spec in specs if spec.name == job.cluster.device), None)
    name = torch.cuda.get_device_name(device)
    return next((spec for spec in specs if name in spec.cuda_names), None)


def job_peak_flops(job: JobSpec, device: DeviceSpec) -> float | None:
    """The peak rate of all ranks together in the number type of the job's products, in FLOP/s; None if unknown.

    A device without fp8 products emulates them in the number type of the computation.
    """
    rate = device.peak_flops(job.precision.product_number) or device.peak_flops(job.precision.compute)
    return rate * job.plan.world if rate else None


def link_use(
    sent_bytes: tuple[int, int] | None, step_s: float, world: int, cluster: ClusterSpec
) -> tuple[float | None, float | None]:
    """The shares of the bandwidth of all ranks' links that a step uses, inside nodes and between them. A share is None
    if neither the cluster nor the catalog's entry of its device states the bandwidth, or if the bytes are unknown.

    `sent_bytes` are the bytes that all ranks send in one step, inside nodes and between them. The bandwidth is that of
    one device in one direction. In a cluster of several parts links differ, and both shares are None.
    """
    if sent_bytes is None or step_s <= 0 or cluster.parts:
        return None, None
    inside, between = (
        num_bytes / (world * rate * 1e9 * step_s) if rate else None
        for num_bytes, rate in zip(sent_bytes, (node_gb_per_s(cluster), network_gb_per_s(cluster)), strict=True)
    )
    return inside, between
