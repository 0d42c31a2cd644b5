"""The list of commands that `shardwright --help` prints: by what one wants to do, a line each."""

from typing import Any

import click

from shardwright.cli.command_language import command_language, remember_words
from shardwright.cli.localized_commands import LocalizedGroup
from shardwright.cli.usage_errors import localized
from shardwright.config.phrase import started_processes_speak

# Command and what it does, in a few words, by what one wants to do. A command that is not here is listed at the end.
_SECTIONS: dict[str, dict[str, str]] = {
    "Decide": {
        "plan": "the best plan for a model on a cluster, and why",
        "estimate": "memory, time, MFU and money of a job's plan",
        "explain": "one step told: what is where, what crosses which link",
        "scale": "the best plan at each size of the cluster",
        "compare": "clusters side by side: time, money, energy",
        "simulate": "the timeline of a step, drawn",
        "layout": "uneven stages, and devices of several kinds",
        "studio": "plan by hand, on a page of this machine",
    },
    "Run": {
        "train": "train a job on this machine, or as one of many ranks",
        "launch": "the script for Slurm, Kubernetes or torchrun",
        "dryrun": "one rank without its cluster: memory and messages",
        "generate": "text by a model that was trained",
        "checkpoint": "what a run has kept: ls, show, verify, export",
        "top": "watch a run: loss, tokens/s, parts of a step, memory",
        "runs": "measured runs side by side: rates, scaling efficiency",
        "report": "what a run did, beside what was predicted: one page",
        "experts": "how the experts of a run were used",
    },
    "Exchange": {
        "import": "a job of Megatron-LM, torchtitan, DeepSpeed, NeMo, Accelerate",
        "export": "a job for one of them",
        "check": "files of any of them: legal, fits, divides; for CI",
        "convert": "a model's weights as plain safetensors files",
        "mcp": "what is predicted, as tools of an agent",
    },
    "Prove": {
        "verify": "a plan against one rank, by its numbers",
        "validate": "predictions against measured runs",
        "calibrate": "measure this machine",
    },
    "Look up": {
        "fields": "the fields of a job, for files and --set",
        "schema": "the JSON schema of what a command answers",
        "models": "models, by size, with their names on the Hub",
        "devices": "devices: memory, rates, links, prices",
        "clusters": "clusters with a name",
        "schedules": "pipeline schedules and their bubbles",
        "schedule": "one of them, drawn",
        "software": "software that predictions can be about",
        "collective": "a collective, drawn and timed",
        "learn": "the ideas of large training, page by page",
    },
}


class CommandGroup(LocalizedGroup):
    """A group whose help lists its commands in sections, and whose commands tell faults in the user's language."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The arguments; the language that any of them asks for holds from here on."""
        remember_words(ctx, args)
        return super().parse_args(ctx, args)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """The context of the words. Usage errors are told in the language that they ask for."""
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            raise localized(error) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Faults of the input and failures are told in its language, or in the locale's; beside JSON
        in English."""
        try:
            with started_processes_speak(command_language(ctx)):
                return super().invoke(ctx)
        except (click.exceptions.Exit, click.exceptions.Abort):  # RuntimeErrors, too
            raise
        except click.UsageError as error:
            raise localized(error) from None
        except (ValueError, RuntimeError) as error:
            from shardwright.config.base import PlanError, RunError  # need pydantic, which --help does not

            if isinstance(error, PlanError | RunError):
                error.args = (error.in_language(command_language(ctx)),)
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections."""
        others = {name: self.commands[name] for name in self.list_commands(ctx)}
        for title, words in _SECTIONS.items():
            rows = [(name, text) for name, text in words.items() if others.pop(name, None) is not None]
            with formatter.section(title):
                formatter.write_dl(rows)
        rows = [(name, command.get_short_help_str(60)) for name, command in others.items()]
        if rows:
            with formatter.section("More"):
                formatter.write_dl(rows)
