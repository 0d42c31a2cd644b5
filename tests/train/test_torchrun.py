"""Ranks that torchrun starts on two machines, here two agents: all of them come back after one is killed."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from support.forked_commands import SHARDWRIGHT, TORCHRUN, ForkedCommand, run_forked
from support.process_tree import children
from support.ranks import PATIENCE_S

SMALL = (
    "plan.dp=1", "plan.tp=2", "plan.pp=2", "model.layers=2", "model.hidden=32", "model.ffn=64", "model.sequence=32",
    "batch.global_batch_size=4", "plan.microbatch_size=2", "optimizer.steps=1000000", "run.device=cpu",
    "data.path=python-stdlib", "checkpoint.every_s=1800",
)  # fmt: skip


# Nobody reads what a long run prints; its errors are added to the file that is named first.
AGENT = f"""
import os
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
os.dup2(os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)
{TORCHRUN}
"""


def agent(port: int, folder: Path, *overrides: str) -> ForkedCommand:
    """torchrun on one of two machines, with one rank."""
    command = ["--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--max-restarts", "3", "--monitor-interval", "0.2", "--rdzv-backend", "c10d", "--rdzv-id", "run"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    command += ["-m", "shardwright", "train", "quickstart"]
    for override in (*SMALL, f'run.folder="{folder}"', *overrides):
        command += ["--set", override]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return ForkedCommand(AGENT, str(folder / "err"), *command, environment=environment)


def ranks_of(process: ForkedCommand) -> list[int]:
    """Process ids of an agent's ranks."""
    ranks = []
    for child in children(process.pid):
        with suppress(OSError):
            if b"shardwright" in Path(f"/proc/{child}/cmdline").read_bytes():
                ranks.append(child)
    return sorted(ranks)


def steps_since(folder: Path, before_s: float) -> int:
    """Steps noted in the metrics, if any since a moment."""
    metrics = folder / "metrics.jsonl"
    with suppress(OSError):
        if metrics.stat().st_mtime > before_s:
            return metrics.read_text().count('"step_s"')
    return 0


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks under /proc")
def test_both_agents_come_back_after_one_rank_is_killed(tmp_path: Path) -> None:
    """Only the agent whose rank died counts a restart; the other one's ranks must meet with those all the same."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agents = [agent(port, tmp_path, "plan.tp=1", "plan.sequence_parallel=false", "run.timeout_s=60") for _ in range(2)]
    try:
        late_s = time.monotonic() + PATIENCE_S
        while steps_since(tmp_path, 0.0) < 2:
            assert all(one.poll() is None for one in agents), (tmp_path / "err").read_text()
            assert time.monotonic() < late_s, (tmp_path / "err").read_text()
            time.sleep(0.1)
        before = [ranks_of(one) for one in agents]
        assert [len(ranks) for ranks in before] == [1, 1]
        os.kill(before[1][0], signal.SIGKILL)
        killed_s = time.time()
        while not all(len(ranks_of(one)) == 1 for one in agents) or any(
            set(ranks_of(one)) & set(ranks) for one, ranks in zip(agents, before, strict=True)
        ):
            assert all(one.poll() is None for one in agents), (tmp_path / "err").read_text()
            assert time.monotonic() < late_s
            time.sleep(0.1)
            killed_s = time.time()
        after = [ranks_of(one) for one in agents]
        while not steps_since(tmp_path, killed_s):
            assert all(one.poll() is None for one in agents), (tmp_path / "err").read_text()
            assert time.monotonic() < late_s
            time.sleep(0.1)
        assert [ranks_of(one) for one in agents] == after  # they met at once, and needed no further restart
    finally:
        for one in agents:
            for pid in (one.pid, *ranks_of(one)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            one.wait()


def test_fewer_ranks_take_a_fallback(tmp_path: Path) -> None:
    """One rank is started, as by Slurm, where the plan needs four."""
    command = ["train", "quickstart"]
    steps = ("optimizer.steps=2", "optimizer.warmup_steps=1", "run.eval_batches=1")
    for override in (*SMALL, *steps, f'run.folder="{tmp_path}"', "plan.fallback=[{dp=2}, {microbatch_size=2}]"):
        command += ["--set", override]
    seat = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = run_forked(SHARDWRIGHT, *command, environment=os.environ | seat)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("1 rank was started, and the plan is for 4: this is plan.fallback[1], ")
    assert (tmp_path / "metrics.jsonl").read_text().count('"step_s"') == 2


def test_a_folder_is_checked_on_each_node(tmp_path: Path) -> None:
    """The first rank of the second of two machines can't write there, and says so itself."""
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "shardwright", "train", "quickstart"]
    for override in (*SMALL, f'run.folder="{tmp_path}/file/run"'):
        command += ["--set", override]
    seat = {"RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}
    seat |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=os.environ | seat)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"node {socket.gethostname()}: 1 fault\n  1. run.folder {tmp_path}/file/run can't be made: {tmp_path}/file is "
        "a file; name another folder in run.folder\n"
    )
