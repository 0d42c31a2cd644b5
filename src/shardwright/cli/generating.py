"""The command that writes text with a model: of a run's newest checkpoint, or of a folder of Hugging Face's."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwright.cli.job_options import json_option
from shardwright.config import largest

if TYPE_CHECKING:
    from shardwright.config.job import JobSpec


@click.command(name="generate")
@click.argument("source", metavar="RUN|FOLDER")
@click.option("--prompt", default="def ", show_default=True, help="What the text begins with.")
@click.option(
    "--tokens", type=click.IntRange(1, largest.SEQUENCE), default=64, show_default=True, help="Tokens to add."
)
@click.option(
    "--temperature", type=click.FloatRange(0.0, 100.0), default=0.8, show_default=True,
    help="What logits are divided by before a token is drawn; 0 takes the likeliest.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of what is drawn.")
@click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.FIELD=VALUE",
    help="A field of the job, such as plan.tp=2; the plan is one rank where nothing is said. May be repeated.",
)  # fmt: skip
@json_option
def generate(
    source: str, prompt: str, tokens: int, temperature: float, seed: int, overrides: tuple[str, ...], as_json: bool
) -> None:
    """Write text with the weights of RUN's newest checkpoint, or of a FOLDER with a config.json and safetensors files.

    The model is sharded as the plan says, on ranks of this machine. Each token passes all of it: this is a look at what
    was learned, not a server.
    """
    from shardwright.config.hugging_face.config_json import names_config
    from shardwright.train.launch.fork_server import start_server_early

    spec, weights_from, first = (_of_folder if names_config(source) else _of_run)(
        source, [*overrides, f"run.seed={seed}"]
    )
    start_server_early(spec.run.device)
    from shardwright.train.launch.launch import launch
    from shardwright.train.launch.scratch_folder import scratch_folder
    from shardwright.train.text_run import AskedText, write_text

    asked = AskedText(prompt, tokens, temperature, weights_from, first)
    with scratch_folder() as folder:
        text = launch(partial(write_text, asked), spec, folder)[0]
    click.echo(json.dumps({"text": text}) if as_json else text)


def _of_folder(source: str, overrides: list[str]) -> "tuple[JobSpec, str, tuple[int, ...]]":
    """The job of a released model, and the token that its tokenizer puts before a text."""
    from shardwright.config.hugging_face.config_json import path_of, read_keys
    from shardwright.config.load import job_of_fields

    folder = path_of(source).parent
    fields: dict[str, Any] = {"model": {"weights": str(folder)}, "batch": {"global_batch_size": 1}}
    configured = folder / "tokenizer_config.json"
    adds = configured.is_file() and read_keys(configured).get("add_bos_token") is True
    begins = read_keys(path_of(source)).get("bos_token_id")
    first = (begins,) if adds and isinstance(begins, int) and not isinstance(begins, bool) else ()
    return job_of_fields(fields, overrides, f"generate {source}"), "", first


def _of_run(source: str, overrides: list[str]) -> "tuple[JobSpec, str, tuple[int, ...]]":
    """The job of a run's newest checkpoint, on one rank."""
    from shardwright.cli.kept_checkpoints import as_fault, chosen_step, found_checkpoints
    from shardwright.config.load import job_of_fields
    from shardwright.train.checkpoint.kept import manifest_of

    storage, steps = found_checkpoints(source)
    with as_fault(source):
        kept = manifest_of(storage, chosen_step(source, steps, None)).job
    fields: dict[str, Any] = {name: kept[name] for name in ("model", "data", "precision") if name in kept}
    fields["model"] = {name: value for name, value in fields["model"].items() if name != "weights"}
    fields["batch"] = {"global_batch_size": 1}
    return job_of_fields(fields, overrides, f"generate {source}"), str(Path(source)), ()
