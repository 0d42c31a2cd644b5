"""Shapes that Megatron-LM takes from a checkpoint: `--use-checkpoint-args`.

Arguments of the model that the checkpoint has then hold before those of the command (its
load_args_from_checkpoint, whose _set_arg has force=True for them).
"""

from shardwright.config.base import shortened
from shardwright.config.model import ModelSpec
from shardwright.config.phrase import say
from shardwright.interchange.imported import Asked
from shardwright.interchange.named_model import entry_of_path, shape_fields
from shardwright.interchange.reading.settings import Flat, Settings

OPTION = "use-checkpoint-args"
_PLACES = ("load", "pretrained-checkpoint")
# Fields of a model that the arguments in a checkpoint say, and that change what it holds and computes.
_SHAPE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "gated_mlp", "norm", "bias", "tied_embeddings")


def read_checkpoint_arguments(settings: Settings, fields: Flat, asked: Asked) -> None:
    """Note that the shape is the checkpoint's, where the command says a shape, too. A fault if the checkpoint is called
    after a model of the catalog that has another."""
    if not settings.flag(OPTION) or "model.layers" not in fields:
        return
    place = next((name for name in _PLACES if settings.has(name)), "")
    entry = entry_of_path(settings.text(place)) if place else ""
    there = _shape_of(shape_fields({"model.name": entry}, asked)) if entry else {}
    here = _shape_of(fields | asked.fields)
    other = {name: value for name, value in there.items() if value != here[name]}
    if not other:
        settings.note(
            say(
                "{option}: the shape is that of the command, and a checkpoint that has another holds before it there "
                "(--set model.layers=N and the like)",
                option=f"--{OPTION}",
            )
        )
        return
    settings.faults.append(
        say(
            "{option}: the shape is that of the checkpoint, and {folder} is called after {entry}, which has {there} "
            "where the command has {here}; say which holds: --set model.name={entry}, or {fields}",
            option=f"--{OPTION}",
            folder=shortened(settings.text(place), 60),
            entry=entry,
            there=_words(other),
            here=_words({name: here[name] for name in other}),
            fields=" ".join(f"--set model.{name}={value}" for name, value in other.items()),
        )
    )


def _shape_of(fields: Flat) -> dict[str, str]:
    """The shape by field, as --set has values, with the defaults of a job."""
    model = {name: fields.get(f"model.{name}", ModelSpec.model_fields[name].default) for name in _SHAPE}
    model["kv_heads"] = model["kv_heads"] or model["heads"]
    model["head_dim"] = model["head_dim"] or int(model["hidden"]) // int(model["heads"])
    model["ffn"] = model["ffn"] or 4 * int(model["hidden"])
    return {name: str(value).lower() for name, value in model.items()}


def _words(shape: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in shape.items())
