"""The commands that look at runs from their folders: a report, made anew, a screen while one goes on, and several side
by side."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwright.cli.job_options import NumberRange, file_option, has_colours, json_option, language_option
from shardwright.cli.localized_commands import LocalizedCommand
from shardwright.config.phrase import in_language, say

if TYPE_CHECKING:
    from rich.console import RenderableType


@click.command(cls=LocalizedCommand)
@click.argument("run", type=click.Path(path_type=Path))
@json_option
@language_option
@file_option("--html", help="Where to write the page.  [default: report.html in the run's folder]")
def report(run: Path, as_json: bool, language: str, html: Path | None) -> None:
    """Write the report of a run anew, from its folder RUN. The run may still go on.

    `train` writes it at the end of each run. It is one file, which loads nothing: the plan, loss, throughput, predicted
    beside measured, timeline, experts, health, and the card of the run, which --json prints.
    """
    from shardwright.api.reported_run import report_page
    from shardwright.config.run_file_names import REPORT
    from shardwright.report.output import replace_output

    card, page = report_page(run, language)
    file = html or run / REPORT
    replace_output(file, page, "--html")
    click.echo(
        json.dumps(card.to_dict()) if as_json else in_language(say("report in {file}", file=str(file)), language)
    )


@click.command(cls=LocalizedCommand)
@click.argument("run", type=click.Path(path_type=Path))
@json_option
@language_option
@click.option(
    "--once",
    is_flag=True,
    help="Print one screen and end, as where standard output is no terminal, or one that can only print.",
)
@click.option(
    "--every",
    "every_s",
    type=NumberRange(0.1, 3600.0),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Between screens.",
)
def top(run: Path, as_json: bool, language: str, once: bool, every_s: float) -> None:
    """Watch a run from its folder RUN: loss, tokens/s, MFU, parts of a step, memory, the last checkpoint.

    It reads what the run records, from any machine that sees the folder, and does not disturb it. Ctrl-C ends it.
    """
    from rich.console import Console, Group
    from rich.live import Live

    from shardwright.report.rendered import rendered
    from shardwright.report.run.run_record import newest_values, read_record

    console = Console()
    if as_json:
        click.echo(json.dumps(newest_values(read_record(run))))
    elif once or not console.is_terminal or console.is_dumb_terminal:
        click.echo(rendered(_screen(run, language), has_colours()))
    else:
        with Live(Group(*_screen(run, language)), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every_s)
                live.update(Group(*_screen(run, language)), refresh=True)


@click.command(cls=LocalizedCommand)
@click.argument("folders", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@json_option
@language_option
def runs(folders: tuple[Path, ...], as_json: bool, language: str) -> None:
    """Set measured runs side by side, from their folders: seconds, tokens/s, MFU, loss, and scaling efficiency.

    Efficiency is the throughput of a rank, beside that of the run on the fewest ranks.
    """
    from shardwright.report.rendered import rendered
    from shardwright.report.run.runs_table import rows_dicts, runs_rows, runs_screen

    rows = runs_rows(folders)
    click.echo(json.dumps(rows_dicts(rows)) if as_json else rendered(runs_screen(rows), has_colours(), language))


def _screen(run: Path, language: str) -> "list[RenderableType]":
    """The screen of a run in a language, as it is now. Raises PlanError if there is no run."""
    from shardwright.config.base import PlanError
    from shardwright.config.run_file_names import METRICS
    from shardwright.report.run.run_card import RunCard
    from shardwright.report.run.run_record import read_record
    from shardwright.report.run.run_screen import run_screen, seconds_silent

    record = read_record(run)
    try:
        card = RunCard.read(run)
    except PlanError:  # of an earlier version, which wrote none
        return run_screen(str(run), record, None, seconds_silent(run / METRICS), language=language)
    silent_s = seconds_silent(run / METRICS) if card.status == "running" else 0.0
    end = {"preempted": say("preempted"), "failed": say("failed")}.get(card.status, "")
    if end and card.failure:
        end = say("{status}: {reason}", status=end, reason=card.failure)
    return run_screen(str(run), record, card.job["optimizer"]["steps"], silent_s, end, language)


COMMANDS = (report, runs, top)
