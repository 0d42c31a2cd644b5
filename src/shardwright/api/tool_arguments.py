"""The arguments of an agent's tool, checked before the call: one message with every fault, as a command has it."""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args, get_origin

from shardwright.config.phrase import say
from shardwright.config.plain_values import GivenOptions


def tool_arguments(tool: Callable[..., Any], name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as the tool takes them: a single text is a list of one, and null is an argument left out.

    The parameters of a tool are texts, lists of texts and whole numbers of at least 0, each an Annotated whose Field
    has an example. Raises PlanError with every argument that the tool does not have, that is missing, or that is of
    another type.
    """
    parameters, options = inspect.signature(tool).parameters, GivenOptions()
    if strange := [argument for argument in arguments if argument not in parameters]:
        known = tuple(parameters) or say("none")
        options.faults.append(say("no argument is named {names}; use {known}", names=tuple(strange), known=known))
    taken = dict(_checked(parameters, arguments, options))
    options.check(f"tool {name}")
    return taken


def _checked(
    parameters: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any], options: GivenOptions
) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the arguments that are given; each wrong or missing one adds a fault."""
    for name, parameter in parameters.items():
        kind, field = get_args(parameter.annotation)
        example, value = field.examples[0], arguments.get(name)
        if value is None:
            if parameter.default is inspect.Parameter.empty:
                options.faults.append(
                    say("{name} is missing; it is a text, such as {example}", name=name, example=repr(example))
                )
        elif kind is str:
            yield name, options.text(name, value, example)
        elif get_origin(kind) is not None:
            yield name, options.texts(name, _from_json(value, list), example)
        else:
            yield name, options.whole(name, _from_json(value, int), least=0)


def _from_json(value: Any, kind: type) -> Any:
    """A value that a client writes as JSON in a text, or as a number with the fraction 0; others stay as they are."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    try:
        inner = json.loads(value) if isinstance(value, str) else None
    except ValueError:
        return value
    return inner if isinstance(inner, kind) else value
