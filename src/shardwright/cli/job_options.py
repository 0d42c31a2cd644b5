"""Options that commands share; and of those on a job its argument, its overrides and its help."""

from pathlib import Path
from typing import Any

import click


class JobCommand(click.Command):
    """A command on a job: its help ends with every field of a job, its default and its meaning."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from shardwright.config.fields import job_fields

        for section, rows in job_fields().items():
            with formatter.section(f"Fields of [{section}]" if section else "Fields of a job"):
                formatter.write_dl(rows)


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.FIELD=VALUE", help="Override a field; may be repeated."
)


def job_options(command: Any) -> Any:
    """The job, `--set` and `--json`."""
    return click.argument("job")(set_option(json_option(command)))


def file_option(name: str, help: str, exists: bool = False) -> Any:  # noqa: A002 (as click calls it)
    """An option that names a file: one to write, or with `exists` one to read."""
    return click.option(name, type=click.Path(exists=exists, dir_okay=False, path_type=Path), metavar="FILE", help=help)
