"""The commands for those who learn: one collective, drawn and timed; and the pages of ideas."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from shardwright.cli.command_language import command_language
from shardwright.cli.job_options import device_options, file_option, json_option, language_option, set_option
from shardwright.cli.localized_commands import LocalizedCommand
from shardwright.cli.progress_bar import progress_shown
from shardwright.config import largest
from shardwright.config.phrase import in_language, say
from shardwright.config.text_columns import fitting


class Size(click.ParamType):
    """A number of bytes, such as 512, 64MiB or 1GB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The bytes."""
        from shardwright.config.base import error_text
        from shardwright.config.units import size_bytes

        try:
            num_bytes = size_bytes(str(value))
        except ValueError as error:
            self.fail(error_text(error), param, ctx)
        if not 0 < num_bytes <= largest.COLLECTIVE_BYTES:
            fault = say("{value} is not within 1 and {most:,} bytes", value=value, most=largest.COLLECTIVE_BYTES)
            self.fail(fault, param, ctx)
        return num_bytes


@click.command(cls=LocalizedCommand)
@click.argument("kind", metavar="NAME")
@click.option(
    "--bytes", "num_bytes", type=Size(), default="1GB", show_default=True, metavar="SIZE", help="The tensor's."
)
@click.option(
    "--ranks",
    type=click.IntRange(1, largest.RANKS),
    default=None,
    metavar="N",
    help="Neighbouring ranks.  [default: 8, or all of --cluster]",
)
@click.option("--cluster", default="", metavar="NAME", help="A cluster of the catalog, in place of --device.")
@click.option("--algorithm", default="", metavar="NAME", help="The one to draw.  [default: the first that has steps]")
@click.option("--run", "runs", is_flag=True, help="Time it on this machine too, over Gloo.")
@device_options
@set_option
@json_option
@language_option
@file_option("--svg", help="Write a picture of all steps.")
def collective(kind: str, as_json: bool, language: str, runs: bool, svg: Path | None, **options: Any) -> None:
    """Draw the collective NAME, and say its steps, bytes and seconds by algorithm.

    NAME is broadcast, scatter, gather, reduce, all-gather, reduce-scatter, all-reduce or all-to-all. Bytes are of the
    full tensor: the operand of an all-reduce, the result of an all-gather.
    """
    from shardwright.config.base import PlanError
    from shardwright.sharding.collective_steps import KINDS

    known = {name: name for name in KINDS} | {name.replace("-", "_"): name for name in KINDS}
    if kind not in known:
        from shardwright.config.catalog import nearest

        names = tuple(nearest(kind.lower(), list(KINDS)) or KINDS)
        raise PlanError("collective", [say("{name} is none; use {names}", name=kind, names=names)])
    from shardwright.api.one_collective import CollectiveQuestion, one_collective
    from shardwright.report.output import write_output

    question = CollectiveQuestion(known[kind], **{name: value for name, value in options.items() if value})
    result = one_collective(question)
    if svg:
        write_output(svg, result.svg(language), "--svg")
    fields, texts = result.to_dict(), [result.in_language(language)]
    if runs:
        from shardwright.measure.collective_run import run_collective

        with progress_shown(command_language()):
            measured = run_collective(question.kind, result.priced.num_ranks, question.num_bytes)
        fields["run"] = asdict(measured)
        texts.append(in_language(measured.text, language))
    click.echo(json.dumps(fields) if as_json else fitting("\n\n".join(texts)))


@click.command(cls=LocalizedCommand)
@click.argument("idea", nargs=-1)
@language_option
@json_option
def learn(idea: tuple[str, ...], language: str, as_json: bool) -> None:
    """Read the page on IDEA: its inequality, commands to try with their output, questions with computed answers.

    Without IDEA it lists all pages; other words, such as a question, get the section that answers them. `questions` has
    thirty in each language, each with the command of its answer.
    """
    from shardwright.learn.idea_pages import IDEAS, OTHERS, QUESTIONS, IdeaPage, contents, page_of

    if not idea:
        titles = {name: IdeaPage(name, language).title for name in (*IDEAS, *OTHERS)}
        click.echo(json.dumps(titles, ensure_ascii=False) if as_json else contents(language))
        return
    words = " ".join(idea)
    if not as_json and words.lower() not in (*IDEAS, *OTHERS):
        from shardwright.learn.page_search import sections_text, sections_with

        if sections := sections_with(words, language):
            click.echo(in_language(sections_text(sections), language))
            return
    page = page_of(words, language)
    fields: dict[str, Any] = {"idea": page.name, "language": language, "title": page.title, "markdown": page.markdown}
    if page.name == QUESTIONS:
        from shardwright.learn.computed_answers import questions_of

        fields["questions"] = [asdict(question) for question in questions_of(language)]
    click.echo(json.dumps(fields, ensure_ascii=False) if as_json else page.text)


COMMANDS = (collective, learn)
