"""The command that writes the weights of a checkpoint to files that other programs read."""

import json
from pathlib import Path

import click

from shardwright.cli.job_options import json_option
from shardwright.cli.kept_checkpoints import as_fault, chosen_step, found_checkpoints


@click.command(name="export")
@click.argument("run")
@click.option(
    "--to",
    required=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="A file that ends in .safetensors, or a folder for files of --file-gib with an index.",
)
@click.option("--step", type=click.IntRange(0), help="Which one.  [default: the newest]")
@click.option(
    "--dtype",
    type=click.Choice(["keep", "float32", "bf16"]),
    default="keep",
    show_default=True,
    help="Number type of the weights; keep is the one that they are saved in.",
)
@click.option(
    "--file-gib",
    type=click.FloatRange(0.001, 1024),
    default=4.0,
    show_default=True,
    help="Most GiB of a file in a folder; a tensor is never cut.",
)
@click.option(
    "--names",
    type=click.Choice(["own", "hugging-face"]),
    help="Names and layouts of the tensors: those of the parameters here, or of a model that transformers opens, with "
    "config.json.  [default: hugging-face for a folder, where a family has the model]",
)
@click.option("--overwrite", is_flag=True, help="Write over an earlier export.")
@json_option
def export(
    run: str, to: Path, step: int | None, dtype: str, file_gib: float, names: str | None, overwrite: bool, as_json: bool
) -> None:
    """Write the weights of one checkpoint as whole tensors to safetensors files."""
    from shardwright.config.base import PlanError
    from shardwright.config.units import counted, memory_text
    from shardwright.train.checkpoint.kept import manifest_of

    if "://" in str(to) or ":/" in str(to):
        raise PlanError("checkpoint export --to", [f"{to} is an address; name a file or folder of this machine"])
    storage, steps = found_checkpoints(run)
    with as_fault(run):
        manifest = manifest_of(storage, chosen_step(run, steps, step))
        from shardwright.train.checkpoint.export import export_weights
        from shardwright.train.checkpoint.released_export import export_released, has_family

        place = to.expanduser().absolute()
        is_file = place.suffix == ".safetensors"
        if names == "hugging-face" and is_file:
            raise PlanError("checkpoint export --to", [f"{to} is a file; transformers opens folders, so name one"])
        released = names == "hugging-face" or (names is None and not is_file and has_family(manifest))
        write = export_released if released else export_weights
        files = write(storage, manifest, place, dtype=dtype, file_bytes=int(file_gib * 2**30), overwrite=overwrite)
    num_bytes = sum(tensor.num_bytes for held in files.values() for tensor in held)
    if as_json:
        written = {name: [tensor.name for tensor in held] for name, held in files.items()}
        click.echo(json.dumps({"step": manifest.step, "to": str(place), "bytes": num_bytes, "files": written}))
        return
    num_tensors = sum(map(len, files.values()))
    click.echo(
        f"step {manifest.step}: {counted(num_tensors, 'tensor')}, {memory_text(num_bytes)} in "
        f"{counted(len(files), 'file')}, in {place}"
    )
