"""The command that lists the fields of a job."""

import json

import click

from shardwright.cli.command_language import command_language
from shardwright.cli.job_options import BriefCommand, command_language_option, json_option
from shardwright.cli.localized_commands import formatter_in
from shardwright.config.phrase import say


@click.command(name="fields", cls=BriefCommand, examples=("fields plan", "fields model.moe"))
@click.argument("section", required=False)
@json_option
@command_language_option
def list_fields(section: str | None, as_json: bool) -> None:
    """List the fields of a job, each with its default and its meaning: of one SECTION, or of all.

    They are what a job's TOML file may have, and what --set SECTION.FIELD=VALUE overrides.
    """
    from shardwright.config.base import PlanError
    from shardwright.config.catalog import did_you_mean
    from shardwright.config.field_texts import job_fields

    sections = job_fields()
    if section is not None:
        shown = {name: rows for name, rows in sections.items() if name == section or name.startswith(f"{section}.")}
        if not shown:
            known = [name for name in sections if name]
            raise PlanError(
                "fields",
                [
                    say(
                        "{section} is no section of a job; {hint}",
                        section=repr(section),
                        hint=did_you_mean(section, known),
                    )
                ],
            )
        sections = shown
    if as_json:
        click.echo(json.dumps({name: dict(rows) for name, rows in sections.items()}))
        return
    from shardwright.config.text_columns import page_width

    formatter = formatter_in(command_language(), page_width())
    for name, rows in sections.items():
        with formatter.section(say("Fields of [{section}]", section=name) if name else "Fields of a job"):
            formatter.write_dl(rows)
    click.echo(formatter.getvalue().strip("\n"))
