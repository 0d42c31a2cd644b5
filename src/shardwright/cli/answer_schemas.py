"""The command that prints the JSON schema of what another command answers with --json."""

from importlib import resources

import click

from shardwright.cli.job_options import command_language_option
from shardwright.cli.localized_commands import LocalizedCommand
from shardwright.config.phrase import say


def schema_files() -> dict[str, str]:
    """The schemas as JSON, by the names of their commands; a space in a name is a dash in its file's."""
    folder = resources.files("shardwright.cli") / "schemas"
    files = (file for file in folder.iterdir() if file.name.endswith(".json"))
    return {file.name.removesuffix(".json").replace("-", " "): file.read_text(encoding="utf-8") for file in files}


@click.command(cls=LocalizedCommand)
@click.argument("command", nargs=-1)
@command_language_option
def schema(command: tuple[str, ...]) -> None:
    """Print the JSON schema of what COMMAND answers with --json; without COMMAND, the commands that have one."""
    schemas, name = schema_files(), " ".join(command)
    if not name:
        click.echo("\n".join(sorted(schemas)))
        return
    if name not in schemas:
        from shardwright.config import catalog
        from shardwright.config.base import PlanError

        raise PlanError(
            "schema",
            [
                say(
                    "{name} is no command with --json; {hint}",
                    name=repr(name),
                    hint=catalog.did_you_mean(name, sorted(schemas)),
                )
            ],
        )
    click.echo(schemas[name].rstrip("\n"))


COMMANDS = (schema,)
