"""The commands that look at a run from its folder: its report, made anew."""

import json
from pathlib import Path

import click

from shardwright.cli.job_options import file_option, json_option


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@json_option
@file_option("--html", help="Where to write the page.  [default: report.html in the run's folder]")
def report(run: Path, as_json: bool, html: Path | None) -> None:
    """Write the report of a run anew, from its folder RUN. The run may still go on.

    `train` writes it at the end of each run. It is one file, which loads nothing: the plan, loss, throughput, predicted
    beside measured, timeline, experts, health, and the card of the run, which --json prints.
    """
    from shardwright.api.reported_run import report_page
    from shardwright.report.output import replace_output
    from shardwright.train.run_files import REPORT

    card, page = report_page(run)
    file = html or run / REPORT
    replace_output(file, page, "--html")
    click.echo(json.dumps(card.to_dict()) if as_json else f"report in {file}")


COMMANDS = (report,)
