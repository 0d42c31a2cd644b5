"""`launch --for torchtitan`: the script of Slurm, and the configuration with the job's data and checkpoints that it
writes, which is run here with stand-ins for torchtitan's modules."""

import ast
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
from click.testing import CliRunner

from cli.test_launching_other_software import ended, launch
from shardwright.cli.main import cli

STATED = (
    "cluster.software=torchtitan-2025",
    "plan.zero=3",
    "checkpoint.every_s=1800",
    "data.path=texts/*.jsonl.gz",
    "data.tokenizer=/models/llama3",
)
FOR = ("--slurm", "--for", "torchtitan", "--out", "job.sh")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkout of torchtitan, in which the command is given."""
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan" / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configured(file: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[MagicMock, dict[str, Any], MagicMock]:
    """The call of Trainer.Config that a configuration makes, the data sets that it names, and the stand-in for the
    library that loads them."""
    datasets: dict[str, Any] = {}
    stand_ins = {"datasets": MagicMock()}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torchtitan"):
            stand_ins[str(node.module)] = MagicMock()
    stand_ins["torchtitan.hf_datasets.text_datasets"].DATASETS = datasets
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    module = ModuleType("job_config")
    exec(compile(file.read_text(), str(file), "exec"), module.__dict__)
    module.job()
    return stand_ins["torchtitan.trainer"].Trainer.Config, datasets, stand_ins["datasets"].load_dataset


def test_every_node_starts_the_plan_with_data_and_checkpoints(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = launch(folder, *FOR, "--time", "2-00", stated=STATED)
    assert done.exit_code == 0, done.output
    assert "#SBATCH --time=2-00:00:00\n" in (folder / "job.sh").read_text()
    run = ended(folder / "job.sh", folder, "0")
    assert run.returncode == 0, run.stderr
    for node in range(2):
        place, words, *_ = json.loads((folder / f"started-{node}").read_text())
        assert place == str(folder)
        assert words[-6:] == ["-m", "torchtitan.train", "--module", "job_config", "--config", "job"]
    made, datasets, load = configured(folder / "job-torchtitan" / "job_config.py", monkeypatch)
    assert made.call_args.kwargs["hf_assets_path"] == "/models/llama3"
    datasets["job-0"] = sys.modules["torchtitan.hf_datasets"].DatasetConfig.call_args.kwargs
    datasets["job-0"]["loader"](datasets["job-0"]["path"])
    load.assert_called_once_with("json", data_files=f"{folder}/texts/*.jsonl.gz", split="train", streaming=True)
    assert datasets["job-0"]["sample_processor"]({"text": "of a row"}) == "of a row"
    kept = sys.modules["torchtitan.components.checkpoint"].CheckpointManager.Config.call_args.kwargs
    predicted = json.loads(CliRunner().invoke(cli, ["estimate", "job.toml", *sets(STATED), "--json"]).stdout)
    assert kept == {
        "enable": True,
        "folder": f"{folder}/runs/job/torchtitan",
        "interval": round(1800 / predicted["step_s"]),
        "keep_latest_k": 2,
    }


def sets(stated: tuple[str, ...]) -> list[str]:
    return [word for override in stated for word in ("--set", override)]


def test_what_it_starts_is_the_job(folder: Path) -> None:
    assert launch(folder, *FOR, stated=STATED).exit_code == 0
    ended(folder / "job.sh", folder, "0")
    files = [str(folder / "job-torchtitan" / name) for name in ("run.sh", "job_config.py")]
    back = json.loads(CliRunner().invoke(cli, ["import", "torchtitan", *files, "--json", "--devices", "16"]).stdout)
    plan = back["job"]["plan"]
    assert (plan["dp"], plan["tp"], plan["sequence_parallel"], plan["zero"]) == (4, 4, True, 3)


def test_a_mixture_a_folder_and_no_checkpoints(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = 'data.sources=[{path="/a", format="parquet", weight=3, text_field="body"}, {path="b.jsonl", split="all"}]'
    stated = (*STATED[:2], "checkpoint.every_steps=0", sources, STATED[-1], "run.seed=7", "run.log_every=3")
    assert launch(folder, *FOR, stated=stated).exit_code == 0
    ended(folder / "job.sh", folder, "0")
    made, _, load = configured(folder / "job-torchtitan" / "job_config.py", monkeypatch)
    assert "checkpoint" not in made.call_args.kwargs
    known = [call.kwargs for call in sys.modules["torchtitan.hf_datasets"].DatasetConfig.call_args_list]
    for source in known:
        source["loader"](source["path"])
    assert [call.args + tuple(call.kwargs.items()) for call in load.call_args_list] == [
        ("parquet", ("data_dir", "/a"), ("split", "train"), ("streaming", True)),
        ("json", ("data_files", f"{folder}/b.jsonl"), ("split", "train"), ("streaming", True)),
    ]
    assert known[0]["sample_processor"]({"body": "text"}) == "text"
    texts = sys.modules["torchtitan.hf_datasets.text_datasets"]
    weights = [call.kwargs for call in texts.HFDataSource.call_args_list]
    assert weights == [{"dataset": "job-0", "weight": 3.0}, {"dataset": "job-1", "weight": 1.0}]
    assert texts.InterleavedHuggingFaceTextDataLoader.Config.call_args.kwargs["seed"] == 7
    assert sys.modules["torchtitan.config"].DebugConfig.call_args.kwargs == {"seed": 7}
    assert sys.modules["torchtitan.components.metrics"].MetricsProcessor.Config.call_args.kwargs == {"log_freq": 3}


@pytest.mark.parametrize(
    ("stated", "fault"),
    [
        (
            "checkpoint.path=s3://bucket/run",
            "torchtitan writes checkpoints into a folder, and checkpoint.path is s3://",
        ),
        ("data.path=s3://bucket/text", "torchtitan reads files of text, and s3://bucket/text is an address"),
        (
            "data.path=/tokens.bin",
            "reads rows of text in JSONL, parquet or Arrow files, and '/tokens.bin' is not known",
        ),
        ("data.format=text", "is not known to be of these; set data.path to such files, and data.format=jsonl"),
        ("data.tokenizer=bytes", "set it to the folder that has the model's tokenizer.json"),
        ("data.validation_share=0.1", "data.validation_share can't be said for torchtitan"),
        ("data.separate_documents=true", "data.separate_documents can't be said for torchtitan"),
        ("checkpoint.keep_best=held-out", "checkpoint.keep_best can't be said for torchtitan"),
        ("plan.zero=1", "torchtitan"),
    ],
)
def test_what_torchtitan_does_otherwise_is_refused(folder: Path, stated: str, fault: str) -> None:
    done = launch(folder, *FOR, stated=(*STATED, stated))
    assert done.exit_code and fault in " ".join(str(done.exception).split())
    assert not (folder / "job.sh").exists()


def test_the_nearest_plan_that_it_has_is_told(folder: Path) -> None:
    done = launch(folder, *FOR, stated=(*STATED, "plan.zero=1"))
    assert "the nearest plan that torchtitan has: --set plan.zero=2" in str(done.exception)


def test_chats_are_refused(folder: Path) -> None:
    done = launch(folder, *FOR, stated=(*STATED, "data.chats=true", "data.separate_documents=true"))
    assert done.exit_code and "data.chats can't be said for torchtitan" in str(done.exception)
