"""The commands that list, show and verify the checkpoints of a run."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwright.cli.command_language import tell
from shardwright.cli.job_options import command_language_option, json_option, language_option
from shardwright.cli.localized_commands import LocalizedGroup
from shardwright.config.phrase import in_language, say
from shardwright.config.user_file import system_reason

if TYPE_CHECKING:
    from shardwright.train.checkpoint.boxes import StoredBox
    from shardwright.train.checkpoint.manifest import Manifest
    from shardwright.train.checkpoint.storage import Storage


@click.group(name="checkpoint", cls=LocalizedGroup)
@command_language_option
def checkpoint() -> None:
    """Look at the checkpoints of RUN: a run's folder, or the folder or address of its checkpoints."""


@checkpoint.command(name="ls")
@click.argument("run")
@json_option
@language_option
def list_steps(run: str, as_json: bool, language: str) -> None:
    """List the checkpoints, oldest first: step, size, plan."""
    from shardwright.train.checkpoint.kept import manifest_of

    storage, steps = found_checkpoints(run)
    _tell([_row(step, partial(manifest_of, storage)) for step in sorted(steps)], as_json, language)


@checkpoint.command()
@click.argument("run")
@click.option("--step", type=click.IntRange(0), help="Which one.  [default: the newest healthy one]")
@json_option
@language_option
def show(run: str, step: int | None, as_json: bool, language: str) -> None:
    """Show what is in one checkpoint: every tensor, its shape, and in how many boxes it lies."""
    from shardwright.train.checkpoint.kept import indices_of, manifest_of
    from shardwright.train.checkpoint.whole_tensors import whole_tensors

    storage, steps = found_checkpoints(run)
    with as_fault(run):
        manifest = manifest_of(storage, chosen_step(run, storage, steps, step))
        tensors = whole_tensors(indices_of(storage, manifest))
    if as_json:
        tensor_dicts = {
            name: {"shape": boxes[0][0].full_shape, "dtype": boxes[0][0].dtype, "boxes": len(boxes)}
            for name, boxes in tensors.items()
        }
        click.echo(json.dumps(manifest.model_dump(mode="json", exclude={"files"}) | {"tensors": tensor_dicts}))
        return
    lines = [
        *_manifest_lines(manifest),
        *(_tensor_line(name, [stored for stored, _ in boxes]) for name, boxes in sorted(tensors.items())),
    ]
    click.echo("\n".join(in_language(line, language) for line in lines))


def _manifest_lines(manifest: "Manifest") -> "Iterator[str]":
    """Lines of the step, the plan, the health, the losses and the data of a checkpoint."""
    from shardwright.config.base import printable, shortened
    from shardwright.train.checkpoint.manifest import describe_job, in_words

    yield say(
        "step {step}: {samples:,} samples into the data, {passed_over:,} passed over; {plan}",
        step=manifest.step,
        samples=manifest.samples,
        passed_over=manifest.passed_over,
        plan=describe_job(manifest.job),
    )
    if not manifest.health.is_healthy:
        yield say("not healthy: {reason}", reason=in_words(manifest.health))
    for name, measured in sorted(manifest.losses.items()):
        yield say("loss on {name}: {loss:.4f} nats a token", name=shortened(printable(name)), loss=measured.loss)
    for source in manifest.data.sources if manifest.data is not None else ():
        yield say(
            "data: {samples:,} samples of {path}, {tokens:,} tokens",
            samples=source.had,
            path=shortened(printable(source.path), 200),
            tokens=source.num_tokens,
        )


def _tensor_line(name: str, boxes: "Sequence[StoredBox]") -> str:
    """The line of a tensor, whose shape and number type each of its boxes says."""
    shape = " x ".join(map(str, boxes[0].full_shape))
    number = say("1 box") if len(boxes) == 1 else say("{count} boxes", count=len(boxes))
    return say("  {name}  {dtype} {shape}, {boxes}", name=name, dtype=boxes[0].dtype, shape=shape, boxes=number)


@checkpoint.command()
@click.argument("run")
@click.option("--step", type=click.IntRange(0), help="Which one.  [default: all]")
@json_option
@language_option
def verify(run: str, step: int | None, as_json: bool, language: str) -> None:
    """Read every byte of the checkpoints, and say whether they are whole. Status 1 if one is not."""
    from shardwright.train.checkpoint.kept import check_whole

    storage, steps = found_checkpoints(run)
    chosen = sorted(steps) if step is None else [chosen_step(run, storage, steps, step)]
    rows = [_row(number, partial(check_whole, storage)) for number in chosen]
    _tell([row | {"whole": "fault" not in row} for row in rows], as_json, language)
    if any("fault" in row for row in rows):
        sys.exit(1)


def _row(step: int, look: "Callable[[int], Manifest]") -> dict[str, Any]:
    """The row of a checkpoint: its description, or the reason why there is none."""
    from shardwright.config.base import error_text
    from shardwright.train.checkpoint.manifest import BrokenCheckpointError, describe_job, in_words

    try:
        manifest = look(step)
    except BrokenCheckpointError as error:
        return {"step": step, "fault": error_text(error)}
    plan = describe_job(manifest.job)
    healthy = {} if manifest.health.is_healthy else {"unhealthy": in_words(manifest.health)}
    return {"step": step, "bytes": manifest.num_bytes, "files": len(manifest.files), "plan": plan} | healthy


def _tell(rows: list[dict[str, Any]], as_json: bool, language: str) -> None:
    """Print checkpoints, one on each line."""
    from shardwright.config.units import memory_text

    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        size = memory_text(row["bytes"]) if "bytes" in row else ""
        description = row.get("fault") or row["plan"]
        if "fault" not in row and "whole" in row:
            description = say("{plan}, whole", plan=description)
        if "unhealthy" in row:
            description = say("{plan}, not healthy: {reason}", plan=description, reason=row["unhealthy"])
        line = say("step {step:>8}  {size:>10}  {description}", step=row["step"], size=size, description=description)
        click.echo(in_language(line, language))


def found_checkpoints(run: str, command: str = "checkpoint") -> "tuple[Storage, list[int]]":
    """The storage of a run's checkpoints, and their steps, newest first. PlanError if there are none."""
    from shardwright.train.checkpoint.kept import kept_by

    return kept_by(run, f"{command} {run}".rstrip())


def chosen_step(run: str, storage: "Storage", steps: list[int], step: int | None) -> int:
    """The step that is asked for, or else the step of the newest healthy checkpoint, from which `train` would resume.

    Lines on standard error name unhealthy checkpoints that are taken or passed over. PlanError if `step` is missing.
    """
    from shardwright.config.base import PlanError
    from shardwright.train.checkpoint.kept import in_order_to_load, manifest_of, told_health
    from shardwright.train.checkpoint.manifest import BrokenCheckpointError

    if step is not None and step not in steps:
        steps_text = tuple(map(str, sorted(steps)[-12:]))
        raise PlanError(
            say("checkpoint {name}", name=str(run)),
            [
                say(
                    "there is none of step {step}; there are those of steps {steps_text}",
                    step=step,
                    steps_text=steps_text,
                )
            ],
        )
    chosen = in_order_to_load(storage, steps)[0] if step is None else step
    with suppress(BrokenCheckpointError, OSError):  # the error is reported when the checkpoint is read
        for line in told_health(storage, manifest_of(storage, chosen), max(steps), is_asked=step is not None):
            tell(line, err=True)
    return chosen


@contextmanager
def as_fault(run: str, target: Path | None = None) -> Iterator[None]:
    """A context in which a checkpoint is read, and written to `target`. RunError if it is damaged, or can't be read or
    written now."""
    from shardwright.config.base import RunError, error_text
    from shardwright.train.checkpoint.manifest import BrokenCheckpointError

    try:
        yield
    except BrokenCheckpointError as error:
        raise RunError(
            say(
                "checkpoint of {run}: {reason}; if the run goes on, which removes old ones, try again, and else "
                "`shardwright checkpoint verify {run}` tells which are whole",
                run=run,
                reason=error_text(error),
            )
        ) from None
    except OSError as error:
        if target is not None and str(error.filename or "").startswith(os.path.join(target.parent, "")):
            raise RunError(
                say(
                    "{target} can't be written: {reason}; name another place, or mend that",
                    target=target,
                    reason=system_reason(error),
                )
            ) from None
        raise RunError(
            say(
                "checkpoint of {run} can't be read now: {reason}; try again, or mend that",
                run=run,
                reason=error_text(error),
            )
        ) from None
