"""Programs with the options of alpaca-lora's program: a batch of all devices beside the sequences that a device
takes at once, a length to cut at, and adapters on a base in 8 bits where no option says another."""

from collections.abc import Mapping
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.phrase import say
from shardwright.interchange.imported import Asked
from shardwright.interchange.reading.file_signs import SHARED, FileSigns

_MICRO, _LENGTH, _TARGETS, _BATCH = "--micro_batch_size", "--cutoff_len", "--lora_target_modules", "--batch_size"
_EARLIER = {"--micro_train_batch_size": _MICRO}  # names of programs made of it
_SIGN = rf"(?:{_LENGTH}|{_TARGETS})\b"
_MICROS = r"--micro_(?:train_)?batch_size\b"
SIGNS = FileSigns(
    commands=(
        rf"(?s){_MICROS}(?:(?!\.py\b).){{0,2000}}{_SIGN}",
        rf"(?s){_SIGN}(?:(?!\.py\b).){{0,2000}}{_MICROS}",
    ),
    weight=SHARED,
)
# Defaults of its program, where no option says another.
_DEFAULTS: dict[str, Any] = {_BATCH: 128, _LENGTH: 256, "--learning_rate": 3e-4}
_ACCUMULATED = ("--gradient_accumulation_steps", "--accumulation_steps", "--grad_accum", "--global_batch_size")
SWITCH = "alpaca_lora"  # the name by which such options mean adapters
ADAPTERS = "ADAPTERS"  # the variable by which --set says that there are none
_NONE = "none"
_OF_ADAPTERS = ("--lora_", "--use_lora", "--use_peft", "--peft", "--target_modules")
_OF_NUMBERS = ("--fp16", "--bf16", "--mixed_precision", "--config_file", "--deepspeed", "--deepspeed_config", "--dtype")
_OF_BITS = ("--load_in_8bit", "--load_8bit", "--use_8bit", "--load_in_4bit", "--load_4bit", "--use_4bit", "--bits")
_RANK, _BASE = "model.adapter.rank", "model.adapter.base"


def has_options(options: Mapping[str, Any]) -> bool:
    """True if the options of a command are those of alpaca-lora's program."""
    return bool(options.keys() & {_MICRO, *_EARLIER}) and bool(options.keys() & {_LENGTH, _TARGETS})


def _missing(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the program has by default, and none says."""
    says_batch = bool(options.keys() & {*_ACCUMULATED})
    return {
        name: value for name, value in _DEFAULTS.items() if name not in options and not (name == _BATCH and says_batch)
    }


def renamed(options: dict[str, Any], asked: Asked) -> dict[str, Any]:
    """Options of a command, with those of alpaca-lora's program by the names of others."""
    if not has_options(options):
        return options
    names = {_BATCH: "--global_batch_size"} | _EARLIER
    own = {names.get(name, name): value for name, value in (options | _missing(options)).items()}
    own = ({} if own.keys() & {*_OF_NUMBERS} else {"--fp16": True}) | own
    has_adapters = _has_adapters(options) or asked.fields.get(_RANK)
    return own | {f"--{SWITCH}": "true"} if has_adapters and not _says_none(asked) else own


def faults_of(program: str, options: Mapping[str, Any], asked: Asked) -> list[str]:
    """Faults of options of alpaca-lora's program that leave open what is trained, each with a way to say it."""
    if not has_options(options) or _says_none(asked):
        return []
    own = shortened(program, 60)
    if not _has_adapters(options) and _RANK not in asked.fields:
        return [
            say(
                "{program} has the options of alpaca-lora's program, which trains adapters of rank 8 where none says "
                "another; say if it does: --set {rank}=8 --set {base}=compute, or --set {variable}={none} for all "
                "weights",
                program=own,
                rank=_RANK,
                base=_BASE,
                variable=ADAPTERS,
                none=_NONE,
            )
        ]
    if _BASE in asked.fields or any(name in options for name in _OF_BITS):
        return []
    return [
        say(
            "{program} has the options of alpaca-lora's program, which loads its base in 8 bits, and those are not "
            "counted here; say --set {base}=compute for 16 bits, or --set {base}=nf4",
            program=own,
            base=_BASE,
        )
    ]


def notes_of(options: Mapping[str, Any]) -> list[str]:
    """Notes on how the batch of such options is meant, and on the type of numbers where none says it."""
    if not has_options(options):
        return []
    notes = list[str]()
    if _BATCH in options:
        notes.append(
            say(
                "{batch} is of all devices, as alpaca-lora's program has it (--set batch.global_batch_size=N for "
                "another)",
                batch=f"{_BATCH} = {shortened(str(options[_BATCH]), 20)}",
            )
        )
    if missing := _missing(options):
        taken = tuple(f"{name} {value}" for name, value in missing.items())
        notes.append(say("alpaca-lora's own defaults hold where nothing is said: {options}", options=taken))
    if not options.keys() & {*_OF_NUMBERS}:
        notes.append(say("fp16 is taken, as alpaca-lora's program has it (--set precision.compute=NAME for another)"))
    return notes


def _has_adapters(options: Mapping[str, Any]) -> bool:
    return any(name.startswith(_OF_ADAPTERS) for name in options)


def _says_none(asked: Asked) -> bool:
    return asked.variables.get(ADAPTERS) == _NONE
