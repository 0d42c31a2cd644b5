"""The command that checks files with jobs, in any system's language, for people and for CI."""

import json
import sys
from typing import Any

import click

from shardwright.cli.job_options import (
    BriefCommand,
    asked_cluster,
    cluster_options,
    json_option,
    language_option,
    set_option,
)
from shardwright.cli.system_option import ListedSystemOption


@click.command(
    name="check",
    cls=BriefCommand,
    brief=("--system", "--set", "--devices", "--device", "--json"),
    examples=("check quickstart", "check docs/pretrain.sh --set NUM_NODES=4 --device a100-sxm-80g"),
)
@click.argument("files", nargs=-1, required=True)
@click.option(
    "--system",
    cls=ListedSystemOption,
    is_written=False,
    help="The training system.  [default: as the file is]",
)
@set_option
@cluster_options
@json_option
@language_option
def check_files(
    files: tuple[str, ...],
    system: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
    language: str,
    **cluster_fields: Any,
) -> None:
    """Check FILES, jobs or files of other systems, each alone: legal, fits, divides, experts on fast links, time.

    The exit status is 0 if all is fine, 1 if a file has a finding, and 2 if one can't be read.
    """
    from dataclasses import asdict

    from shardwright.api.file_check import file_checks
    from shardwright.config.text_columns import logged
    from shardwright.report.file_check_text import file_check_text

    cluster = asked_cluster(cluster_fields)
    checks = file_checks(files, overrides, cluster, system or "")
    if as_json:
        click.echo(json.dumps([asdict(check) for check in checks]))
    else:
        click.echo(logged("\n".join(file_check_text(check, language) for check in checks)))
    sys.exit(max(check.exit_status for check in checks))
