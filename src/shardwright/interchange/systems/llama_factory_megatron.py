"""LLaMA-Factory over Megatron-LM (by the mcore adapter, or by Megatron-Bridge): its YAML has options of transformers'
TrainingArguments beside Megatron-LM's arguments, which say what is split."""

from collections.abc import Mapping
from math import prod
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.fault_gathering_reader import whole
from shardwright.config.phrase import say
from shardwright.interchange.imported import Asked, ReadResult, uncounted_note
from shardwright.interchange.known_settings import is_uncounted, is_usual, subjects
from shardwright.interchange.launcher import Launched
from shardwright.interchange.named_model import read_named_model, shape_fields
from shardwright.interchange.reading.setting_notes import nearest_here
from shardwright.interchange.reading.settings import Flat, Settings
from shardwright.interchange.systems.adapter_settings import read_adapter
from shardwright.interchange.systems.megatron_arguments import read_arguments, read_result, without_model
from shardwright.interchange.systems.megatron_names import flags_of
from shardwright.interchange.training_programs import program_fault

_DEGREES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
# Options of TrainingArguments -> Megatron-LM's arguments with the same values.
_SAME = {
    "per_device_train_batch_size": "micro_batch_size",
    "cutoff_len": "seq_length",
    "learning_rate": "lr",
    "max_steps": "train_iters",
    "warmup_steps": "lr_warmup_iters",
    "warmup_ratio": "lr_warmup_fraction",
    "max_grad_norm": "clip_grad",
    "adam_epsilon": "adam_eps",
}
_DEFAULTS: Mapping[str, Any] = {
    "micro_batch_size": 1,
    "seq_length": 2048,
    "lr": 5e-5,
    "train_iters": 1000,
    "clip_grad": 1.0,
    "adam_beta2": 0.999,
    "weight_decay": 0.0,
}
_BATCH = "batch.global_batch_size"
_OF_A_REPLICA = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_OF_A_DEVICE = ("per_device_train_batch_size", "gradient_accumulation_steps")
_SCHEDULES = ("constant", "linear", "cosine")
_MODEL = "model_name_or_path"
_SWITCHES = ("use_mca", "use_megatron_bridge")
_READ = ("do_train", "gradient_accumulation_steps", "lr_scheduler_type", "num_train_epochs", *_SWITCHES)


def is_megatron(options: Mapping[str, Any]) -> bool:
    """True if options split a model as Megatron-LM does, or start Megatron-LM."""
    return any(name in options for name in _DEGREES) or any(options.get(name) is True for name in _SWITCHES)


def read_options(
    options: Mapping[str, Any],
    model: Mapping[str, Any] | None,
    command: Launched | None,
    asked: Asked,
    faults: tuple[str, ...],
) -> ReadResult:
    """The job of LLaMA-Factory's options, with the model's config.json and the command that starts it; `faults` are
    those of its files."""
    arguments = dict(_DEFAULTS) | {_SAME.get(name, name): value for name, value in options.items() if name != _MODEL}
    if arguments["train_iters"] == -1:
        arguments["train_iters"] = _DEFAULTS["train_iters"]
    word = str(options.get("lr_scheduler_type", "linear"))
    arguments["lr_decay_style"] = word if word in _SCHEDULES else "cosine"
    launched = (command.nodes, command.devices_per_node) if command else (0, 0)
    world = asked.cluster.devices or launched[0] * launched[1]
    counts, count_faults = _counts(options)
    if world:
        arguments["global_batch_size"] = _batch(counts, world)
    flags, spelled = flags_of(arguments)
    spelled |= {flag: own for flag, name in spelled.items() for own, same in _SAME.items() if same == name}
    settings = Settings({**flags, _MODEL: options.get(_MODEL)}, spelled=spelled, overrides=asked.fields)
    settings.faults += faults
    if _BATCH not in asked.fields:
        settings.faults += count_faults
    keys = dict(model) if model is not None else None
    shape = shape_fields(read_named_model(keys, (_MODEL,), asked, settings), asked)
    if "model.layers" not in shape:
        return without_model(settings)
    fields = read_arguments(flags, spelled, asked, launched, settings, shape)
    _read_kind(settings, fields)
    settings.note(
        say(
            "the batch is that of {dp} replicas, gradient_accumulation_steps times each (--set {field}=N)",
            dp=fields.get("plan.dp", 1),
            field=_BATCH,
        )
    )
    _tell(settings, options, word)
    return read_result(fields, settings, asked, launched, "llamafactory")


def _counts(options: Mapping[str, Any]) -> tuple[dict[str, int], list[str]]:
    """(numbers that make the batch of a step, 1 where the options have none; faults of those that are no numbers)."""
    counts, faults = dict[str, int](), list[str]()
    for name in (*_OF_A_REPLICA, *_OF_A_DEVICE):
        number = whole(str(options.get(name, 1)))
        if not number:
            text = shortened(str(options[name]))
            faults.append(
                say(
                    "{setting} is no whole number of at least 1; write one, or --set {field}=N",
                    setting=f"{name} = {text}",
                    field=_BATCH,
                )
            )
        counts[name] = number or 1
    return counts, faults


def _batch(counts: Mapping[str, int], world: int) -> int:
    """The samples of a step: those of a device, times the steps that are added up, times the replicas."""
    replicas = max(1, world // prod(counts[name] for name in _OF_A_REPLICA))
    return replicas * prod(counts[name] for name in _OF_A_DEVICE)


def _read_kind(settings: Settings, fields: Flat) -> None:
    """Read LoRA, which LLaMA-Factory trains if finetuning_type is not another; refuse stages that learn otherwise."""
    if (stage := settings.text("stage", "sft")) not in ("sft", "pt"):
        fault = say("{setting} is not counted here; use sft", setting=settings.setting_text("stage"))
        settings.faults.append(program_fault(stage, {}) or fault)
    if settings.given.get("finetuning-type") == "full":
        settings.ignore("finetuning-type")
        return
    settings.given.setdefault("finetuning-type", "lora")
    read_adapter(settings, fields, lambda name: name.replace("_", "-"))


def _tell(settings: Settings, options: Mapping[str, Any], schedule: str) -> None:
    """Tell what a job lacks, and mark as read what changes no plan."""
    if schedule not in _SCHEDULES:
        settings.lost.append(nearest_here(f"lr_scheduler_type = {schedule[:40]}", "cosine"))
    if options.get("num_train_epochs") is not None and options.get("max_steps", -1) == -1:
        settings.lost.append(
            say(
                "{subject}: {fault}",
                subject=f"num_train_epochs = {options['num_train_epochs']}",
                fault=say("steps are counted here (--set optimizer.steps=N)"),
            )
        )
    settings.ignore(*(name.replace("_", "-") for name in _READ))
    topics = subjects([f"--{name}" for name in options], "options", "llamafactory")
    for option, topic in topics.items():
        name = option.removeprefix("--")
        if is_uncounted(topic) and not is_usual(option, options[name]):
            settings.lost.append(uncounted_note([f"{name} = {options[name]}"], topic))
        settings.ignore(name.replace("_", "-"))
