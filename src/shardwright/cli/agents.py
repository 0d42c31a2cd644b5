"""The command that serves predictions to agents."""

import click

from shardwright.cli.job_options import command_language_option
from shardwright.cli.localized_commands import LocalizedCommand


@click.command(name="mcp", cls=LocalizedCommand)
@command_language_option
def mcp_server() -> None:
    """Serve estimate, plan, explain, check and the catalog as tools of an agent, by the Model Context Protocol.

    A client of that protocol starts this command and speaks with it over standard input and output.
    """
    from shardwright.api.tool_server import tool_server

    tool_server().run("stdio")
