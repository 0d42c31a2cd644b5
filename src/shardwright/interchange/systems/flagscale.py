"""FlagScale (BAAI): YAML whose sections `system`, `model` and `data` have Megatron-LM's arguments, at any depth.

The file of an experiment names that of its training by Hydra's `defaults`, in the package `train`.
"""

from collections.abc import Mapping
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.dotted_keys import flat_keys
from shardwright.config.fault_gathering_reader import is_whole
from shardwright.config.phrase import say
from shardwright.interchange.hydra_command import overridden, with_command_line
from shardwright.interchange.imported import Asked, ReadResult
from shardwright.interchange.reading.file_signs import FileSigns
from shardwright.interchange.reading.hydra_defaults import composed
from shardwright.interchange.reading.plain_data import read_data, resolved
from shardwright.interchange.reading.settings import Settings
from shardwright.interchange.reading.shell_words import ShellFault
from shardwright.interchange.system import SourceSystem
from shardwright.interchange.systems.megatron_arguments import read_arguments, read_result
from shardwright.interchange.systems.megatron_names import flags_of
from shardwright.interchange.training_programs import program_fault

SIGNS = (
    FileSigns(
        (
            ("system", "model.num_layers", "data"),
            ("defaults", "system", "model", "data"),
            ("system.tensor_model_parallel_size", "model"),
            ("system.pipeline_model_parallel_size", "model"),
            ("system.precision", "model.num_layers"),
            ("experiment", "train", "defaults"),
            ("train.system",),
            ("experiment.task", "defaults"),
        ),
        lacks=("training",),  # a section of people's own files, beside `system`, `model` and `data`
        commands=(r"\baction=run\b",),
    ),
)
_SECTIONS = ("system.", "model.", "data.")


def read(texts: Mapping[str, str], asked: Asked) -> ReadResult:
    """Read the file of an experiment with those that it begins from, or that of its training. Raises ShellFault."""
    texts, command_line = with_command_line(texts, asked)
    if fault := _task_fault(flat_keys(read_data(first := next(iter(texts)), texts[first])), asked):
        raise ShellFault(fault)
    flat = resolved(overridden(composed(texts), command_line))
    sections = {name.removeprefix("train."): value for name, value in flat.items()}
    arguments = {name.rpartition(".")[2]: value for name, value in sections.items() if name.startswith(_SECTIONS)}
    if not arguments:
        raise ShellFault(say("no section system, model or data has arguments; name the file that `train` names, too"))
    settings = Settings(overrides=asked.fields)
    settings.faults += [fault for fault in (_task_fault(sections, asked),) if fault]
    if not str(sections.get("experiment.task.entrypoint", "")):
        settings.note(say("no file of an experiment names the program that trains; that of GPT is taken"))
    multiple, multiplier = arguments.pop("multiple_of", None), arguments.pop("hidden_dim_multiplier", 1.0)
    if arguments.get("swiglu") is True and is_whole(multiple) and "ffn_hidden_size" not in arguments:
        arguments["ffn_hidden_size"] = _width(arguments.get("hidden_size"), multiple, multiplier)
    flags, spelled = flags_of(arguments)
    launched = _launched(sections)
    fields = read_arguments(flags, spelled, asked, launched, settings)
    return read_result(fields, settings, asked, launched, "flagscale")


def _task_fault(keys: Mapping[str, Any], asked: Asked) -> str:
    """The fault of an experiment whose task is no training of text with Megatron-LM; empty if it says none."""
    task = {name: str(keys.get(f"experiment.task.{name}", "")) for name in ("type", "backend", "entrypoint")}
    if task["type"] in ("", "train") and task["backend"] in ("", "megatron"):
        return program_fault(task["entrypoint"], asked.variables)
    return say(
        "its task is {task} with {backend}, and tasks that train with megatron are read; name the file of one",
        task=shortened(task["type"] or "train", 40),
        backend=shortened(task["backend"], 40),
    )


def _width(hidden: Any, multiple: int, multiplier: Any) -> int | None:
    """The width inside a gated MLP: two thirds of four times the model's, times a multiplier, up to a multiple."""
    if not is_whole(hidden) or not isinstance(multiplier, (int, float)) or multiple < 1:
        return None
    width = int(int(4 * hidden * 2 / 3) * multiplier)
    return multiple * -(-width // multiple)


def _launched(sections: Mapping[str, Any]) -> tuple[int, int]:
    """Nodes, and devices of each; 0 where the runner says none."""
    sizes = [sections.get(f"experiment.runner.{name}") for name in ("nnodes", "nproc_per_node")]
    nodes, devices = (size if isinstance(size, int) and size > 0 else 0 for size in sizes)
    return nodes, devices


FACTS = SourceSystem(name="flagscale", place=120, title="FlagScale", read=read, signs=SIGNS)
