"""The command line. Each command imports the heavy modules that it needs, so that `--help` starts at once.

Exit status: 0 done, 1 it failed or a signal ended it, 2 the input is wrong, 3 it was preempted and can go on.
"""

import errno
import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import click

from shardwright import __version__
from shardwright.cli import (
    answer_schemas,
    calibrate,
    catalog_commands,
    draw,
    learning,
    planning_page,
    predict,
    run_reports,
    searching,
)
from shardwright.cli.agents import mcp_server
from shardwright.cli.answer_pages import with_page
from shardwright.cli.checked_job import load_to_run
from shardwright.cli.command_group import CommandGroup
from shardwright.cli.command_language import command_language, is_json_asked, language_of_words, tell
from shardwright.cli.export_weights import convert, export
from shardwright.cli.file_checking import check_files
from shardwright.cli.generating import generate
from shardwright.cli.interchange import export_job, import_job
from shardwright.cli.job_fields import list_fields
from shardwright.cli.job_options import (
    JobCommand,
    NumberRange,
    command_language_option,
    file_option,
    job_options,
    json_option,
    language_option,
)
from shardwright.cli.kept_checkpoints import checkpoint
from shardwright.cli.launching import launch
from shardwright.cli.progress_bar import progress_shown
from shardwright.cli.train import train
from shardwright.config import largest
from shardwright.config.phrase import in_language, say
from shardwright.config.standard_streams import let_readers_leave
from shardwright.config.text_columns import fitting_errors, logged
from shardwright.train.launch.ending import telling_of_signals

_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE, errno.EIO)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__)
@command_language_option
def cli() -> None:
    """Plan, train and predict large transformers on clusters, with hybrid parallelism.

    JOB is a TOML file or a catalog name such as quickstart; to predict, a model such as llama3-8b with --devices and
    --device too.
    """


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@json_option
@language_option
@file_option("--svg", help="Where to draw.  [default: experts.svg in the run's folder]")
def experts(run: Path, as_json: bool, language: str, svg: Path | None) -> None:
    """Draw how the experts of a run were used, from the folder RUN. The run may still go on."""
    from shardwright.report.expert_use import draw_use, read_use, use_dict, use_text

    file = draw_use(run, svg, language)
    use = read_use(run)
    if as_json:
        click.echo(json.dumps(use_dict(use) | {"svg": str(file)}))
    else:
        click.echo(use_text(use, language))
        tell(say("drawn in {file}", file=str(file)))


@cli.command(cls=JobCommand, examples=("verify quickstart --steps 5",))
@job_options
@click.option(
    "--steps",
    type=click.IntRange(1, largest.VERIFIED_STEPS),
    default=5,
    show_default=True,
    help="Optimizer steps to compare.",
)
@click.option(
    "--tolerance",
    type=NumberRange(0.0, 1.0),
    default=1e-5,
    show_default=True,
    help="Largest difference that passes, beside what rounding alone makes of one rank.",
)
@command_language_option
def verify(job: str, overrides: tuple[str, ...], as_json: bool, steps: int, tolerance: float) -> None:
    """Run JOB's plan and one rank on the same data, and print the largest differences."""
    spec = load_to_run(job, overrides)
    from shardwright.train.launch.fork_server import start_server_early

    start_server_early(spec.run.device)
    from shardwright.measure.rounding import is_rounding
    from shardwright.measure.verify import verify as compare_with_one_rank
    from shardwright.report.document import Lines, document_text
    from shardwright.report.verdict_text import verdict_parts

    with progress_shown(command_language()):
        verdict, moved_runs = compare_with_one_rank(spec, steps, tolerance)
    is_rounded = bool(moved_runs) and is_rounding(verdict, moved_runs, tolerance)
    passed = verdict.within(tolerance) or is_rounded
    if as_json:
        click.echo(json.dumps(asdict(verdict) | {"equal": passed, "moved": list(map(asdict, moved_runs))}))
    else:
        parts = verdict_parts(spec, verdict, moved_runs, tolerance, is_rounded)
        click.echo(document_text([Lines(parts)], command_language()))
    if not passed:
        sys.exit(1)


checkpoint.add_command(export)
for command in (
    train,
    generate,
    convert,
    launch,
    checkpoint,
    import_job,
    export_job,
    check_files,
    list_fields,
    mcp_server,
    *draw.COMMANDS,
    *map(with_page, predict.COMMANDS),
    *map(with_page, searching.COMMANDS),
    *calibrate.COMMANDS,
    *map(with_page, catalog_commands.COMMANDS),
    *learning.COMMANDS,
    *planning_page.COMMANDS,
    *run_reports.COMMANDS,
    *answer_schemas.COMMANDS,
):
    cli.add_command(command)


def main() -> None:
    """The entry point: every error that the user can mend is one message without a traceback, and so is a signal."""
    let_readers_leave()
    telling_of_signals(_command)


def _command() -> None:
    try:
        try:
            cli()
        finally:
            if sys.stdout is not None:  # None if it was closed before we began
                sys.stdout.flush()
    except OSError as error:
        if error.filename is None and error.errno not in _NOT_WRITTEN:  # a write to standard output names no file
            raise
        _leave(in_language(_not_written(error), language_of_words(sys.argv[1:])), 1)
    except (ValueError, RuntimeError) as error:
        # Imported late: it needs pydantic, which --help does not.
        from shardwright.config.base import PlanError, RunError

        if not isinstance(error, PlanError | RunError):
            raise
        is_fault = isinstance(error, PlanError)
        _leave(_faults_text(str(error)) if is_fault else logged(str(error)), 2 if is_fault else 1)


def _faults_text(text: str) -> str:
    """Faults as lines that fit. Programs read them beside JSON, and a launcher logs those of its ranks: there each
    stays a line."""
    return text if is_json_asked(sys.argv[1:]) or "LOCAL_RANK" in os.environ else fitting_errors(text)


def _not_written(error: OSError) -> str:
    """The message about a file, or standard output, that can't be written."""
    from shardwright.config.user_file import system_reason

    reason = system_reason(error)
    if error.filename is None:
        return say(
            "failed: standard output can't be written: {reason}; make room there, or name another place", reason=reason
        )
    return say(
        "failed: {file} can't be used: {reason}; make room there, or name another place",
        file=str(error.filename),
        reason=reason,
    )


def _leave(message: str, status: int) -> NoReturn:
    """Print a message and exit, even if no stream can be written to."""
    with suppress(OSError):
        click.echo(message, err=True)
    for stream in filter(None, (sys.stdout, sys.stderr)):  # a stream that was closed before we began is None
        try:
            stream.flush()
        except OSError:  # else Python would flush again at exit, fail, and set its own status
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(status)
