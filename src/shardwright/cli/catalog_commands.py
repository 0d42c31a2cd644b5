"""The commands that say what there is: models, devices, clusters, schedules and software."""

import json

import click

from shardwright.cli.job_options import has_colours, json_option, language_option
from shardwright.cli.localized_commands import LocalizedCommand

_HELP = {
    "models": "The models of the catalog, by size, and their names on the Hugging Face Hub.",
    "devices": "The devices of the catalog: memory, rates, links, and prices with their dates.",
    "clusters": "The clusters of the catalog.",
    "schedules": "The pipeline schedules, with the formula of each bubble.",
    "software": "The generations of software that predictions can be about.",
}


def _command(kind: str) -> click.Command:
    @click.command(name=kind, cls=LocalizedCommand, help=_HELP[kind])
    @json_option
    @language_option
    def listing(as_json: bool, language: str) -> None:
        from shardwright.report.catalog_tables import catalog_rows, catalog_text

        click.echo(json.dumps(catalog_rows(kind)) if as_json else catalog_text(kind, has_colours(), language))

    return listing


COMMANDS = tuple(_command(kind) for kind in _HELP)
