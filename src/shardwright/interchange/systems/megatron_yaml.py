"""The YAML that Megatron-LM's --yaml-cfg names. It has all arguments, with those of the model and of its degrees in
sections of their own, and takes the place of the command's."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from shardwright.config.base import shortened
from shardwright.config.phrase import say
from shardwright.interchange.reading.file_signs import FileSigns
from shardwright.interchange.reading.plain_data import read_data
from shardwright.interchange.reading.shell_words import ShellFault
from shardwright.interchange.systems.megatron_names import flags_of

OPTION = "yaml-cfg"
SIGNS = FileSigns((("language_model", "model_parallel"),), commands=(rf"--{OPTION.replace('-', '[-_]')}\b",))
_SECTIONS = ("language_model", "model_parallel")
# The activation that the section of the model names -> the argument that means it. The argument `swiglu` of the file is
# not read by Megatron-LM.
_ACTIVATIONS = {"swiglu": "swiglu", "squaredrelu": "squared_relu", "gelu": ""}


def is_yaml(texts: Mapping[str, str]) -> bool:
    """True if the first file is such a YAML, and no script."""
    first = next(iter(texts))
    return first.lower().endswith((".yaml", ".yml")) and SIGNS.fit_keys(read_data(first, texts[first]))


def flags_of_yaml(texts: Mapping[str, str], named: str) -> tuple[dict[str, Any], dict[str, str]]:
    """(Megatron-LM's flags, their names in the YAML) of the file with a name. Raises ShellFault if it is not there."""
    named_texts = [text for name, text in texts.items() if PurePath(name).name == PurePath(named).name]
    if not named_texts:
        raise ShellFault(
            say(
                "--{option} {path} has all arguments, and it is not read: name that file too",
                option=OPTION,
                path=shortened(named),
            )
        )
    data = read_data(named, named_texts[0])
    sections = [section for name in _SECTIONS if isinstance(section := data.get(name), dict)]
    outside = {name: value for name, value in data.items() if name not in _SECTIONS}
    arguments = {str(name): value for section in (outside, *sections) for name, value in section.items()}
    activation = str(arguments.pop("activation_func", "gelu"))
    if activation not in _ACTIVATIONS:
        raise ShellFault(
            say(
                "{file}: activation_func = {word}: Megatron-LM takes {known}",
                file=shortened(named),
                word=shortened(activation),
                known=tuple(_ACTIVATIONS),
            )
        )
    unused = (
        "bert_",
        "retriever_",
        *(() if arguments.get("cpu_offloading") else ("cpu_offloading_", "_cpu_offloading")),
    )
    arguments = {name: value for name, value in arguments.items() if not name.startswith(unused)}
    switches = {word: word == _ACTIVATIONS[activation] for word in _ACTIVATIONS.values() if word}
    groups = {"group_query_attention": arguments.get("num_query_groups") is not None}
    return flags_of(arguments | switches | groups | {"gated_linear_unit": None})
