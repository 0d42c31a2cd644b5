"""The JSON schemas of answers: they are schemas, and answers that they were not made of are as they say."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from shardwright.cli.answer_schemas import schema_files
from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.report.answer_schema import DIALECT, answer_schema
from support.answer_samples import SAMPLES

jsonschema = pytest.importorskip("jsonschema", reason="answers are held against their schemas by jsonschema")
SCHEMAS = {name: json.loads(text) for name, text in schema_files().items()}


def closed(schema: Any) -> Any:
    """A schema that allows no name which it does not have."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    return {"additionalProperties": False} | inner if isinstance(schema.get("properties"), dict) else inner


def test_every_command_that_samples_name_has_a_schema() -> None:
    assert set(SCHEMAS) == set(SAMPLES)
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["$schema"] == DIALECT and schema["description"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "words",
    [
        "estimate mt-nlg-530b-2240",
        "estimate llama3-8b --devices 1 --device h100-sxm --set model.adapter.rank=8",
        "estimate quickstart-moe --set cluster.device=a100-sxm-80g --set plan.zero=1",
        "explain quickstart --set plan.zero=1 --set cluster.device=a100-sxm-80g",
        "simulate quickstart --set plan.schedule=gpipe",
        "schedule gpipe --stages 3 --microbatches 6",
        "layout quickstart --set cluster.device=a100-sxm-80g",
        "collective broadcast --ranks 8",
        "devices",
        "models",
        "clusters",
        "schedules",
        "software",
        "check docs/job.toml",
        "fields model",
    ],
)
def test_an_answer_is_as_its_schema_says(words: str) -> None:
    done = CliRunner().invoke(cli, [*words.split(), "--json"])
    jsonschema.validate(json.loads(done.stdout), closed(SCHEMAS[words.split()[0]]))


def test_a_schema_has_types_names_and_units() -> None:
    samples = [
        {"step_s": 1.5, "num": 1, "rows": [{"usd": None}], "axes": {"dp 0": 1}},
        {"step_s": 2, "rows": [{"usd": 2.5}], "axes": {}},
    ]
    schema = answer_schema("x", "y", samples)
    assert schema["required"] == ["step_s", "rows", "axes"]
    fields = schema["properties"]
    assert fields["step_s"] == {"type": "number", "description": "seconds"}
    assert fields["num"] == {"type": "integer"}
    assert fields["rows"]["items"]["properties"]["usd"]["type"] == ["null", "number"]
    assert fields["axes"]["additionalProperties"] == {"type": "integer"}


def test_the_command_prints_a_schema_and_knows_which_there_are() -> None:
    printed = CliRunner().invoke(cli, ["schema", "checkpoint", "ls"])
    assert json.loads(printed.stdout) == SCHEMAS["checkpoint ls"]
    assert CliRunner().invoke(cli, ["schema"]).stdout.split("\n")[:-1] == sorted(SCHEMAS)
    refused = CliRunner().invoke(cli, ["schema", "estimat"])
    assert isinstance(refused.exception, PlanError) and "estimate" in str(refused.exception)
