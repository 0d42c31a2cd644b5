"""The commands that say what there is: models, devices, clusters, schedules and software."""

import click

from shardwright.cli.answer_pages import tell_answer
from shardwright.cli.job_options import has_colours, json_option, language_option
from shardwright.cli.localized_commands import LocalizedCommand

_HELP = {
    "models": "The models of the catalog, by size, and their names on the Hugging Face Hub.",
    "devices": "The devices of the catalog: memory, rates, links, and prices with their dates.",
    "clusters": "The clusters of the catalog.",
    "schedules": "The pipeline schedules, with the formula of each bubble.",
    "software": "The generations of software that predictions can be about.",
}
_WORDS = "With WORDS only those whose names have them all, however they are written: models qwen3."


def _command(kind: str) -> click.Command:
    @click.command(name=kind, cls=LocalizedCommand, help=f"{_HELP[kind]}\n\n{_WORDS}")
    @click.argument("words", nargs=-1)
    @json_option
    @language_option
    def listing(words: tuple[str, ...], as_json: bool, language: str) -> None:
        from shardwright.report.catalog_tables import catalog_rows, catalog_text

        rows = catalog_rows(kind, words)
        tell_answer(as_json, lambda: rows, lambda: catalog_text(kind, has_colours(), language, rows))

    return listing


COMMANDS = tuple(_command(kind) for kind in _HELP)
