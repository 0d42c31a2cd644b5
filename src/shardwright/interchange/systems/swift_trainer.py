"""ms-swift over transformers' Trainer: `swift sft` and `swift pt`, options of TrainingArguments with its own defaults.

Names and defaults are those of ms-swift 3 and 4, by their documentation of command-line parameters; sft_type is that of
releases before. It brings configurations of DeepSpeed by the names zero0 to zero3, zero2_offload and zero3_offload, and
one of FSDP by the name fsdp2.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from shardwright.config import catalog
from shardwright.config.base import shortened
from shardwright.config.fault_gathering_reader import whole
from shardwright.config.phrase import say
from shardwright.interchange.imported import Asked, ReadResult
from shardwright.interchange.launched_ranks import visible_devices
from shardwright.interchange.launcher import Launched
from shardwright.interchange.reading.file_signs import FileSigns, is_configuration, names_in
from shardwright.interchange.reading.plain_data import read_data
from shardwright.interchange.reading.shell_marks import unknown_names
from shardwright.interchange.systems.trainer_files import TrainerFile

# also $(which swift) sft, its module (swift.cli.sft) and its file
_COMMAND = r"(?<!megatron )\bswift(?:\)?\s+|[./]cli[./](?:main(?:\.py)?\s+)?)(sft|pt)\b"
_ON_CPU = {"device": "cpu"}
_OFFLOADS: Mapping[str, Mapping[str, Any]] = {
    "zero2_offload": {"offload_optimizer": _ON_CPU},
    "zero3_offload": {"offload_optimizer": _ON_CPU, "offload_param": _ON_CPU},
}
_ENGINES = ("zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")
_NAMED_ENGINE = re.compile(r"\bdeepspeed[ =:]+['\"]?((?:default-)?(\w+))(?=['\"\s\\]|$)")  # in a script or its YAML
_NAMED_FSDP2 = re.compile(r"\bfsdp[ =:]+['\"]?fsdp2(?=['\"\s\\]|$)")
_FSDP2 = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"fsdp_version": 2, "reshard_after_forward": True, "activation_checkpointing": True},
}
_SHARDED = re.compile(r"--(?:deepspeed[ =]+\S*zero_?3|fsdp[ =])")
# Options that `megatron sft` does not have, with which a configuration is of `swift sft`.
_OF_TRAINER = ("learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing")
_TYPES = ("train_type", "tuner_type", "sft_type")
_LEAST_SEQUENCES = 16  # of a step, to which ms-swift accumulates
_RATES = {"full": 1e-5}  # by what is trained; 1e-4 for the rest


def _own_options(data: Mapping[str, Any]) -> dict[str, Any]:
    """Options that follow from ms-swift's: what is trained, the rate for it, and the type of numbers."""
    kind = str(next((data[name] for name in _TYPES if data.get(name) is not None), "lora"))
    dtype = str(data.get("torch_dtype") or "bfloat16")
    options: dict[str, Any] = dict.fromkeys(f"--{name}" for name in _TYPES)
    options["--train_type"] = None if kind == "full" else kind
    if data.get("tuner_backend") == "peft":
        options["--tuner_backend"] = None
    if data.get("optimizer") is not None:  # of ms-swift's own, which --optim does not name
        options |= {"--optim": data["optimizer"], "--optimizer": None}
    if data.get("learning_rate") is None:
        options["--learning_rate"] = _RATES.get(kind, 1e-4)
    if entry := _model_by_type(data):
        options |= {"--model_name_or_path": entry, "--model_type": None}
    if not {"bf16", "fp16"} & data.keys():
        options |= {"--bf16": True} if dtype == "bfloat16" else {"--fp16": True} if dtype == "float16" else {}
        options |= {"--bf16": dtype} if unknown_names(dtype) else {}  # which is asked for
    return options


def _model_by_type(data: Mapping[str, Any]) -> str:
    """The catalog's name of the model that model_type names where no path does: in releases before 3 it has the size,
    with _ for a point, such as qwen2-0_5b-instruct. Empty if it names none."""
    known = catalog.names("models")
    paths = [str(data[name]) for name in ("model", "model_id_or_path") if data.get(name) is not None]
    entry = catalog.model_name(str(data.get("model_type", "")).replace("1half", "1.5").replace("_", "."))
    return entry if entry in known and not any(catalog.model_name(path) in known for path in paths) else ""


def _refusals(data: Mapping[str, Any]) -> list[str]:
    """Faults for a task that is no training by next tokens, and if nothing says how many microbatches a step has, which
    ms-swift derives from the number of GPUs."""
    if (task := data.get("task_type", "causal_lm")) != "causal_lm":
        return [
            say("{setting}: training by next tokens is counted here", setting=f"--task_type {shortened(str(task), 40)}")
        ]
    if data.get("gradient_accumulation_steps") is not None:
        return []
    return [
        say(
            "--gradient_accumulation_steps is not said, and ms-swift takes what makes at least 16 sequences; add it, "
            "or say how many GPUs there are with --devices"
        )
    ]


def _accumulation(data: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """The microbatches of a step if nothing says them: as many as make 16 sequences on all ranks."""
    size = _size(data) * ranks if ranks else _size(data)
    is_known = ranks > 0 or size >= _LEAST_SEQUENCES
    if data.get("gradient_accumulation_steps") is not None or not is_known:
        return {}
    return {"gradient_accumulation_steps": max(1, -(-_LEAST_SEQUENCES // max(1, size)))}


def _shared_devices(command: Launched) -> list[str]:
    """A fault if a process has several of the visible devices: ms-swift spreads the layers of a copy over them then,
    one device after the other (device_map), unless DeepSpeed's stage 3 or FSDP shards them."""
    visible = visible_devices(command.exported.get("CUDA_VISIBLE_DEVICES", ""))
    processes = command.exported.get("NPROC_PER_NODE", "")
    num_processes = whole(processes) or (0 if processes or command.launcher_settings else 1)
    if not num_processes or visible <= num_processes or _SHARDED.search(" ".join(command.arguments)):
        return []
    return [
        say(
            "NPROC_PER_NODE = {processes} starts fewer processes than the {visible} devices of CUDA_VISIBLE_DEVICES, "
            "and ms-swift spreads the layers of a copy over the devices of a process, which is not counted here; say "
            "as many as devices, or how many devices hold whole copies with --devices",
            processes=num_processes,
            visible=visible,
        )
    ]


def _size(data: Mapping[str, Any]) -> int:
    """The sequences of a microbatch."""
    size = data.get("per_device_train_batch_size", data.get("batch_size", 1))  # the latter in releases before 3
    return whole(str(size)) or 1


SWIFT = TrainerFile(
    "ms-swift",
    "ms-swift",
    {
        "model": "--model_name_or_path",
        "model_id_or_path": "--model_name_or_path",
        "num_epochs": "--num_train_epochs",
        "batch_size": "--per_device_train_batch_size",
    },
    {
        "--per_device_train_batch_size": 1,
        "--gradient_checkpointing": True,
        "--weight_decay": 0.1,
        "--adam_beta2": 0.95,
        "--lr_scheduler_type": "cosine",
    },
    _own_options,
    _refusals,
    signs=(
        FileSigns(tuple((name, "dataset", "model") for name in ("train_type", "tuner_type")), commands=(_COMMAND,)),
    ),
    by_ranks=_accumulation,
    launched=_shared_devices,
)


def starts_trainer(texts: Mapping[str, str]) -> bool:
    """True if the first file starts `swift sft` or `swift pt`, or is a configuration with their options."""
    first, text = next(iter(texts.items()))
    if is_configuration(first):
        return bool(names_in(read_data(first, text)) & {*_OF_TRAINER})
    return any(sign.fit_script(text) for sign in SWIFT.signs)


def read(texts: Mapping[str, str], asked: Asked) -> ReadResult:
    """Read a script, with the files that it names and the model's config.json. Raises ShellFault."""
    named = [pair for text in texts.values() for pair in _NAMED_ENGINE.findall(text)]
    engines = {name: _engine(plain) for name, plain in named if plain in _ENGINES}
    engines |= {"fsdp2": json.dumps(_FSDP2)} if any(_NAMED_FSDP2.search(text) for text in texts.values()) else {}
    return SWIFT.read(dict(texts) | engines, asked)


def _engine(name: str) -> str:
    """The text of one of the configurations of DeepSpeed that ms-swift brings."""
    sharding = {"stage": int(name.removeprefix("zero")[0]), **_OFFLOADS.get(name, {})}
    numbers = {key: {"enabled": "auto"} for key in ("bf16", "fp16")}
    automatic = dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
    )
    return json.dumps({"zero_optimization": sharding, **numbers, **automatic})
