"""Megatron-LM's arguments as other systems' configurations have them: with underscores, and true or false.

Primus, FlagScale, ms-swift, Megatron-Bridge and NeMo's recipes say them so; each has its own defaults and files.
"""

import re
from collections.abc import Mapping
from typing import Any

from shardwright.config.phrase import with_changed_texts
from shardwright.interchange.imported import Asked, ReadResult
from shardwright.interchange.named_model import read_named_model, shape_fields
from shardwright.interchange.reading.settings import Flat, Settings
from shardwright.interchange.systems import megatron
from shardwright.interchange.systems.megatron_names import flags_of
from shardwright.interchange.systems.megatron_plan import WORLD


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
        settings.given = dict(flags)
        settings.ignore(*flags)
        return ReadResult({}, settings, "megatron-core")
    fields = read_arguments(flags, spelled, asked, launched, settings, shape)
    return read_result(fields, settings, asked, launched, system)


def _with_names(text: str, spelled: Mapping[str, str]) -> str:
    """A text with the names of the configuration in place of Megatron-LM's flags; options of commands stay."""

    def replaced(match: re.Match[str]) -> str:
        known = spelled.get(match[1]) or (match[1].replace("-", "_") if match[1] in _KNOWN_FLAGS else "")
        return known or match[0]

    return with_changed_texts(text, lambda part: re.sub(r"--([a-z0-9]+(?:-[a-z0-9]+)*)", replaced, part))


_KNOWN_FLAGS = frozenset(("num-layers", "hidden-size", "num-attention-heads", "vocab-size", "recompute-modules"))
