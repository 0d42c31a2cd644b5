"""ms-swift: `megatron sft` and `megatron pt`, commands with Megatron-LM's arguments and the name of a model. Their
options may stand in a YAML. `swift sft` and `swift pt`, over transformers' Trainer, are in swift_trainer.py."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.fault_gathering_reader import whole
from shardwright.config.phrase import say
from shardwright.interchange.imported import Asked, ReadResult
from shardwright.interchange.launcher import NODES, Launched, find_training_command, missing_ranks
from shardwright.interchange.named_model import is_model, read_named_model, shape_fields
from shardwright.interchange.reading.file_signs import FileSigns
from shardwright.interchange.reading.loose_words import loose_faults
from shardwright.interchange.reading.plain_data import object_of, read_data
from shardwright.interchange.reading.settings import Settings
from shardwright.interchange.system import SourceSystem
from shardwright.interchange.systems import swift_trainer
from shardwright.interchange.systems.adapter_settings import read_adapter
from shardwright.interchange.systems.megatron_arguments import read_arguments, read_result, without_model
from shardwright.interchange.systems.megatron_names import flags_of, is_said

SIGNS = (
    FileSigns(
        (("global_batch_size", "micro_batch_size", "lr", "model"),),
        commands=(r"\bmegatron\s+(sft|pt|rlhf)\b",),
    ),
    *swift_trainer.SWIFT.signs,
)
_DATA = (".json", ".yaml", ".yml")
_MODELS = ("model", "load", "mcore-model")
# Defaults that differ from Megatron-LM's, as documented of Megatron-SWIFT 4.
_DEFAULTS: Mapping[str, Any] = {
    "micro-batch-size": 1,
    "global-batch-size": 16,
    "recompute-granularity": "selective",
    "lr": 1e-5,
    "use-distributed-optimizer": True,
    "lr-decay-style": "cosine",
    "weight-decay": 0.1,
    "adam-beta2": 0.95,
    "moe-token-dispatcher-type": "alltoall",
    "moe-aux-loss-coeff": 0.0,
    "expert-tensor-parallel-size": 1,
    "fp8-amax-history-len": 1024,
}
_FURTHER = "megatron_extra_kwargs"  # an object of further arguments of Megatron-LM, which hold over the others
_HALF = ("float16", "float32")  # types of a model's weights that are trained in fp16 if nothing else is said


def is_training(words: list[str]) -> bool:
    """True if a command is one of Megatron-SWIFT."""
    return any(PurePath(word).name == "megatron" for word in words[:-1])


def read(texts: Mapping[str, str], asked: Asked) -> ReadResult:
    """Read a script or a YAML, with the model's config.json. Raises ShellFault."""
    if swift_trainer.starts_trainer(texts):
        return swift_trainer.read(texts, asked)
    data = {name: read_data(name, text) for name, text in texts.items() if name.lower().endswith(_DATA)}
    scripts = {name: text for name, text in texts.items() if name not in data}
    model = next((keys for keys in data.values() if is_model(keys)), None)
    given: dict[str, Any] = {}
    variables: dict[str, str] = {}
    for keys in [keys for keys in data.values() if not is_model(keys)]:
        given |= {str(name): value for name, value in keys.items() if name != "ENV"}
        variables |= {str(name): str(value) for name, value in (keys.get("ENV") or {}).items()}
    command = find_training_command(scripts, asked, is_training) if scripts else None
    settings = Settings(notes=list(command.notes) if command else [], overrides=asked.fields)
    if command:
        _check_task(command, given, settings)
        given |= command.settings
        variables |= command.exported
        settings.faults += [] if asked.cluster.devices or NODES in variables else missing_ranks(command)
    arguments = {name.replace("-", "_"): value for name, value in given.items()}
    arguments |= object_of(arguments.get(_FURTHER))
    flags, spelled = flags_of(arguments)
    settings.given, settings.spelled = dict(flags), spelled
    shape = shape_fields(read_named_model(model, _MODELS, asked, settings), asked)
    if "model.layers" not in shape:
        return without_model(settings)
    launched = _launched(variables)
    fields = read_arguments(_with_defaults(flags, arguments, model), spelled, asked, launched, settings, shape)
    read_adapter(settings, fields, lambda name: name.replace("_", "-"))
    if command:
        settings.faults += loose_faults(command.loose, settings, "megatron", "ms-swift")
    settings.ignore(*_MODELS, *([_FURTHER.replace("_", "-")] if object_of(arguments.get(_FURTHER)) else []))
    return read_result(fields, settings, asked, launched, "ms-swift")


def _check_task(command: Launched, given: Mapping[str, Any], settings: Settings) -> None:
    """Add a fault for a task that is no training by next tokens, and for a YAML of options that is not read."""
    task, *rest = command.arguments or ("",)
    if task not in ("sft", "pt"):
        settings.faults.append(
            say("megatron {task} is not counted here; name a script of megatron sft or pt", task=shortened(task, 40))
        )
    if (kind := command.settings.get("task-type", given.get("task_type", "causal_lm"))) != "causal_lm":
        setting = f"--task_type {shortened(str(kind), 40)}"
        settings.faults.append(say("{setting}: training by next tokens is counted here", setting=setting))
    if rest and rest[0].endswith(_DATA) and not given:
        settings.faults.append(
            say("{file} has the options of the command, and is not read: name it too", file=shortened(rest[0]))
        )


def _with_defaults(
    flags: Mapping[str, Any], arguments: Mapping[str, Any], model: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The flags over the documented defaults of those that no argument switches off, with the number type of the
    model's weights if no flag gives one."""
    given = {name: value for name, value in _DEFAULTS.items() if not is_said(name, arguments)} | dict(flags)
    if not {"bf16", "fp16"} & flags.keys():
        dtype = str((model or {}).get("torch_dtype") or (model or {}).get("dtype") or "bfloat16")
        given["fp16" if dtype in _HALF else "bf16"] = True
    if flags.get("use-megatron-fsdp"):
        given.setdefault("data-parallel-sharding-strategy", "optim_grads_params")
    return given


def _launched(variables: Mapping[str, str]) -> tuple[int, int]:
    """Nodes, and devices of each, by the variables that ms-swift reads; 0 where none says them."""
    devices = whole(variables.get("NPROC_PER_NODE", "")) or 0
    nodes = variables.get(NODES, "1")
    return (whole(nodes) or 0) if devices else 0, devices


FACTS = SourceSystem(name="ms-swift", place=160, title="ms-swift", read=read, signs=SIGNS)
