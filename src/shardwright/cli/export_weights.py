"""The commands that write the weights of a checkpoint or of a folder to files that other programs read."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwright.cli.job_options import json_option
from shardwright.cli.kept_checkpoints import as_fault, chosen_step, found_checkpoints

if TYPE_CHECKING:
    from shardwright.train.checkpoint.safetensors_folder import Files


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
    type=click.FloatRange(0.001, 1024),
    default=4.0,
    show_default=True,
    help="Most GiB of a file in a folder; a tensor is never cut.",
)
_overwrite = click.option("--overwrite", is_flag=True, help="Write over what was written earlier.")


@click.command(name="export")
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
def export(
    run: str,
    target: Path,
    step: int | None,
    dtype: str,
    file_gib: float,
    names: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the weights of one checkpoint as whole tensors to safetensors files."""
    from shardwright.config.base import PlanError
    from shardwright.train.checkpoint.kept import manifest_of

    place = _place(target)
    storage, steps = found_checkpoints(run)
    with as_fault(run, place):
        manifest = manifest_of(storage, chosen_step(run, storage, steps, step))
        from shardwright.train.checkpoint.export import export_weights
        from shardwright.train.checkpoint.released_export import export_released, has_family

        is_file = place.suffix == ".safetensors"
        if names == "hugging-face" and is_file:
            raise PlanError("--to", [f"{target} is a file; transformers opens folders, so name one"])
        released = names == "hugging-face" or (names is None and not is_file and has_family(manifest))
        write = export_released if released else export_weights
        files = write(storage, manifest, place, dtype=dtype, file_bytes=int(file_gib * 2**30), overwrite=overwrite)
    _tell(files, place, {"step": manifest.step}, f"step {manifest.step}: ", as_json)


@click.command()
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
@click.pass_context
def convert(
    context: click.Context, source: str, target: Path, dtype: str, file_gib: float, overwrite: bool, as_json: bool
) -> None:
    """Write a model's FOLDER again as plain safetensors files: quantised weights (fp8, MXFP4) become numbers that can
    be trained, pickled files safetensors. Of a RUN, the newest healthy checkpoint is exported.

    Names and layouts of the tensors stay, and config.json and the tokenizer go along.
    """
    from shardwright.config.hugging_face.config_json import names_config, path_of

    if not names_config(source):
        context.invoke(
            export,
            run=source,
            target=target,
            step=None,
            dtype=dtype,
            file_gib=file_gib,
            names=None,
            overwrite=overwrite,
            as_json=as_json,
        )
        return
    from shardwright.train.checkpoint.converting import convert_folder

    place = _place(target)
    files = convert_folder(
        path_of(source).parent, place, dtype=dtype, file_bytes=int(file_gib * 2**30), overwrite=overwrite
    )
    _tell(files, place, {}, "", as_json)


def _place(target: Path) -> Path:
    """The absolute path to write to. Raises PlanError for an address."""
    from shardwright.config.base import PlanError

    if "://" in str(target) or ":/" in str(target):
        raise PlanError("--to", [f"{target} is an address; name a file or folder of this machine"])
    return target.expanduser().absolute()


def _tell(files: "Files", place: Path, fields: dict[str, int], start: str, as_json: bool) -> None:
    from shardwright.config.units import counted, memory_text

    num_bytes = sum(tensor.num_bytes for tensors in files.values() for tensor in tensors)
    if as_json:
        written = {name: [tensor.name for tensor in tensors] for name, tensors in files.items()}
        click.echo(json.dumps(fields | {"to": str(place), "bytes": num_bytes, "files": written}))
        return
    num_tensors = sum(map(len, files.values()))
    tensors_text = f"{counted(num_tensors, 'tensor')}, {memory_text(num_bytes)}"
    click.echo(f"{start}{tensors_text} in {counted(len(files), 'file')}, in {place}")
