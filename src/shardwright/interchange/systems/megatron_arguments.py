"""Megatron-LM's arguments as other systems' configurations have them: with underscores, and true or false.

Primus, FlagScale, ms-swift, Megatron-Bridge and NeMo's recipes say them so; each has its own defaults and files.
"""

import re
from collections.abc import Mapping
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.phrase import say, with_changed_texts
from shardwright.interchange.imported import Asked, ReadResult
from shardwright.interchange.known_settings import could_matter
from shardwright.interchange.named_model import read_named_model, shape_fields
from shardwright.interchange.reading.python_values import Named, ParsedCall, Unread
from shardwright.interchange.reading.settings import Flat, Settings
from shardwright.interchange.systems import megatron
from shardwright.interchange.systems.adapter_settings import read_adapter
from shardwright.interchange.systems.megatron_names import flags_of
from shardwright.interchange.systems.megatron_plan import WORLD, read_dp


def read_arguments(
    flags: Mapping[str, Any],
    spelled: Mapping[str, str],
    asked: Asked,
    launched: tuple[int, int],
    settings: Settings,
    model: Flat | None = None,
) -> Flat:
    """The fields of a job that flags give, with the names of the configuration in all messages of `settings`.

    `launched` are nodes and devices of each, 0 where that is unknown; `model` are fields of a model that no flags
    describe.
    """
    world = asked.cluster.devices or launched[0] * launched[1]
    settings.given = dict(flags) | ({WORLD: str(world)} if world else {})
    settings.spelled = dict(spelled)
    fields = megatron.fields_of(settings, asked, model)
    settings.ignore(WORLD)
    for name in ("faults", "notes", "lost"):
        setattr(settings, name, [_with_names(line, spelled) for line in getattr(settings, name)])
    return fields


def without_model(settings: Settings) -> ReadResult:
    """The result of a configuration whose model is not known, which asks for degrees and sizes, too, where variables
    that nobody sets give them."""
    for name in _COUNTS:
        settings.count(name, 1)
    settings.ignore(*settings.given)
    return ReadResult({}, settings, "megatron-core")


_COUNTS = (
    *("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size"),
    *("expert-model-parallel-size", "micro-batch-size", "global-batch-size", "max-length", "seq-length", "train-iters"),
)


def read_result(fields: Flat, settings: Settings, asked: Asked, launched: tuple[int, int], system: str) -> ReadResult:
    """The result of reading a configuration of a system."""
    software = megatron.software_of_flags(settings, fields, asked.cluster.device)
    nodes, devices_per_node = launched
    known = ("megatron", system)
    return ReadResult(fields, settings, software, 0 if asked.cluster.devices else nodes, devices_per_node, known)


def plain_arguments(arguments: Mapping[str, Any], asked: Asked, settings: Settings) -> dict[str, Any]:
    """Arguments of a recipe as plain data. An unknown value is the one that the user gives for its name, or it is told,
    with a fault where it could change the plan; parts that are objects are left out."""
    plain = dict[str, Any]()
    for name, value in arguments.items():
        if name.startswith("_"):  # an attribute of the recipe's own
            continue
        if unfollowed(value):
            if name in asked.variables:
                plain[name] = asked.variables[name]
            else:
                _tell_unknown(name, value, settings)
        elif not isinstance(value, (ParsedCall, dict)):
            plain[name] = value.last if isinstance(value, Named) else value
    return plain


def unfollowed(value: Any) -> str:
    """The text of a part of a recipe that is not known: an expression, or a function that none of the files has. Empty
    for an object and for plain data."""
    if isinstance(value, Unread):
        return shortened(value.text, 60)
    is_result = isinstance(value, ParsedCall) and not value.is_of_class
    return shortened(value.callee, 60) if is_result else ""


def part_fault(part: str, value: Any) -> str:
    """The fault of a part of a recipe that a function returns, which none of the files has; empty for any other."""
    if not (made := unfollowed(value)):
        return ""
    return say(
        "{part} is what {function} returns, which is in none of the files; name its file too", part=part, function=made
    )


_OF_MODEL = ("vocab_size",)  # its configuration has it


def _tell_unknown(name: str, value: Any, settings: Settings) -> None:
    """Tell of an argument whose value is not known, or add a fault if it could change the plan."""
    text, place = (value.text, value.place) if isinstance(value, Unread) else (f"{value.callee}()", "")
    setting = f"{name} = {shortened(text, 60)}" + (f" ({place})" if place else "")
    if could_matter(name.replace("_", "-"), text, "megatron") and name not in _OF_MODEL:
        settings.faults.append(
            say("{setting} is not known here; say what it is: --set {name}=VALUE", setting=setting, name=name)
        )
    else:
        settings.lost.append(say("{setting} is not known here", setting=setting))


def read_recipe(
    arguments: Mapping[str, Any],
    model: dict[str, Any] | None,
    asked: Asked,
    launched: tuple[int, int],
    settings: Settings,
    system: str,
) -> ReadResult:
    """The job of a recipe in Python, of which `settings` have the model: `arguments` by their names in Megatron-LM, the
    config.json of the model if there is one, nodes and devices of each (0, 0 if nothing says them). Nothing is read
    before the model has a shape, which is asked for."""
    shape = shape_fields(read_named_model(model, ("model",), asked, settings), asked)
    flags, spelled = flags_of(arguments)
    if "model.layers" not in shape:
        world = asked.cluster.devices or launched[0] * launched[1]
        settings.given, settings.spelled = dict(flags) | ({WORLD: str(world)} if world else {}), dict(spelled)
        degrees = zip(_COUNTS, ("plan.tp", "plan.pp", "plan.cp"), strict=False)
        read_dp(settings, {name: settings.count(flag, 1) for flag, name in degrees})
        return without_model(settings)
    fields = read_arguments(flags, spelled, asked, launched, settings, shape)
    read_adapter(settings, fields, lambda name: name.replace("_", "-"))
    return read_result(fields, settings, asked, launched, system)


def _with_names(text: str, spelled: Mapping[str, str]) -> str:
    """A text with the names of the configuration in place of Megatron-LM's flags; options of commands stay."""

    def replaced(match: re.Match[str]) -> str:
        known = spelled.get(match[1]) or (match[1].replace("-", "_") if match[1] in _KNOWN_FLAGS else "")
        return known or match[0]

    return with_changed_texts(text, lambda part: re.sub(r"--([a-z0-9]+(?:-[a-z0-9]+)*)", replaced, part))


_KNOWN_FLAGS = frozenset(("num-layers", "hidden-size", "num-attention-heads", "vocab-size", "recompute-modules"))
