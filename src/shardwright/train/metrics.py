"""The output of a running job: a JSONL file, TensorBoard, and progress lines with the remaining time.

Only rank 0 writes.
"""

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from shardwright.config.base import RunError, printable
from shardwright.config.data import HELD_OUT
from shardwright.config.job import JobSpec
from shardwright.config.percent import percent_text
from shardwright.config.phrase import in_language, language_of_locale, say, spaced
from shardwright.config.run_file_names import METRICS
from shardwright.config.text_columns import logged
from shardwright.config.units import MIB
from shardwright.config.user_file import open_file, system_reason
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.sharding.memory_account import RankMemory
from shardwright.train.launch.full_disk import quiet_writers, telling_of_full_disk
from shardwright.train.router_update import in_words
from shardwright.train.run_curves import run_curves
from shardwright.train.run_files import open_to_append, write_anew
from shardwright.train.step_metrics import (
    MeasuredStep,
    StepMetrics,
    device_title,
    finite_or_none,
    job_peak_flops,
    known_device,
)
from shardwright.train.steps_done_again import DoneAgain, StepsDoneAgain
from shardwright.train.steps_measured import measured_lines
from shardwright.train.train_step import StepResult


class MetricsLog:
    """Writes metrics of steps and evaluations to a run's folder, and the progress line to `out` or standard output."""

    def __init__(self, job: JobSpec, mesh: Mesh, folder: Path, first_step: int = 0, out: TextIO | None = None) -> None:
        """Go on after `first_step` steps: drop what the files have of later steps."""
        self._job = job
        self._out = out or sys.stdout
        device = known_device(job, mesh.device)
        self.device_name = device.name if device is not None else ""  # the catalog's
        self._peak_flops = job_peak_flops(job, device) if device is not None else None
        self._path = folder / METRICS
        quiet_writers()
        with telling_of_full_disk(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            self._again = StepsDoneAgain(_keep_until(self._path, first_step))
            self._file = open_to_append(self._path)
        self._curves = run_curves(job, folder, first_step)
        self._recent_s: list[float] = []
        if self._peak_flops is None:
            number = job.precision.product_number
            title = device_title(mesh.device)
            self.tell(
                say(
                    "MFU is not shown: the catalog of devices has no peak rate for {device} in {number}",
                    device=title,
                    number=number,
                )
            )

    def tell(self, text: str) -> None:
        """Print a line for the user, in the language of the locale. Raises RunError if that fails."""
        try:
            print(logged(printable(in_language(text, language_of_locale()))), file=self._out, flush=True)
        except OSError as error:
            fault = say("standard output can't be written: {reason}", reason=system_reason(error))
            raise RunError(fault) from None

    def begin(self, first_step: int, device: str, data: Mapping[str, str]) -> None:
        """Record that this part of the run begins after `first_step` steps, on a device, with data by their paths and
        digests."""
        self._note({"begun": {"after_step": first_step, "device": device, "data": dict(data)}})

    def step(self, measured: MeasuredStep) -> None:
        """Record one step. Print a progress line every run.log_every steps."""
        step, result, total = measured.step, measured.result, self._job.optimizer.steps
        is_shown = step % self._job.run.log_every == 0 or step == total
        metrics = StepMetrics.of(measured, self._job, self._peak_flops, with_pairs=is_shown)
        self._write(asdict(metrics))
        scalars = {name: value for layer in result.routing for name, value in layer.scalars().items()}
        mtp_losses = enumerate(result.mtp_losses)
        scalars |= {f"loss/{k + 2} tokens further": loss for k, loss in mtp_losses if loss is not None}
        self._draw(step, {name: value for name, value in scalars.items() if math.isfinite(value)})
        self._recent_s = [*self._recent_s[-19:], measured.step_s]
        self._tell_again(self._again.see(step, finite_or_none(metrics.loss)))
        if is_shown:
            left_s = (total - step) * sum(self._recent_s) / len(self._recent_s)
            number = f"{step:>{len(str(total))}}/{total}"
            texts = say("step {number}", number=number), _progress(metrics, result)
            self.tell(spaced([*texts, say("left {minutes}", minutes=_minutes(left_s))]))

    def evaluation(self, step: int, losses: Mapping[str, float | None]) -> None:
        """Record an evaluation: the loss on each set by the set's name, None if none of its tokens has a loss."""
        set_losses = {name: loss for name, loss in losses.items() if name != HELD_OUT}
        values: dict[str, Any] = {"step": step}
        if HELD_OUT in losses:
            values["validation_loss"] = losses[HELD_OUT]
        if set_losses:
            values["validation_losses"] = {name: finite_or_none(loss) for name, loss in set_losses.items()}
        self._write(values)
        points = {f"validation_loss/{name}": finite_or_none(loss) for name, loss in set_losses.items()}
        self._draw(step, {name: loss for name, loss in points.items() if loss is not None})
        for name, loss in losses.items():
            loss_words = say("there is no {loss}: none of its tokens has one", loss=held_out_of(name))
            if loss is not None:
                loss_words = say("{name} {loss:.4f}", name=held_out_of(name), loss=loss)
            self.tell(say("step {step}: {loss}", step=step, loss=loss_words))

    def checkpoint(self, step: int, blocking_s: float, durable_s: float) -> None:
        """Record a checkpoint that is durable."""
        self._note({"checkpoint": {"step": step, "blocking_s": blocking_s, "durable_s": durable_s}})
        self.tell(
            say(
                "step {step} is saved: the run waited {blocking:.3f} s, all was durable after {durable:.2f} s",
                step=step,
                blocking=blocking_s,
                durable=durable_s,
            )
        )

    def go_back(self, step: int) -> None:
        """Let the run go on after this step: drop what was recorded of later steps."""
        with telling_of_full_disk(self._path):
            self._file.close()
            _keep_until(self._path, step, with_memory=True)
            self._file = open_to_append(self._path)
        for curves in self._curves:
            curves.go_back(step)

    def memory(self, predicted: Sequence[RankMemory], measured: Sequence[RankMemory]) -> None:
        """Record the memory account, once: predicted and measured memory of each pipeline rank in one line. Measured
        activations are 0."""
        account = {"predicted": [m.as_dict() for m in predicted], "measured": [m.as_dict() for m in measured]}
        self._note({"memory": account})
        for line in measured_lines(predicted, measured):
            self.tell(line)

    def _tell_again(self, again: DoneAgain | None) -> None:
        """Record a comparison of steps that were done a second time."""
        if again is not None:
            self._note({"done_again": again.as_dict()})
            self.tell(str(again))

    def _write(self, values: dict[str, Any]) -> None:
        self._note(values)
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float) and name != "step"}
        self._draw(values["step"], {name: value for name, value in numbers.items() if math.isfinite(value)})

    def _note(self, values: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        line = json.dumps(finite_or_none(values), allow_nan=False)
        with telling_of_full_disk(self._path):
            self._file.write(f"{line}\n")
            self._file.flush()

    def _draw(self, step: int, values: dict[str, float]) -> None:
        """Add points to the curves."""
        for curves in self._curves:
            curves.draw(step, values)

    def close(self) -> None:
        """Record what is left to record, and close the files."""
        self._tell_again(self._again.compared())
        with telling_of_full_disk(self._path):
            self._file.close()
        for curves in self._curves:
            curves.close()


def held_out_of(name: str) -> str:
    """The name of a set's loss in a printed line."""
    return say("held-out loss") if name == HELD_OUT else say("held-out loss of {name}", name=name)


def _keep_until(path: Path, step: int, with_memory: bool = False) -> dict[int, float | None]:
    """Drop from a metrics file the lines of later steps, an unfinished last line of a broken run, and unless
    `with_memory` the memory account, which a resumed run records again. Returns the losses of the dropped steps."""
    lines, losses = list[str](), dict[int, float | None]()
    if step and os.path.lexists(path):
        with open_file(path) as file:
            for raw in file:
                if _is_kept(raw, step, with_memory):
                    lines.append(raw.decode(errors="replace").rstrip("\n"))
                elif loss := _loss_of_line(raw):
                    losses |= [loss]
    write_anew(path, "".join(f"{line}\n" for line in lines))
    return losses


def _loss_of_line(line: bytes) -> tuple[int, float | None] | None:
    """The step and the loss of a line of a metrics file; None if it is of no step."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or not isinstance(values.get("step"), int) or "loss" not in values:
        return None
    loss = values["loss"]
    return (values["step"], loss) if loss is None or isinstance(loss, float) else None


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
    "overflow": say("gradients overflowed"),
    "not finite": say("not finite"),
    "spike": say("a spike of the loss"),
    "no target": say("no token has a loss"),
}


def _loss_text(loss: float | None) -> str:
    return say("no loss") if loss is None else say("loss {loss:.4f}", loss=loss)


def _progress(metrics: StepMetrics, result: StepResult) -> str:
    """The numbers of a step in its progress line."""
    use_text = "" if metrics.mfu is None else f" mfu {percent_text(metrics.mfu)}"
    rate_text = f"{metrics.tokens_per_s:,.0f} tok/s{use_text}"
    shares_text = say(
        "compute {compute:.0%} communication {communication:.0%} idle {idle:.0%}",
        compute=metrics.compute_share,
        communication=metrics.exposed_communication_share,
        idle=metrics.pipeline_idle_share,
    )
    return spaced(
        [
            _loss_text(result.loss),
            *([say("grad {norm:.3f}", norm=result.grad_norm)] if result.grad_norm is not None else []),
            say("lr {rate:.2e}", rate=result.learning_rate),
            *_what_applies(metrics, result),
            rate_text,
            shares_text,
            f"{metrics.peak_memory_bytes / MIB:,.0f} MiB",
        ]
    )


def _what_applies(metrics: StepMetrics, result: StepResult) -> list[str]:
    """The parts of a progress line that only some jobs have: losses of further tokens, the loss scale, a skipped step,
    the use of the network, the savings of compression, bytes between nodes, the use of experts."""
    parts: list[str] = []
    if result.mtp_losses:
        losses = " ".join("none" if loss is None else f"{loss:.3f}" for loss in result.mtp_losses)
        parts.append(say("further {losses}", losses=losses))
    if metrics.loss_scale is not None:
        parts.append(say("scale {scale:g}", scale=metrics.loss_scale))
    if metrics.skipped:
        parts.append(say("skipped: {reason}", reason=_WHY_SKIPPED[metrics.skipped_because or "overflow"]))
    if metrics.between_link_use is not None:
        parts.append(say("network {share:.0%} used", share=metrics.between_link_use))
    if metrics.compression_bytes_saved:
        parts.append(say("compression saved {mib:,.2f} MiB", mib=metrics.compression_bytes_saved / MIB))
    if metrics.between_nodes_bytes:
        parts.append(say("between nodes {mib:,.2f} MiB", mib=metrics.between_nodes_bytes / MIB))
    if result.routing:
        parts.append(in_words(result.routing))
    return parts


def _minutes(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
