"""Files of `launch`, run: two nodes on this machine, by torchrun itself, and by stand-ins for Slurm's commands."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardwright.cli.main import cli
from support.ranks import PATIENCE_S

BIN = Path(sys.executable).parent
# One rank on each of two nodes.
SMALL = (
    "plan.dp=2", "plan.tp=1", "plan.pp=1", "plan.sequence_parallel=false", "cluster.devices_per_node=1",
    "cluster.nodes=2", "cluster.network.interface=lo", "model.layers=1", "model.hidden=32", "model.ffn=64",
    "model.sequence=32", "batch.global_batch_size=4", "plan.microbatch_size=2", "run.device=cpu",
    "run.eval_batches=1", "run.log_every=1", "run.sample_tokens=0", "data.validation_share=0.01",
)  # fmt: skip
# Slurm's commands: tasks get its numbers, signals go to all of them, and the highest status is srun's. Where there are
# `statuses`, each srun takes the next one and starts nothing.
SRUN = f"""#!{sys.executable} -IS
import os, signal, subprocess, sys, time
here, words = os.environ["STAND_IN"], sys.argv[1:]
while words[0].startswith("--"):
    assert "=" in words.pop(0)
open(f"{{here}}/sruns", "a").write("srun\\n")
if os.path.exists(f"{{here}}/statuses"):
    status, *others = open(f"{{here}}/statuses").read().split()
    open(f"{{here}}/statuses", "w").write(" ".join(others))
    if status[:4] == "wait":  # for a signal, and end with the status behind the word
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(int(status[4:])))
        open(f"{{here}}/waits", "w")
        time.sleep(600)
    sys.exit(int(status))
each = int(os.environ["SLURM_NTASKS_PER_NODE"])
tasks = []
signal.signal(signal.SIGUSR1, lambda number, _: [task.send_signal(number) for task in tasks])
for task in range(int(os.environ["SLURM_NNODES"]) * each):
    numbers = {{"SLURM_PROCID": task, "SLURM_LOCALID": task % each, "SLURM_NODEID": task // each}}
    tasks.append(subprocess.Popen(words, env=os.environ | {{name: str(of) for name, of in numbers.items()}}))
statuses = [task.wait() for task in tasks]
sys.exit(max(status if status >= 0 else 128 - status for status in statuses))
"""
SQUEUE = """#!/bin/bash
cat "$STAND_IN/state"
"""
SCONTROL = """#!/bin/bash
case $1 in
    show) printf '127.0.0.1\\nlocalhost\\n' ;;
    *) echo "$@" >> "$STAND_IN/scontrol" ;;
esac
"""


def written(file: Path, *words: str, overrides: tuple[str, ...]) -> Path:
    text = file.with_name("text.txt")
    text.write_text("A line of text to train on, and one more.\n" * 400)
    options = [
        part
        for override in ("checkpoint.every_steps=0", *overrides, f"data.path={text}")
        for part in ("--set", override)
    ]
    done = CliRunner().invoke(cli, ["launch", "quickstart", *words, "--out", str(file), *options])
    assert done.exit_code == 0, done.output
    return file


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def batch_job(folder: Path, script: Path, state: str = "RUNNING") -> "Iterator[subprocess.Popen[str]]":
    """The script as Slurm's batch shell runs it, with what its directives ask for; the job is in a state."""
    stand_in = folder / "bin"
    stand_in.mkdir(exist_ok=True)
    (folder / "state").write_text(state)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("squeue", SQUEUE)):
        (stand_in / name).write_text(text)
        (stand_in / name).chmod(0o755)
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script.read_text(), flags=re.MULTILINE))
    environment = os.environ | {
        "PATH": f"{stand_in}:{BIN}:{os.environ['PATH']}", "STAND_IN": str(folder), "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": asked["nodes"],
        "SLURM_NTASKS_PER_NODE": asked["ntasks-per-node"],
    }  # fmt: skip
    with (folder / "out").open("w") as out:
        job = subprocess.Popen(["bash", str(script)], stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        yield job
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def wait_for(what: Path, text: str, job: "subprocess.Popen[str]", out: Path) -> None:
    late_s = time.monotonic() + PATIENCE_S
    while not (what.exists() and text in what.read_text()):
        assert job.poll() is None, out.read_text()
        assert time.monotonic() < late_s, out.read_text()
        time.sleep(0.05)


def test_ranks_that_slurm_starts_train_save_and_go_back_to_the_queue(tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = (*SMALL, "optimizer.steps=1000000", f'run.folder="{run}"', "checkpoint.every_steps=1000000")
    script = written(tmp_path / "job.sh", "--slurm", "--port", str(free_port()), overrides=overrides)
    with batch_job(tmp_path, script) as job:
        wait_for(run / "metrics.jsonl", '"step": 2,', job, tmp_path / "out")
        job.send_signal(signal.SIGUSR1)
        assert job.wait(PATIENCE_S) == 3, (tmp_path / "out").read_text()
    printed = (tmp_path / "out").read_text()
    assert re.search(r"preempted: saved step \d+; run the same command again", printed), printed
    assert printed.endswith("to be continued: job 17 goes back to the queue\n")
    assert (tmp_path / "scontrol").read_text() == "requeue 17\n"
    assert list(run.glob("checkpoints/*/manifest.json"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("statuses", "most", "status", "sruns", "is_requeued"),
    [
        ("0", 2, 0, 1, False),
        ("2", 2, 2, 1, False),
        ("3", 2, 3, 1, True),
        ("1 137 0", 2, 0, 3, False),
        ("1 137 9 0", 2, 9, 3, False),
        ("1 3 0", 2, 3, 2, True),
        ("7 0", 0, 7, 1, False),
        ("1 wait3 0", 2, 3, 2, True),
        ("wait138 0", 2, 3, 1, True),  # before it could hear of it
        ("wait1 0", 2, 1, 1, False),  # and could not save
        ("wait0 1", 2, 0, 1, False),
    ],
)
def test_what_a_script_does_with_the_status_of_its_ranks(
    statuses: str, most: int, status: int, sruns: int, is_requeued: bool, tmp_path: Path
) -> None:
    overrides = (*SMALL, "checkpoint.every_steps=5", f"run.max_restarts={most}")
    script = written(tmp_path / "job.sh", "--slurm", overrides=overrides)
    (tmp_path / "statuses").write_text(statuses)
    with batch_job(tmp_path, script) as job:
        if "wait" in statuses:
            wait_for(tmp_path / "waits", "", job, tmp_path / "out")
            job.send_signal(signal.SIGUSR1)
        assert job.wait(PATIENCE_S) == status, (tmp_path / "out").read_text()
    assert (tmp_path / "sruns").read_text().count("srun") == sruns
    assert (tmp_path / "scontrol").exists() == is_requeued
    assert (tmp_path / "out").read_text().count("restart ") == sruns - 1


def test_a_job_that_is_cancelled_stays_so(tmp_path: Path) -> None:
    """Ranks that are told to end save and leave, with status 3, before Slurm ends them."""
    script = written(tmp_path / "job.sh", "--slurm", overrides=(*SMALL, "checkpoint.every_steps=5"))
    (tmp_path / "statuses").write_text("3")
    with batch_job(tmp_path, script, state="COMPLETING") as job:
        assert job.wait(PATIENCE_S) == 3
    assert not (tmp_path / "scontrol").exists()


def test_without_checkpoints_a_failure_is_the_end(tmp_path: Path) -> None:
    script = written(tmp_path / "job.sh", "--slurm", overrides=SMALL)
    (tmp_path / "statuses").write_text("1 0")
    with batch_job(tmp_path, script) as job:
        assert job.wait(PATIENCE_S) == 1
    assert (tmp_path / "sruns").read_text() == "srun\n"


def test_the_command_line_of_torchrun_trains(tmp_path: Path) -> None:
    """Given twice, as on two nodes: its agents meet, and number them."""
    overrides = (*SMALL, "optimizer.steps=2", "optimizer.warmup_steps=1", f'run.folder="{tmp_path}/run"')
    options = ("--torchrun", "--first-node", "127.0.0.1", "--port", str(free_port()))
    script = written(tmp_path / "job.sh", *options, overrides=overrides)
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    nodes = [subprocess.Popen(["bash", str(script)], env=environment, **piped) for _ in range(2)]
    try:
        printed = [node.communicate(timeout=PATIENCE_S)[0] for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(printed)
    assert sum("step 2/2" in text for text in printed) == 1  # rank 0 says it, on one of them
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count('"step_s"') == 2
