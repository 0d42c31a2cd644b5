"""The command that writes text with a model: of a run's newest healthy checkpoint, or of a folder of Hugging Face's."""

import json
import math
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwright.cli.job_options import NumberRange, command_language_option, json_option, question_of
from shardwright.cli.localized_commands import LocalizedCommand
from shardwright.config import largest
from shardwright.config.phrase import say

if TYPE_CHECKING:
    from shardwright.config.job import JobSpec


_OF_CHATS = ("tokenizer", "begin_token", "chat_template", "today")  # fields of data that write a prompt


@dataclass(frozen=True)
class _Drawing:
    """The options about the tokens that are drawn: how many at most, by which temperature, from which seed."""

    tokens: int
    temperature: float
    seed: int


@click.command(name="generate", cls=LocalizedCommand)
@click.argument("source", metavar="RUN|FOLDER")
@click.option("--prompt", show_default="def ", help="What the text begins with.")
@click.option(
    "--chat",
    is_flag=True,
    help="The prompt is what a user says: it is written with the chat template, and the answer is printed.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1, largest.SEQUENCE),
    default=64,
    show_default=True,
    help="Tokens to add at most; a text may end before.",
)
@click.option(
    "--temperature",
    type=NumberRange(0.0, 100.0),
    default=0.8,
    show_default=True,
    help="What logits are divided by before a token is drawn; 0 takes the likeliest.",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of what is drawn.")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.FIELD=VALUE",
    help="A field of the job, such as plan.tp=2; the plan is one rank where nothing is said. May be repeated.",
)
@json_option
@command_language_option
def generate(
    source: str, prompt: str | None, chat: bool, overrides: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Write text with the weights of RUN's newest healthy checkpoint, or of a FOLDER with a config.json and
    safetensors files.

    The model is sharded as the plan says, on ranks of this machine. Each token passes all of it: this is a look at what
    was learned, not a server.
    """
    from shardwright.config.hugging_face.config_json import names_config
    from shardwright.train.launch.fork_server import start_server_early

    if chat and prompt is None:
        raise click.UsageError(say('--chat answers what a user says, and nothing is said; add --prompt "..."'))
    drawing = question_of(_Drawing, options)
    weights_source = (_of_folder if names_config(source) else _of_run)(source)
    if chat:
        weights_source = weights_source.for_chat()
    spec = weights_source.job(list(overrides))
    start_server_early(spec.run.device)
    from shardwright.train.data.progress import tell_aside
    from shardwright.train.launch.launch import launch
    from shardwright.train.launch.scratch_folder import scratch_folder
    from shardwright.train.launch.this_machine import on_this_machine
    from shardwright.train.prompt import prompt_of
    from shardwright.train.text_generation import AskedText, write_text

    prompt_tokens = prompt_of(spec, weights_source.weights, "def " if prompt is None else prompt, chat)
    asked_text = AskedText(
        prompt_tokens, drawing.tokens, drawing.temperature, drawing.seed, weights_from=weights_source.weights_from
    )
    if not any(override.startswith("model.sequence") for override in overrides):
        positions = positions_for(spec, len(prompt_tokens.ids) + drawing.tokens)
        spec = weights_source.job([*overrides, f"model.sequence={positions}"])
    spec = on_this_machine(spec, spec.plan.world, tell_aside)
    with scratch_folder() as folder:
        written = launch(partial(write_text, asked_text), spec, folder)[0]
    answer = asdict(written)
    lines = answer.pop("lines")
    for line in lines if weights_source.weights_from else ():
        tell_aside(line)
    click.echo(json.dumps(answer) if as_json else shown(written.text))


def shown(text: str) -> str:
    """A text for standard output. For a terminal, it is without characters that control terminals: weights and a
    vocabulary of strangers can write anything."""
    from shardwright.config.base import printable  # imported late: it needs pydantic, which --help does not

    return printable(text) if sys.stdout.isatty() else text


@dataclass(frozen=True)
class _WeightsSource:
    """The source of weights: the fields of a job with them, the folder of the released model that they are or began as,
    and the run that trained them, if there is one."""

    name: str
    fields: dict[str, Any]
    weights: str
    weights_from: str = ""

    def for_chat(self) -> "_WeightsSource":
        """The source for a chat, whose text is no row of the run's data: of these it has the tokenizer and the template
        alone, and a template may be named that they had no use for."""
        kept = {name: value for name, value in self.fields.get("data", {}).items() if name in _OF_CHATS}
        return replace(self, fields=self.fields | {"data": kept | {"chats": True, "separate_documents": True}})

    def job(self, overrides: list[str]) -> "JobSpec":
        """The job that writes text; on one rank unless overrides say otherwise."""
        from shardwright.config.load import job_of_fields

        fields = {"batch": {"global_batch_size": 1}} | self.fields
        return job_of_fields(fields, overrides, f"generate {self.name}")


def _of_folder(source: str) -> _WeightsSource:
    """The source of weights for a released model's folder."""
    from shardwright.config.hugging_face.config_json import path_of

    folder = str(path_of(source).parent)
    return _WeightsSource(source, {"model": {"weights": folder}}, folder)


def _of_run(source: str) -> _WeightsSource:
    """The source of weights for a run: its newest healthy checkpoint."""
    from shardwright.cli.kept_checkpoints import as_fault, chosen_step, found_checkpoints
    from shardwright.train.checkpoint.kept import manifest_of

    storage, steps = found_checkpoints(source, "generate")
    with as_fault(source):
        saved_job = manifest_of(storage, chosen_step(source, storage, steps, None)).job
    fields: dict[str, Any] = {name: saved_job[name] for name in ("model", "data", "precision") if name in saved_job}
    weights = fields["model"].get("weights") or ""
    if not weights and "begin_token" not in fields.get("data", {"begin_token": ""}):
        # Runs from before that field existed began texts without a token.
        fields["data"] = fields["data"] | {"begin_token": "none"}
    if not (fields["model"].get("adapter") or {}).get("rank"):  # a checkpoint of adapters has no other weights
        fields["model"] = {name: value for name, value in fields["model"].items() if name != "weights"}
    elif not weights:  # nor is there a file of the random ones beside which they were trained
        fields["run"] = {"seed": saved_job.get("run", {}).get("seed", 0)}
    return _WeightsSource(source, fields, weights, str(Path(source)))


def positions_for(job: "JobSpec", num_tokens: int) -> int:
    """Positions that are computed for each token: as few as hold the whole text, or all of the model's if fewer would
    change its weights or rotary angles."""
    model, plan = job.model, job.plan
    scaling = model.rotary_scaling
    is_stretched = scaling.kind == "longrope" and model.sequence > scaling.trained_sequence
    if model.positions == "learned" or is_stretched:
        return model.sequence
    # A cp rank has two parts, split over tp, of multiples of 8 tokens, which fp8 takes.
    unit = math.prod((16, plan.cp, plan.tp))
    return min(model.sequence, math.ceil(num_tokens / unit) * unit)
