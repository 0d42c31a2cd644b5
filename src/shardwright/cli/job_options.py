"""Options that commands share; and the argument, the overrides and the help of commands on a job."""

import gc
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shardwright.cli.cluster_option_names import CLUSTER_OPTIONS
from shardwright.cli.command_language import command_language, remember_json, remember_language
from shardwright.cli.localized_commands import LocalizedCommand
from shardwright.config import largest
from shardwright.config.phrase import LANGUAGES, in_language, say

if TYPE_CHECKING:
    from shardwright.config.asked_cluster import AskedCluster

Question = TypeVar("Question")  # a dataclass of options


class BriefCommand(LocalizedCommand):
    """A command whose --help shows its `brief` options and examples; --help-all shows every option. `unneeded` has
    options that other programs have and it does not, each with a clause on what to do in its place."""

    def __init__(
        self,
        *args: Any,
        brief: Sequence[str] = (),
        examples: Sequence[str] = (),
        unneeded: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(*args, **fields)
        self.brief, self.examples, self.unneeded = frozenset(brief), tuple(examples), dict(unneeded or {})
        if brief:
            every = click.Option(["--help-all"], is_flag=True, help="Show all options and exit.", callback=_help_all)
            every.is_eager, every.expose_value = True, False
            self.params.append(every)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, and the examples."""
        options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        if self.brief and not ctx.meta.get(_SHOWS_ALL):
            shown = self.brief | set(_HELPS)
            options = [option for option in options if shown.intersection(option.opts)]
        records = [option.get_help_record(ctx) for option in options]
        with formatter.section("Options"):
            formatter.write_dl([record for record in records if record is not None])
        if self.examples:
            with formatter.section("Examples"):
                for words in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}shardwright {words}\n")


_SHOWS_ALL = "shardwright.help_all"
_HELPS = ("--help", "--help-all")


def _help_all(ctx: click.Context, option: click.Parameter, is_asked: bool) -> None:
    """Print the help with every option, and exit."""
    if is_asked:
        ctx.meta[_SHOWS_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


# Options that stand for `--set FIELD=VALUE`, with their help.
_SETS = {
    "--as": ("cluster.software", "NAME", "Predict it with another generation of software, such as megatron-core."),
    "--usd-per-hour": (
        "cluster.usd_per_device_hour",
        "USD",
        "Price of a device and hour, in place of its list price.",
    ),
}


class JobCommand(BriefCommand):
    """A command on a job: its help says where the fields of a job are described."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write where the rest is described."""
        text = say("shardwright fields [SECTION] lists the fields of a job that --set overrides.")
        formatter.write(f"\n{in_language(text, command_language(ctx))}\n")


class PredictCommand(JobCommand):
    """A command that predicts a job. `--as NAME` stands for `--set cluster.software=NAME`, and so do others for their
    fields."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        for option, (_, metavar, text) in _SETS.items():
            self.params.append(click.Option([option], expose_value=False, metavar=metavar, help=text))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The arguments with options that stand for fields spelled out."""
        expanded: list[str] = []
        words = iter(args)
        for word in words:
            option, _, value = word.partition("=")
            if option in _SETS and (value := value or next(words, "")):
                expanded += ["--set", f"{_SETS[option][0]}={value}"]
            else:
                expanded.append(word)
        return super().parse_args(ctx, expanded)


def expect_many_actions() -> None:
    """Run Python's garbage collector rarely: a schedule is millions of tuples, and none of them is in a cycle."""
    gc.set_threshold(1_000_000)


def has_colours() -> bool:
    """True if standard output is a terminal that shows colours, and the user has not declined them (no-color.org)."""
    is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return sys.stdout is not None and sys.stdout.isatty() and not is_plain


_language_option = partial(
    click.option,
    "--lang",
    "language",
    type=click.Choice(LANGUAGES),
    default=None,
    callback=remember_language,
    is_eager=True,
    help="English or Chinese.  [default: the locale's]",
)
language_option = _language_option()
command_language_option = _language_option(expose_value=False)  # of commands that ask for `command_language` alone
json_option = click.option(
    "--json", "as_json", is_flag=True, callback=remember_json, help="Print JSON and nothing else."
)
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.FIELD=VALUE", help="Override a field; may be repeated."
)


def job_options(command: Any) -> Any:
    """Add the argument of the job, `--set` and `--json`."""
    return click.argument("job")(set_option(json_option(command)))


def file_option(name: str, help: str, exists: bool = False) -> Any:  # noqa: A002 (as click calls it)
    """An option that names a file: one to write, or with `exists` one to read."""
    return click.option(name, type=NamedFile(exists=exists, dir_okay=False, path_type=Path), metavar="FILE", help=help)


def job_file_option(help: str) -> Any:  # noqa: A002 (as click calls it)
    """The option `--toml`, which names a file for a job to write."""
    return click.option("--toml", type=JobFile(dir_okay=False, path_type=Path), metavar="FILE", help=help)


class NamedFile(click.Path):
    """A file by its name, to be read or, with `exists` False, to be written. `-`, which names standard output
    elsewhere, is refused: it would be a file of that name."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-":
            self.fail(say("it would be a file with the name '-', not standard output; name another"), param, ctx)
        path = super().convert(value, param, ctx)
        if not self.exists and param is not None and "\0" not in str(path):
            from shardwright.report.output import refuse_no_folder

            refuse_no_folder(Path(str(path)), param.opts[0])
        return path


class JobFile(NamedFile):
    """A file in which a job is to be written: before the search, a file that is no such job is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        if param is not None:
            from shardwright.config.toml_text import JOB_BEGINNING
            from shardwright.report.output import refuse_other_file

            refuse_other_file(Path(str(path)), JOB_BEGINNING, param.opts[0])
        return path


class NumberRange(click.FloatRange):
    """A number between two bounds. click lets a number that is none, "nan", pass any bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number. UsageError if it is none, or out of bounds."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(
                say("{value} is no number; it is in the range {range}", value=value, range=self._describe_range()),
                param,
                ctx,
            )
        return number


_COUNTS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


class TokenCount(click.ParamType):
    """A number of tokens, such as 1e12, 300B or 15T; 0 is unset."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, of which the command checks the size. UsageError for a text that is none."""
        text = str(value).strip()
        unit = _COUNTS.get(text[-1:].upper(), 1.0)
        try:
            return float(text if unit == 1.0 else text[:-1]) * unit
        except ValueError:
            fault = say("{value} is no number of tokens; write one such as 1e12, 300B or 15T", value=repr(value))
            self.fail(fault, param, ctx)


def refuse_tokens(tokens: float) -> None:
    """Raise BadParameter for a number of tokens that no run has."""
    if not 0 <= tokens <= largest.FACTOR**2:
        fault = say("{value:g} is not within {least:g} and {most:g}", value=tokens, least=0, most=largest.FACTOR**2)
        raise click.BadParameter(fault, param_hint="--tokens")


def cluster_options(command: Any) -> Any:
    """Add `--devices`, `--device`, `--devices-per-node` and `--memory-gib`: a cluster in place of the job's."""
    return devices_option(device_options(memory_option(command)))


devices_option = click.option(
    *CLUSTER_OPTIONS["devices"],
    type=click.IntRange(1, largest.RANKS),
    default=None,
    metavar="N",
    help="Devices of the cluster.",
)
node_option = click.option(
    *CLUSTER_OPTIONS["devices_per_node"],
    type=click.IntRange(1, largest.RANKS),
    default=None,
    metavar="N",
    help="Devices in a node.  [default: the usual node of the device]",
)


memory_option = click.option(
    *CLUSTER_OPTIONS["memory_gib"],
    type=NumberRange(min=largest.LEAST_MEMORY_GIB, max=largest.MEMORY_GIB),
    default=None,
    metavar="N",
    help="Memory of the device, where it is not that of its entry in the catalog; all else stays.",
)


def device_options(command: Any) -> Any:
    """Add `--device` and `--devices-per-node`."""
    device_help = (
        "Device of the cluster, such as h100-sxm, with its usual nodes and links in place of JOB's. With it JOB may be "
        "a model of the catalog."
    )
    return click.option(*CLUSTER_OPTIONS["device"], default="", metavar="NAME", help=device_help)(node_option(command))


def question_of(question: type[Question], options: dict[str, Any]) -> Question:
    """A dataclass of options, whose fields have the names of options; these are taken out of `options`."""
    return question(**{field.name: options.pop(field.name) for field in fields(question)})  # type: ignore[arg-type]


def asked_cluster(options: dict[str, Any]) -> "AskedCluster":
    """The cluster that options ask for."""
    from shardwright.config.asked_cluster import AskedCluster

    return AskedCluster(**{name: value for name, value in options.items() if value})
