"""Measured runs side by side."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardwright.cli.main import cli
from shardwright.config.base import PlanError
from shardwright.report.run.runs_table import runs_rows
from support.recorded_run import write_run


def test_efficiency_is_beside_the_fewest_ranks_of_the_same_model(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path, name="eight"),
        write_run(tmp_path, name="four", overrides=["plan.dp=1"]),
        write_run(tmp_path, name="other", overrides=["model.layers=2"]),
    ]
    rows = {Path(row.run).name: row for row in runs_rows(folders)}
    assert list(rows) == ["four", "eight", "other"]
    assert [row.ranks for row in rows.values()] == [4, 8, 8]
    assert [row.efficiency for row in rows.values()] == [1.0, 0.5, None]  # all of them have 1,000 tokens/s
    assert rows["four"].tokens_per_s_per_rank == 250.0


def test_the_command_prints_a_table_or_json(tmp_path: Path) -> None:
    words = ["runs", str(write_run(tmp_path, name="a")), str(write_run(tmp_path, name="b", overrides=["plan.dp=1"]))]
    text = CliRunner(env={"COLUMNS": "200"}).invoke(cli, words).output
    assert "50 %" in text and "Efficiency: tokens a second of a rank" in text and "another model" not in text
    assert "loss" in text and "predicted" not in text and "MFU" not in text  # columns without a value are left out
    narrow = CliRunner(env={"COLUMNS": "60"}).invoke(cli, words).output
    assert max(map(len, narrow.splitlines())) <= 60
    assert [row["ranks"] for row in json.loads(CliRunner().invoke(cli, [*words, "--json"]).stdout)] == [4, 8]
    assert isinstance(CliRunner().invoke(cli, ["runs", str(tmp_path)]).exception, PlanError)


def test_every_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as refused:
        runs_rows([tmp_path / "a", write_run(tmp_path, name="whole"), tmp_path / "b"])
    first, second = refused.value.faults
    assert f"there is no {tmp_path / 'a'}/report.json" in first and f"{tmp_path / 'b'}/report.json" in second
