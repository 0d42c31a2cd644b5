"""The commands that write the weights of a checkpoint or of a folder to files that other programs read."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwright.cli.command_language import tell
from shardwright.cli.job_options import NumberRange, command_language_option, json_option, question_of
from shardwright.cli.kept_checkpoints import as_fault, chosen_step, found_checkpoints
from shardwright.cli.localized_commands import LocalizedCommand
from shardwright.config.phrase import say

if TYPE_CHECKING:
    from shardwright.train.checkpoint.safetensors_folder import Files


@dataclass(frozen=True)
class _WeightFiles:
    """The options about the files that are written."""

    target: Path
    dtype: str
    file_gib: float
    overwrite: bool

    @property
    def place(self) -> Path:
        """The absolute path to write to. Raises PlanError for an address."""
        from shardwright.config.base import PlanError

        if "://" in str(self.target) or ":/" in str(self.target):
            raise PlanError(
                "--to", [say("{target} is an address; name a file or folder of this machine", target=self.target)]
            )
        return self.target.expanduser().absolute()

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the functions that write."""
        return {"dtype": self.dtype, "file_bytes": int(self.file_gib * 2**30), "overwrite": self.overwrite}


_to = click.option(
    "--to",
    "target",
    required=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="A file that ends in .safetensors, or a folder for files of --file-gib with an index.",
)
_file_gib = click.option(
    "--file-gib",
    type=NumberRange(0.001, 1024),
    default=4.0,
    show_default=True,
    help="Most GiB of a file in a folder; a tensor is never cut.",
)
_overwrite = click.option("--overwrite", is_flag=True, help="Write over what was written earlier.")


@click.command(name="export", cls=LocalizedCommand)
@click.argument("run")
@_to
@click.option("--step", type=click.IntRange(0), help="Which one.  [default: the newest healthy one]")
@click.option(
    "--dtype",
    type=click.Choice(["keep", "float32", "bf16"]),
    default="keep",
    show_default=True,
    help="Number type of the weights; keep is the one that they are saved in.",
)
@_file_gib
@click.option(
    "--names",
    type=click.Choice(["own", "hugging-face"]),
    help="Names and layouts of the tensors: those of the parameters here, or of a model that transformers opens, with "
    "config.json.  [default: hugging-face for a folder, where a family has the model]",
)
@_overwrite
@json_option
@command_language_option
def export(run: str, step: int | None, names: str | None, as_json: bool, **options: Any) -> None:
    """Write the weights of one checkpoint as whole tensors to safetensors files."""
    _export(run, question_of(_WeightFiles, options), as_json, step, names)


def _export(run: str, output: _WeightFiles, as_json: bool, step: int | None = None, names: str | None = None) -> None:
    from shardwright.config.base import PlanError
    from shardwright.train.checkpoint.kept import manifest_of

    place = output.place
    storage, steps = found_checkpoints(run)
    with as_fault(run, place):
        manifest = manifest_of(storage, chosen_step(run, storage, steps, step))
        from shardwright.train.checkpoint.export import export_weights
        from shardwright.train.checkpoint.released_export import export_released, has_family

        is_file = place.suffix == ".safetensors"
        if names == "hugging-face" and is_file:
            raise PlanError(
                "--to", [say("{target} is a file; transformers opens folders, so name one", target=output.target)]
            )
        released = names == "hugging-face" or (names is None and not is_file and has_family(manifest))
        write = export_released if released else export_weights
        files = write(storage, manifest, place, **output.options)
    _tell(files, place, {"step": manifest.step}, as_json)


@click.command(cls=LocalizedCommand)
@click.argument("source", metavar="FOLDER|RUN")
@_to
@click.option(
    "--dtype",
    type=click.Choice(["keep", "float32", "bf16"]),
    default="keep",
    show_default=True,
    help="Number type of the weights; keep is the one that they have, or bf16 where they are quantised.",
)
@_file_gib
@_overwrite
@json_option
@command_language_option
def convert(source: str, as_json: bool, **options: Any) -> None:
    """Write a model's FOLDER again as plain safetensors files: quantised weights (fp8, MXFP4) become numbers that can
    be trained, pickled files safetensors. Of a RUN, the newest healthy checkpoint is exported.

    Names and layouts of the tensors stay, and config.json and the tokenizer go along.
    """
    from shardwright.config.hugging_face.config_json import names_config, path_of

    output = question_of(_WeightFiles, options)
    if not names_config(source):
        _export(source, output, as_json)
        return
    from shardwright.train.checkpoint.converting import convert_folder

    place = output.place
    _tell(convert_folder(path_of(source).parent, place, **output.options), place, {}, as_json)


def _tell(files: "Files", place: Path, fields: dict[str, int], as_json: bool) -> None:
    from shardwright.config.units import counted_phrase, memory_text

    num_bytes = sum(tensor.num_bytes for tensors in files.values() for tensor in tensors)
    if as_json:
        written = {name: [tensor.name for tensor in tensors] for name, tensors in files.items()}
        click.echo(json.dumps(fields | {"to": str(place), "bytes": num_bytes, "files": written}))
        return
    num_tensors = sum(map(len, files.values()))
    line = say(
        "{tensors}, {size} in {files}, in {place}",
        tensors=counted_phrase(num_tensors, "tensor"),
        size=memory_text(num_bytes),
        files=counted_phrase(len(files), "file"),
        place=str(place),
    )
    tell(say("step {step}: {told}", step=fields["step"], told=line) if fields else line)
