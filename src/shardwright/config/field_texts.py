"""Texts about the fields of a job, so that none is written twice: every field with its default and meaning, for help;
faults of single fields, with the value, the allowed values and a way out."""

import json
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from shardwright.config import catalog
from shardwright.config.base import Spec, error_text, shortened
from shardwright.config.job import JobSpec
from shardwright.config.phrase import Phrase, any_of, each, fixed, say, sentences_of, without_period
from shardwright.config.pydantic_messages import message_phrase
from shardwright.config.registry import NameOf


def job_fields() -> dict[str, list[tuple[str, str]]]:
    """Fields of a job by section, as ("field = default", meaning). The first section, "", has the fields outside all
    sections."""
    sections: dict[str, list[tuple[str, str]]] = {"": []}
    _list_fields("", JobSpec, sections)
    return sections


def _list_fields(section: str, spec: type[Spec], sections: dict[str, list[tuple[str, str]]]) -> None:
    """Add the fields of one section, and of the sections within it, to `sections`."""
    for name, field in spec.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Spec):
            inner = f"{section}.{name}" if section else name
            sections[inner] = []
            _list_fields(inner, field.annotation, sections)
        else:
            sections[section].append(_row(name, field))


def _row(name: str, field: FieldInfo) -> tuple[str, str]:
    sentences, choices = _meaning(field), _choices(field)
    if len(choices) > 1:
        sentences.append(say("One of {listed}.", listed=choices))
    return f"{name} = {_shown(field.get_default(call_default_factory=True))}", sentences_of(sentences)


def field_choices(root: type[BaseModel], path: str) -> tuple[str, ...]:
    """The values that a field of `root` may have, such as those of "plan.schedule" of a job, as text; empty if they are
    not listed. KeyError if there is no such field."""
    *sections, name = path.split(".")
    section = _section(tuple(sections), root)
    if section is None:
        raise KeyError(path)
    return _choices(section.model_fields[name])


def _choices(field: FieldInfo) -> tuple[str, ...]:
    mark, is_literal = _name_mark(field), get_origin(field.annotation) is Literal
    return tuple(map(str, mark.names if mark else get_args(field.annotation) if is_literal else ()))


def _meaning(field: FieldInfo) -> list[str]:
    """Sentences: a field's description, and what each of its names does, if their facts say so."""
    descriptions = mark.descriptions if (mark := _name_mark(field)) else []
    effects = [
        say("{name}: {effect}", name=facts.name, effect=fixed(facts.does))
        for facts in descriptions
        if getattr(facts, "does", "")
    ]
    sentences = [fixed(field.description)] if field.description else []
    return [*sentences, *([say("{effects}.", effects=each(effects))] if effects else [])]


def _name_mark(field: FieldInfo) -> NameOf | None:
    return next((mark for mark in field.metadata if isinstance(mark, NameOf)), None)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def field_faults(fields: Mapping[str, Any]) -> list[str]:
    """Faults of single fields of a job, nested as in a file: names, types and limits. Empty if there are none."""
    try:
        JobSpec.model_validate_json(json.dumps(fields, default=str), strict=True)
    except ValidationError as error:
        return described(error, JobSpec)
    return []


def described(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """Every fault that pydantic found in the fields of `root`."""
    return [_describe(details, root) for details in error.errors()]


def _describe(details: ErrorDetails, root: type[BaseModel]) -> str:
    path = ".".join(str(part) for part in details["loc"])
    value = details["input"]
    if details["type"] == "extra_forbidden":
        section = _section(details["loc"][:-1], root)
        names = sorted(section.model_fields) if section else []
        hint = catalog.did_you_mean(str(details["loc"][-1]), names)
        if section is JobSpec:
            if homes := [name for name in names if path in getattr(_section((name,), root), "model_fields", ())]:
                meant = any_of([f"{name}.{path}" for name in homes])
                return say("{path} is not a known section; did you mean {meant}?", path=path, meant=meant)
            return say("{path} is not a known section; {hint}", path=path, hint=hint)
        return say("{path} is not a known field; {hint}", path=path, hint=hint)
    if details["type"] == "model_type":
        first = next(iter((_section(details["loc"], root) or root).model_fields))
        example = f"{path}.{first}" + (f" = {_short(value)}" if first == "name" and isinstance(value, str) else "")
        return say(
            "{path} = {value}: it should be a section; set fields in it, such as {example}",
            path=path,
            value=_short(value),
            example=example,
        )
    meaning = _field_help(details["loc"], root)
    if details["type"] == "missing":
        return say("{path} is missing; set it: {meaning}", path=path, meaning=meaning or say("it has no default"))
    message = _message(details)
    if not meaning:
        return say("{path} = {value}: {message}", path=path, value=_short(value), message=message)
    return say(
        "{path} = {value}: {message} ({meaning})", path=path, value=_short(value), message=message, meaning=meaning
    )


def _message(details: ErrorDetails) -> str:
    """The message of pydantic about the value of a field, or of the check of ours that refused it."""
    error = details.get("ctx", {}).get("error")
    if isinstance(error, ValueError) and isinstance(own := error_text(error), Phrase):
        return own
    message = details["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:].replace("Input should", "it should")
    message = message.replace("input should", "it should")
    return message_phrase(message)


def _short(value: object) -> str:
    # TOML has nan, not NaN.
    return shortened(str(value) if isinstance(value, float) else json.dumps(value, default=str, ensure_ascii=False))


def _section(location: tuple[int | str, ...], root: type[BaseModel]) -> type[BaseModel] | None:
    """The spec class at a location such as ("plan",) or ("cluster", "parts", 0); None if there is none."""
    section: Any = root
    for part in location:
        if isinstance(part, int):  # an entry of a list of sections; the name before it has given the class
            continue
        field = section.model_fields.get(part)
        section = field.annotation if field else None
        section = get_args(section)[0] if get_origin(section) is list else section
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            return None
    return section  # type: ignore[no-any-return]


def _field_help(location: tuple[int | str, ...], root: type[BaseModel]) -> str:
    section = _section(location[:-1], root)
    field = section.model_fields.get(str(location[-1])) if section else None
    return without_period(sentences_of(_meaning(field))) if field else ""
