"""The configuration of DeepSpeed that a command of Megatron-DeepSpeed names: what it shards and offloads. Sizes and
number types stand in the command, too, and must be the same there."""

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath

from shardwright.config.base import shortened
from shardwright.config.dotted_keys import flat_keys
from shardwright.config.phrase import say
from shardwright.interchange.reading.plain_data import read_data
from shardwright.interchange.reading.settings import Flat, Settings

_PLACEHOLDER = re.compile(r"(:)\s*[A-Z][A-Z0-9_]+(?=\s*[,}])")  # of a template that the script fills in


def read_engine(settings: Settings, texts: Mapping[str, str], written: Mapping[str, str]) -> None:
    """Read DeepSpeed's configuration: what is offloaded, and the stage of ZeRO if neither a flag nor --set gives it.
    Of two files of its name the one counts that the script writes."""
    name = settings.given.get("deepspeed-config")
    if not isinstance(name, str):
        return
    files = [*written.items(), *texts.items()]
    named = [text for path, text in files if PurePath(path).name == PurePath(name).name]
    others = [text for path, text in files if path.endswith(".json")]
    text = named[0] if named else others[0] if len(others) == 1 else None  # such as the template that it is made of
    if text is None and (settings.has("zero-stage") or "plan.zero" in settings.overrides):
        settings.lose(
            "deepspeed-config", say("it is not read, and what it offloads is not in the job; name that file too")
        )
        return
    if text is None:
        settings.faults.append(
            say(
                "{setting} says what is sharded and offloaded, and it is not read: name that file, or say --set "
                "plan.zero=STAGE",
                setting=f"--deepspeed-config {shortened(name)}",
            )
        )
        return
    keys = flat_keys(read_data("deepspeed.json", _PLACEHOLDER.sub(r"\1 null", text)))
    _refuse_contradictions(settings, keys, name)
    if not settings.has("zero-stage") and "plan.zero" not in settings.overrides:
        settings.given |= {"zero-stage": keys.get("zero_optimization.stage", 0)}
    offloaded = keys.get("zero_optimization.offload_optimizer.device", "none")
    if keys.get("zero_optimization.cpu_offload") is True or offloaded not in (None, "none"):
        settings.given["cpu-optimizer"] = True
        share = keys.get("zero_optimization.offload_optimizer.ratio", 1.0)
        settings.given.setdefault("optimizer-offload-fraction", share)
    if keys.get("zero_optimization.offload_param.device", "none") not in (None, "none"):
        settings.given["cpu-parameters"] = True
    if keys.get("curriculum_learning.enabled") is True or keys.get("data_efficiency.enabled") is True:
        settings.lost.append(say("sequences grow there at first (curriculum), and all have their full length here"))
    settings.ignore("deepspeed-config")


# Keys of DeepSpeed, flags of Megatron-LM that say the same, and the field that settles which counts.
_SIZES = (
    ("train_batch_size", "global-batch-size", "batch.global_batch_size"),
    ("train_micro_batch_size_per_gpu", "micro-batch-size", "plan.microbatch_size"),
)
_NUMBERS = {"bf16": ("bf16.enabled", "bfloat16.enabled"), "fp16": ("fp16.enabled",)}


def _refuse_contradictions(settings: Settings, keys: Flat, name: str) -> None:
    """A fault for each size or number type that the configuration has otherwise than the command."""
    for key, text, flag, field in (*_other_sizes(settings, keys), *_other_numbers(settings, keys)):
        if field not in settings.overrides:
            settings.faults.append(
                say(
                    "{file} has {key} {value}, and the command has {flag}: DeepSpeed takes the one and the program the "
                    "other; say which is right with --set {field}=VALUE",
                    file=shortened(name),
                    key=key,
                    value=text,
                    flag=flag,
                    field=field,
                )
            )


def _other_sizes(settings: Settings, keys: Flat) -> Iterator[tuple[str, str, str, str]]:
    for key, flag, field in _SIZES:
        in_file, in_command = (_whole(value) for value in (keys.get(key), settings.given.get(flag)))
        if in_file is not None and in_command is not None and in_file != in_command:
            yield key, str(in_file), f"--{flag} {in_command}", field


def _other_numbers(settings: Settings, keys: Flat) -> Iterator[tuple[str, str, str, str]]:
    in_file = {kind: name for kind, names in _NUMBERS.items() for name in names if keys.get(name) is True}
    in_command = [kind for kind in _NUMBERS if settings.given.get(kind) not in (None, False)]
    for kind in in_command:
        for other in in_file.keys() - in_command:
            yield in_file[other], "true", f"--{kind}", "precision.compute"


def _whole(value: object) -> int | None:
    """A whole number that a file or a flag says; None for "auto", a placeholder or a variable that nobody sets."""
    text = str(value).replace("_", "")
    return int(text) if re.fullmatch(r"\d{1,15}", text) else None
