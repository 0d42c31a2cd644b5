"""The command that serves predictions to agents."""

import json
import sys

import click

from shardwright.cli.command_language import command_language
from shardwright.cli.job_options import command_language_option
from shardwright.cli.localized_commands import LocalizedCommand
from shardwright.config.phrase import in_language, say
from shardwright.config.text_columns import fitting_errors


@click.command(name="mcp", cls=LocalizedCommand)
@command_language_option
def mcp_server() -> None:
    """Serve estimate, plan, explain, check and the catalog as tools of an agent, by the Model Context Protocol.

    A client of that protocol starts this command and speaks with it over standard input and output.
    """
    from shardwright.api.tool_server import tool_server

    server = tool_server()
    if sys.stdin is not None and sys.stdin.isatty():  # somebody tries it by hand, and would see nothing
        note = say(
            "A client of the Model Context Protocol starts this command and speaks with it here; docs/agents.md has "
            "its entry: {entry}. Ctrl-C ends it.",
            entry=json.dumps({"mcpServers": {"shardwright": {"command": "shardwright", "args": ["mcp"]}}}),
        )
        click.echo(fitting_errors(in_language(note, command_language())), err=True)
    server.run("stdio")
