"""A run on several machines states what it trains on, how fast and what it keeps; a long run keeps something anyway."""

from pathlib import Path

import pytest

from shardwright.api.run_start import cost_text, refuse_unstated, regretted_defaults, unseen_paths, with_checkpoints
from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import job_of_fields, load_job
from shardwright.report.toml_files import job_toml, write_toml

STATED = ("data.path=python-stdlib", "optimizer.learning_rate=0.001", "checkpoint.every_steps=0")
ON_A_NODE = ("cluster.name=h100-node", "precision.compute=bf16")


def job(*overrides: str) -> JobSpec:
    return job_of_fields({}, overrides, "job")


def test_each_default_that_would_be_regretted_is_refused_with_the_usual_value() -> None:
    with pytest.raises(PlanError) as refused:
        refuse_unstated(job(), 128)
    data, rate, checkpoints = refused.value.faults
    assert "--set data.path=PATH" in data and "--set optimizer.learning_rate=1e-4" in rate
    assert "--set checkpoint.every_s=1800" in checkpoints
    for number, stated in enumerate(STATED):
        with pytest.raises(PlanError) as refused:
            refuse_unstated(job(stated), 128)
        assert len(refused.value.faults) == 2 and refused.value.faults == [
            fault for place, fault in enumerate((data, rate, checkpoints)) if place != number
        ]
    refuse_unstated(job(*STATED), 128)
    refuse_unstated(job(), 1)


def test_a_long_run_on_one_node_is_not_launched_by_defaults() -> None:
    long = job(
        *ON_A_NODE,
        "model.name=llama3-8b",
        "plan.dp=8",
        "plan.zero=3",
        "batch.global_batch_size=256",
        "optimizer.steps=10000",
    )
    with pytest.raises(PlanError) as refused:
        refuse_unstated(long, 1, or_long=True)
    assert len(refused.value.faults) == 3 and "a failure would lose all" in refused.value.faults[2]
    refuse_unstated(long, 1)
    refuse_unstated(job(*ON_A_NODE, "plan.dp=8", "optimizer.steps=10"), 1, or_long=True)


def test_a_large_model_on_bytes_and_a_long_run_with_a_short_warm_up_are_told() -> None:
    large = ("model.name=llama3-8b", "optimizer.steps=100000")
    tokenizer, warm_up = regretted_defaults(job(*large))
    assert "data.tokenizer is not stated" in tokenizer and "256 of the model's 128,256 tokens" in tokenizer
    assert "within 20 of 100,000 steps" in warm_up and "optimizer.warmup_steps" in warm_up
    assert regretted_defaults(job(*large, "data.tokenizer=bytes", "optimizer.warmup_steps=20")) == []
    assert regretted_defaults(load_job("quickstart")) == []


def test_what_is_stated_is_still_stated_in_a_file(tmp_path: Path) -> None:
    """Also values that are the defaults."""
    file = tmp_path / "job.toml"
    write_toml(file, job(*STATED))
    refuse_unstated(load_job(str(file)), 128)
    assert "learning_rate" not in job_toml(job()) and "every_steps" not in job_toml(job())


def test_a_long_run_keeps_checkpoints_unless_it_says_otherwise() -> None:
    short, long = (load_job("quickstart", [*ON_A_NODE, f"optimizer.steps={n}"]) for n in (300, 10_000_000))
    assert with_checkpoints(short) == short
    assert with_checkpoints(long).checkpoint.every_s == 1800
    unsaved = load_job("quickstart", [*ON_A_NODE, "optimizer.steps=10000000", "checkpoint.every_steps=0"])
    assert with_checkpoints(unsaved) == unsaved
    unknown = load_job("quickstart", ["optimizer.steps=10000000"])
    assert with_checkpoints(unknown) == unknown


def test_the_cost_is_told_with_its_price() -> None:
    text = cost_text(with_checkpoints(load_job("quickstart", [*ON_A_NODE, "optimizer.steps=10000000"])))
    assert text.startswith("predicted: 10,000,000 steps of ") and "a checkpoint every 30 min" in text
    assert "at $6.16 a device and hour (CoreWeave, on-demand list price of February 2026)" in text
    assert cost_text(load_job("quickstart")) == ""  # nothing is known of this machine


def test_paths_that_name_nothing_here_are_told(tmp_path: Path) -> None:
    for name in ("text-0.jsonl", "tokens.bin", "tokens.idx"):
        (tmp_path / name).write_text("")
    (tmp_path / "tokenizer").mkdir()
    there = ("data.path=text-*.jsonl", "data.tokenizer=tokenizer")
    assert unseen_paths(load_job("quickstart", there), tmp_path) == []
    assert unseen_paths(load_job("quickstart", ("data.path=tokens", "data.format=megatron")), tmp_path) == []
    assert unseen_paths(load_job("quickstart", ("data.path=s3://bucket/text",)), tmp_path) == []
    assert unseen_paths(load_job("quickstart"), tmp_path) == []
    sources = 'data.sources=[{path="text-0.jsonl"}, {path="/nowhere/*.parquet"}]'
    path, tokenizer = unseen_paths(load_job("quickstart", (sources, "data.tokenizer=~/no-tokenizer")), tmp_path)
    assert path.startswith("data.path is /nowhere/*.parquet, which names nothing on this machine")
    assert tokenizer.startswith("data.tokenizer is ~/no-tokenizer, which names nothing")
