"""Files that are written for several nodes start on them: each is told its number, and where the first one is."""

import os
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from accelerate.commands import launch
from accelerate.utils.launch import prepare_multi_gpu_env

from shardwright.config.load import load_job
from shardwright.interchange.exported import asked_of, exported
from shardwright.interchange.foreign_job import job_of_texts
from shardwright.interchange.system import SYSTEMS
from shardwright.report.imported_text import exported_notes

TWO_NODES = ["model.name=llama3-8b", "plan.dp=8", "plan.tp=1", "plan.pp=1", "plan.sequence_parallel=false",
             "cluster.devices_per_node=4", "cluster.nodes=2", "plan.zero=2"]  # fmt: skip


def words_of(script: str, folder: Path, **environment: str) -> list[str]:
    """The launcher's words, as bash starts it."""
    shown = '#!/bin/bash\nprintf \'%s\\n\' "${0##*/}" "$@"\n'
    for name in ("torchrun", "accelerate", "deepspeed"):
        (folder / name).write_text(shown)
        (folder / name).chmod(0o755)
    bash = shutil.which("bash")
    assert bash
    path = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([bash, "-c", script], env=path | environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", ["megatron", "deepspeed"])
def test_torchrun_is_told_the_number_of_a_node_and_the_first_one(name: str, tmp_path: Path) -> None:
    job = load_job("quickstart", TWO_NODES)
    files = exported(SYSTEMS[name], job).files
    words = words_of(files["run.sh"], tmp_path, NODE_RANK="1", MASTER_ADDR="first")
    assert words[0] == "torchrun"
    pairs = dict(pairwise(words))
    assert (pairs["--nnodes"], pairs["--nproc_per_node"], pairs["--node_rank"]) == ("2", "4", "1")
    assert pairs["--master_addr"] == "first" and pairs["--master_port"] == "6000"
    assert "ds_config.json" in words or name == "megatron"
    back = job_of_texts(SYSTEMS[name], files, asked_of(job), "back").job
    assert back.plan.world == 8


def test_accelerate_is_told_the_number_of_a_node_and_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = exported(SYSTEMS["accelerate"], load_job("quickstart", TWO_NODES)).files
    words = words_of(files["run.sh"], tmp_path, NODE_RANK="1", MASTER_ADDR="first")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    given = launch._validate_launch_command(launch.launch_command_parser().parse_args(words[2:]))[0]
    assert (given.machine_rank, given.main_process_ip, given.main_process_port) == (1, "first", 6000)
    prepare_multi_gpu_env(given)
    assert (given.nnodes, given.node_rank, given.rdzv_endpoint, given.nproc_per_node) == ("2", 1, "first:6000", "4")


def test_how_several_nodes_start_is_told() -> None:
    for name in ("megatron", "nemo", "accelerate", "deepspeed"):
        result = exported(SYSTEMS[name], load_job("quickstart", TWO_NODES))
        answer = exported_notes(result, SYSTEMS[name])
        assert ("NODE_RANK" in answer) == ("run.sh" in result.files) and "2 nodes" in answer
    one = exported(SYSTEMS["deepspeed"], load_job("quickstart", [*TWO_NODES[:5], "plan.zero=2"]))
    assert "NODE_RANK" not in exported_notes(one, SYSTEMS["deepspeed"]) + one.files["run.sh"]
