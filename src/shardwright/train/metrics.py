"""The output of a running job: a JSONL file, TensorBoard, and progress lines with the remaining time.

Only rank 0 writes. Shares of a step are means over all ranks: computing, blocked in collectives (exposed
communication), and idle in the pipeline (waiting for another stage).
"""

import json
import math
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from shardwright.config import catalog
from shardwright.config.base import RunError, printable
from shardwright.config.cluster import DeviceSpec
from shardwright.config.data import HELD_OUT
from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.units import MIB
from shardwright.config.user_file import open_file
from shardwright.parallel.comm.collectives import all_reduce, all_reduce_max
from shardwright.parallel.comm.ledger import BETWEEN, INSIDE
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.sharding.memory_account import RankMemory
from shardwright.train.health.gpu_readings import GpuReading
from shardwright.train.health.link_use import link_use
from shardwright.train.health.step_judge import StepCounts
from shardwright.train.launch.full_disk import quiet_writers, telling_of_full_disk
from shardwright.train.router_update import in_words
from shardwright.train.run_files import BOARD, METRICS, open_to_append, write_anew
from shardwright.train.steps_measured import measured_lines
from shardwright.train.train_step import StepResult


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl.

    `loss` is None if no token of the step has one, `mfu` if the device's peak rate is unknown, `grad_norm` if none was
    computed, `loss_scale` if the loss is not scaled, and `compression_bytes_saved`, a sum over all ranks, if gradients
    are not compressed. The bytes that all ranks sent, by kind of link, and the part of these bytes that dispatched
    tokens to experts and back are None if cluster.devices_per_node does not define nodes. A `skipped` step changed no
    weight; `skipped_because` is "overflow" (fp16), "not finite", "spike" or "no target". `num_skipped` and `num_spikes`
    count up to this step. `mtp_losses` are the losses of further tokens, which `loss` does not contain, None without
    any. Link use is the used share of the bandwidth of the cluster's links, None if that is unknown (link_use.py).
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


def measure_shares(mesh: Mesh, span_s: float, compression_bytes_saved: float = 0.0, num_steps: int = 1) -> Shares:
    """Sum the ledgers of all ranks over `num_steps` steps, which took `span_s`, and the bytes that compression saved in
    a step. Moves two small all-reduces over the world."""
    blocked_s = mesh.ledger.blocked_s()
    idle_s = blocked_s.pop("pp", 0.0)
    sent = [mesh.ledger.sent_bytes(link, axis) / num_steps for axis in (None, "ep") for link in (INSIDE, BETWEEN)]
    numbers = [sum(blocked_s.values()), idle_s, span_s, compression_bytes_saved, *sent]
    sums = torch.tensor(numbers, dtype=torch.float64, device=mesh.device)
    peak = torch.tensor([peak_memory_bytes(mesh.device)], dtype=torch.int64, device=mesh.device)
    all_reduce(sums, mesh.world)
    all_reduce_max(peak, mesh.world)
    *numbers, peak_bytes = mesh.numbers(torch.cat((sums, peak.double())))
    exposed_s, idle_s, total_s, saved_bytes, *sent = numbers
    exposed, idle = exposed_s / total_s, idle_s / total_s
    inside, between, experts_inside, experts_between = map(round, sent)
    return Shares(
        1.0 - exposed - idle,
        exposed,
        idle,
        int(peak_bytes),
        compression_bytes_saved=round(saved_bytes),
        sent_bytes=(inside, between, experts_inside, experts_between) if mesh.ledger.ranks_per_node else None,
    )


def peak_memory_bytes(device: torch.device) -> int:
    """The peak memory so far: of the allocator on CUDA, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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


class MetricsLog:
    """Writes metrics of steps and evaluations to a run's folder, and the progress line to `out` or standard output."""

    def __init__(self, job: JobSpec, mesh: Mesh, folder: Path, first_step: int = 0, out: TextIO | None = None) -> None:
        """Go on after `first_step` steps: drop what the files have of later steps."""
        from torch.utils.tensorboard import SummaryWriter  # takes a second, on rank 0 alone

        self._job = job
        self._out = out or sys.stdout
        device = known_device(job, mesh.device)
        self.device_name = device.name if device is not None else ""  # the catalog's
        self._peak_flops = job_peak_flops(job, device) if device is not None else None
        self._path, self._board_folder = folder / METRICS, folder / BOARD
        quiet_writers()
        with telling_of_full_disk(self._board_folder):
            folder.mkdir(parents=True, exist_ok=True)
            _keep_until(self._path, first_step)
            self._file = open_to_append(self._path)
            self._board = SummaryWriter(str(self._board_folder), purge_step=first_step + 1 if first_step else None)
        self._recent_s: list[float] = []
        if self._peak_flops is None:
            device_text = "this CPU" if mesh.device.type == "cpu" else torch.cuda.get_device_name(mesh.device)
            number = job.precision.product_number
            self.say(f"MFU is not shown: the catalog of devices has no peak rate for {device_text} in {number}")

    def say(self, text: str) -> None:
        """Print a line for the user. Raises RunError if that fails."""
        try:
            print(printable(text), file=self._out, flush=True)
        except OSError as error:
            raise RunError(f"standard output can't be written: {error.strerror}") from None

    def step(
        self, step: int, result: StepResult, step_s: float, shares: Shares, counts: StepCounts | None = None,
        gpus: Sequence[GpuReading] = (),
    ) -> None:  # fmt: skip
        """Record one step, with the counts of the run up to it. Print a progress line every run.log_every steps."""
        tokens_per_s = self._job.at_step(step - 1).tokens_per_step / step_s
        flops_per_s = shape_of(self._job.model).flops_per_token() * tokens_per_s
        mfu = flops_per_s / self._peak_flops if self._peak_flops else None
        total = self._job.optimizer.steps
        is_shown = step % self._job.run.log_every == 0 or step == total
        inside, between, experts_inside, experts_between = shares.sent_bytes or (None, None, None, None)
        counts, sent = counts or StepCounts(), shares.sent_bytes[:2] if shares.sent_bytes is not None else None
        inside_use, between_use = link_use(sent, step_s, self._job.plan.world, self._job.cluster)
        metrics = StepMetrics(
            step,
            result.loss,
            result.grad_norm,
            result.learning_rate,
            step_s=step_s,
            tokens_per_s=tokens_per_s,
            mfu=mfu,
            compute_share=shares.compute,
            exposed_communication_share=shares.exposed_communication,
            pipeline_idle_share=shares.pipeline_idle,
            peak_memory_bytes=shares.peak_memory_bytes,
            loss_scale=result.loss_scale,
            skipped=result.skipped,
            skipped_because=(result.decision.cause or "overflow") if result.skipped else None,
            num_skipped=counts.skipped,
            num_spikes=counts.spikes,
            compression_bytes_saved=None if self._job.plan.compress == "none" else shares.compression_bytes_saved,
            inside_nodes_bytes=inside,
            between_nodes_bytes=between,
            experts_inside_nodes_bytes=experts_inside,
            experts_between_nodes_bytes=experts_between,
            inside_link_use=inside_use,
            between_link_use=between_use,
            gpus=[asdict(gpu) for gpu in gpus] or None,
            experts=[layer.numbers(with_pairs=is_shown) for layer in result.routing] or None,
            mtp_losses=[loss if _is_number(loss) else None for loss in result.mtp_losses] or None,
        )
        self._write(asdict(metrics))
        scalars = {name: value for layer in result.routing for name, value in layer.scalars().items()}
        mtp_losses = enumerate(result.mtp_losses)
        scalars |= {f"loss/{k + 2} tokens further": loss for k, loss in mtp_losses if loss is not None}
        self._draw(step, {name: value for name, value in scalars.items() if math.isfinite(value)})
        self._recent_s = [*self._recent_s[-19:], step_s]
        if is_shown:
            left_s = (total - step) * sum(self._recent_s) / len(self._recent_s)
            rate_text = f"{tokens_per_s:,.0f} tok/s" + (f" mfu {mfu:.1%}" if mfu is not None else "")
            self.say(
                f"step {step:>{len(str(total))}}/{total}  {_loss_text(result.loss)}  "
                + (f"grad {result.grad_norm:.3f}  " if result.grad_norm is not None else "")
                + f"lr {result.learning_rate:.2e}  {_what_applies(metrics, result)}"
                f"{rate_text}  compute {shares.compute:.0%} communication {shares.exposed_communication:.0%} "
                f"idle {shares.pipeline_idle:.0%}  {shares.peak_memory_bytes / MIB:,.0f} MiB  "
                f"left {_minutes(left_s)}"
            )

    def evaluation(self, step: int, losses: Mapping[str, float | None]) -> None:
        """Record an evaluation: the loss on each set by the set's name, None if none of its tokens has a loss."""
        set_losses = {name: loss for name, loss in losses.items() if name != HELD_OUT}
        values: dict[str, Any] = {"step": step}
        if HELD_OUT in losses:
            values["validation_loss"] = losses[HELD_OUT]
        if set_losses:
            values["validation_losses"] = {name: _finite_or_none(loss) for name, loss in set_losses.items()}
        self._write(values)
        points = {f"validation_loss/{name}": _finite_or_none(loss) for name, loss in set_losses.items()}
        self._draw(step, {name: loss for name, loss in points.items() if loss is not None})
        for name, loss in losses.items():
            no_loss = f"there is no {held_out_of(name)}: none of its tokens has one"
            self.say(f"step {step}: {no_loss if loss is None else f'{held_out_of(name)} {loss:.4f}'}")

    def checkpoint(self, step: int, blocking_s: float, durable_s: float) -> None:
        """Record a checkpoint that is durable."""
        self._note({"checkpoint": {"step": step, "blocking_s": blocking_s, "durable_s": durable_s}})
        self.say(f"step {step} is saved: the run waited {blocking_s:.3f} s, all was durable after {durable_s:.2f} s")

    def go_back(self, step: int) -> None:
        """Let the run go on after this step: drop what was recorded of later steps."""
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        with telling_of_full_disk(self._path):
            _keep_until(self._path, step, with_memory=True)
            self._file = open_to_append(self._path)
            self._board = SummaryWriter(str(self._board_folder), purge_step=step + 1)

    def memory(self, predicted: Sequence[RankMemory], measured: Sequence[RankMemory]) -> None:
        """Record the memory account, once: predicted and measured memory of each pipeline rank in one line. Measured
        activations are 0."""
        account = {"predicted": [m.as_dict() for m in predicted], "measured": [m.as_dict() for m in measured]}
        self._note({"memory": account})
        for line in measured_lines(predicted, measured):
            self.say(line)

    def _write(self, values: dict[str, Any]) -> None:
        self._note(values)
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float) and name != "step"}
        self._draw(values["step"], {name: value for name, value in numbers.items() if math.isfinite(value)})

    def _note(self, values: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        with telling_of_full_disk(self._path):
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()

    def _draw(self, step: int, values: dict[str, float]) -> None:
        """Add points to TensorBoard's curves."""
        with telling_of_full_disk(self._board_folder):
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the files."""
        with telling_of_full_disk(self._path):
            self._file.close()
        with telling_of_full_disk(self._board_folder):
            self._board.close()


def held_out_of(name: str) -> str:
    """The name of a set's loss in a printed line."""
    return "held-out loss" if name == HELD_OUT else f"held-out loss of {name}"


def _finite_or_none(loss: float | None) -> float | None:
    return loss if loss is not None and math.isfinite(loss) else None


def _keep_until(path: Path, step: int, with_memory: bool = False) -> None:
    """Drop from a metrics file the lines of later steps, an unfinished last line of a broken run, and unless
    `with_memory` the memory account, which a resumed run records again."""
    lines = []
    if step and os.path.lexists(path):
        with open_file(path) as file:
            lines = [raw.decode(errors="replace").rstrip("\n") for raw in file if _is_kept(raw, step, with_memory)]
    write_anew(path, "".join(f"{line}\n" for line in lines))


def _is_kept(raw: bytes, step: int, with_memory: bool) -> bool:
    """True if a line of a metrics file belongs to the first `step` steps."""
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError):
        return False
    if not isinstance(values, dict):
        return False
    checkpoint = values.get("checkpoint")
    line_step = values.get("step", checkpoint.get("step", 0) if isinstance(checkpoint, dict) else 0)
    return isinstance(line_step, int) and line_step <= step and (with_memory or "memory" not in values)


_WHY_SKIPPED = {
    "overflow": "gradients overflowed",
    "not finite": "not finite",
    "spike": "a spike of the loss",
    "no target": "no token has a loss",
}


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _loss_text(loss: float | None) -> str:
    return "no loss" if loss is None else f"loss {loss:.4f}"


def _what_applies(metrics: StepMetrics, result: StepResult) -> str:
    """The part of a progress line that only some jobs have: losses of further tokens, the loss scale, a skipped step,
    the use of the network, the savings of compression, bytes between nodes, the use of experts."""
    parts = []
    if result.mtp_losses:
        parts.append("further " + " ".join("none" if loss is None else f"{loss:.3f}" for loss in result.mtp_losses))
    if metrics.loss_scale is not None:
        parts.append(f"scale {metrics.loss_scale:g}")
    if metrics.skipped:
        parts.append(f"skipped: {_WHY_SKIPPED[metrics.skipped_because or 'overflow']}")
    if metrics.between_link_use is not None:
        parts.append(f"network {metrics.between_link_use:.0%} used")
    if metrics.compression_bytes_saved:
        parts.append(f"compression saved {metrics.compression_bytes_saved / MIB:,.2f} MiB")
    if metrics.between_nodes_bytes:
        parts.append(f"between nodes {metrics.between_nodes_bytes / MIB:,.2f} MiB")
    if result.routing:
        parts.append(in_words(result.routing))
    return "".join(part + "  " for part in parts)


def _minutes(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
