"""The commands that draw take their options as they are typed."""

import json

import pytest
from click.testing import CliRunner

from shardwright.cli.main import cli


@pytest.mark.parametrize(
    "arguments",
    [("schedule", "gpipe", "--stages", "2", "--microbatches", "2"), ("simulate", "docs/job.toml"),
     ("schedule", "--compare", "--stages", "2", "--microbatches", "2")],
    ids=lambda arguments: " ".join(arguments[:2]),
)  # fmt: skip
def test_json(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0 and json.loads(result.stdout)
