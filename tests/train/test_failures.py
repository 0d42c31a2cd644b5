"""A rank that dies or hangs ends the whole run, and the command says which rank it was."""

import json
import os
import re
import signal
import socket
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from queue import Queue
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fuzz.signals import Draw, check, without_progress
from shardwright.parallel.comm.collectives import Axis, Pending
from shardwright.parallel.comm.hang_watch import Watch, WatchRules
from shardwright.parallel.comm.heard_ranks import HeardRanks
from shardwright.parallel.comm.ledger import Ledger
from shardwright.train.launch.rank_environment import RankEnvironment
from shardwright.train.launch.rank_life import Failure, run_rank
from support.cases import small_job
from support.forked_commands import SHARDWRIGHT, TORCHRUN, ForkedCommand, run_forked
from support.process_tree import children
from support.ranks import PATIENCE_S

# Of quickstart's ranks those of one replica, and of its model as little.
SMALL = ("plan.dp=1", "model.layers=2", "model.hidden=32", "model.ffn=64", "batch.global_batch_size=8")


def sets(*overrides: str) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


def train(*overrides: str) -> list[str]:
    return ["train", "quickstart", *sets(*SMALL, *overrides)]


def start(folder: Path, *overrides: str) -> ForkedCommand:
    """A long run on 4 ranks, in its steps when this returns."""
    process = ForkedCommand(SHARDWRIGHT, *train("optimizer.steps=100000", f'run.folder="{folder}"', *overrides))
    metrics = folder / "metrics.jsonl"
    late_s = time.monotonic() + PATIENCE_S
    try:
        while not metrics.exists() or metrics.read_text().count("\n") < 4:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < late_s, "no step in time"
            time.sleep(0.1)
    except BaseException:  # not even an interruption of the tests leaves it running
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    return process


def rank_processes(process: ForkedCommand) -> list[int]:
    """Process ids of the ranks, in their order: the children of the launcher's fork server."""
    return [child for helper in children(process.pid) for child in children(helper)]


def are_gone(pids: list[int]) -> bool:
    """True if processes have ended, or do within some seconds: the system ends those whose parent died."""
    late_s = time.monotonic() + 15.0
    while any(is_running(pid) for pid in pids) and time.monotonic() < late_s:
        time.sleep(0.05)
    return not any(is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    """True if a process is there, and more than an entry that nobody has asked for yet."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def ends(process: ForkedCommand) -> tuple[int, str]:
    try:
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    return process.returncode, without_progress(err)


linux_only = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks under /proc")


@linux_only
@pytest.mark.parametrize("rank", [0, 3])
def test_killed_rank_is_named(tmp_path: Path, rank: int) -> None:
    process = start(tmp_path)
    ranks = rank_processes(process)
    assert len(ranks) == 4
    os.kill(ranks[rank], signal.SIGKILL)
    status, err = ends(process)
    assert status == 1
    assert f"rank {rank} (" in err
    assert "was killed by SIGKILL; the other 3 ranks were ended" in err
    assert "Traceback" not in err
    assert are_gone(ranks)


@linux_only
def test_hanging_rank_is_named_by_those_who_wait(tmp_path: Path) -> None:
    process = start(tmp_path, "run.timeout_s=6")
    ranks = rank_processes(process)
    os.kill(ranks[2], signal.SIGSTOP)
    status, err = ends(process)
    assert status == 1
    assert "waited" in err
    assert "rank 2 (pp 1, dp 0, tp 0) has been silent" in err
    assert are_gone(ranks)


@linux_only
def test_a_killed_launcher_leaves_nothing_behind(tmp_path: Path) -> None:
    """Not even a server that is stopped. And while they ran, no other machine could reach them."""
    process = start(tmp_path)
    (server,) = children(process.pid)
    started = [server, *rank_processes(process)]
    listening = [address for pid in (process.pid, *started) for address in listening_addresses(pid)]
    assert len(listening) > 4 and set(listening) == {"127.0.0.1"}
    os.kill(server, signal.SIGSTOP)
    process.kill()
    status, err = ends(process)
    assert (status, err) == (-signal.SIGKILL, "")
    assert are_gone(started)


def listening_addresses(pid: int) -> list[str]:
    """The addresses on which a process listens."""
    inodes = {
        match[1] for path in Path(f"/proc/{pid}/fd").iterdir() if (match := re.match(r"socket:\[(\d+)", link(path)))
    }
    results = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                words = re.findall("." * 8, fields[1].split(":")[0])
                results.append(socket.inet_ntop(family, b"".join(bytes.fromhex(word)[::-1] for word in words)))
    return results


def link(path: Path) -> str:
    """Where a link leads; nowhere if it has gone."""
    with suppress(OSError):
        return os.readlink(path)
    return ""


@pytest.mark.sampled(3)
@linux_only
@pytest.mark.parametrize(
    "draw",
    [
        Draw("SIGTERM", "launcher", late=False, delay_s=0.3),
        Draw("SIGKILL", "launcher", late=False, delay_s=1.0),
        Draw("SIGSEGV", "rank 1", late=False, delay_s=0.0),
    ],
    ids=str,
)
def test_an_early_signal(draw: Draw) -> None:
    """Some draws of tests/fuzz/signals.py that take no time."""
    assert check(draw) == []


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    full = "from shardwright.train import metrics; metrics.open_to_append = lambda path: open('/dev/full', 'a')"
    done = run_forked(f"{full}; {SHARDWRIGHT}", *train("plan.pp=1", f'run.folder="{tmp_path}"'))
    assert done.returncode == 1
    answer = rf"failed: rank 0 \(.*\) failed: {tmp_path}/metrics.jsonl can't be written: No space left on device \(.*\n"
    assert re.fullmatch(answer, without_progress(done.stderr)), done.stderr


def set_clock(monkeypatch: pytest.MonkeyPatch, now_s: list[float]) -> None:
    """Have a watch read the time in a list, which its own sleep moves on."""

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now_s[0], time=lambda: now_s[0], sleep=sleep)
    for module in ("hang_watch", "heard_ranks"):
        monkeypatch.setattr(f"shardwright.parallel.comm.{module}.time", clock)


@pytest.mark.parametrize("looks", [[1.0] * 8, [1.0, 1.0, 1000.0, 1.0, 1.0]], ids=["waiting", "stopped meanwhile"])
def test_a_stopped_process_did_not_wait(monkeypatch: pytest.MonkeyPatch, looks: list[float]) -> None:
    """Who presses Ctrl-Z and goes on later does not find the run at its end."""
    now_s, answer = [0.0], list[str]()
    set_clock(monkeypatch, now_s)
    watch = Watch(dist.HashStore(), 0, WatchRules(5.0, lambda rank: f"rank {rank}", answer.append))
    left = iter(looks)

    def look(_: float) -> bool:
        after_s = next(left, 0.0)
        now_s[0] += after_s
        return after_s == 0.0

    monkeypatch.setattr(watch._stop, "wait", look)
    with watch.waiting("recv", (1,)):
        watch._run()
    assert bool(answer) == (len(looks) == 8)


class DeviceWork:
    """A collective on a device, which is over when it is told to be."""

    def __init__(self) -> None:
        self.is_over = False

    def is_completed(self) -> bool:
        return self.is_over

    def wait(self) -> None:
        """Only the stream waits."""


@pytest.mark.parametrize("comes_on", [False, True], ids=["stuck", "slow"])
def test_a_collective_of_the_device_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch, comes_on: bool) -> None:
    """The host has long gone on, and waits for some number, or for nothing."""
    now_s, answer, works = [0.0], list[str](), [DeviceWork() for _ in range(4)]
    set_clock(monkeypatch, now_s)
    watch = Watch(dist.HashStore(), 0, WatchRules(5.0, lambda rank: f"rank {rank}", answer.append))
    looks = iter(range(16))

    def look(_: float) -> bool:
        number = next(looks, None)
        now_s[0] += 1.0
        if number is not None and number % 4 == 3 and comes_on:  # each takes 4 s, and all together 16
            works[number // 4].is_over = True
        return number is None

    monkeypatch.setattr(watch._stop, "wait", look)
    for number, work in enumerate(works):
        watch.under_way(work, f"all_reduce {number} on axis dp", (1, 2))
        watch.under_way(DeviceWork(), "one of the same moment, between the first and the last", (1, 2))
        watch.under_way(work, "the last of the moment", (1, 2))
        now_s[0] += 0.2
    watch._run()
    assert [line.partition(" (at")[0] for line in answer] == (
        [] if comes_on else ["rank 0 waited 6 s in all_reduce 0 on axis dp"]
    )


@pytest.mark.parametrize("num_between", [0, 1, 50])
def test_the_last_collective_of_a_moment_is_named(monkeypatch: pytest.MonkeyPatch, num_between: int) -> None:
    """All before it are over; and those between are not kept."""
    now_s, answer, first = [0.0], list[str](), DeviceWork()
    first.is_over = True
    set_clock(monkeypatch, now_s)
    watch = Watch(dist.HashStore(), 0, WatchRules(5.0, lambda rank: f"rank {rank}", answer.append))
    looks = iter(range(16))

    def look(_: float) -> bool:
        now_s[0] += 1.0
        return next(looks, None) is None

    monkeypatch.setattr(watch._stop, "wait", look)
    for work, name in [(first, "all_reduce"), *[(DeviceWork(), "between")] * num_between, (DeviceWork(), "all_gather")]:
        watch.under_way(work, name, (1,))
    watch._run()
    assert [line.partition(" (at")[0] for line in answer] == ["rank 0 waited 6 s in all_gather"]


def test_a_collective_of_the_device_is_watched_once_the_host_has_gone_on() -> None:
    """Its wait is of the stream; on a CPU the wait itself is watched, and nothing is left behind it."""
    for device in ("cuda", "cpu"):
        watch = Watch(dist.HashStore(), 0, WatchRules(5.0, lambda rank: f"rank {rank}", lambda _: None))
        axis = Axis("dp", (0, 1), 0, None, Ledger(torch.device(device)), watch)
        axis.ledger.blocked = lambda *_: nullcontext()  # type: ignore[method-assign]
        Pending(DeviceWork(), axis, "all_reduce", (1,)).wait()
        assert [(wait.activity, wait.peers) for wait in watch._under_way] == (
            [("all_reduce on axis dp", (1,))] if device == "cuda" else []
        )


def test_ranks_that_say_nothing_are_told_apart() -> None:
    """One that died in its first second, and one that never started."""
    store, answer = dist.HashStore(), Queue[str]()
    dead, waiting = (Watch(store, rank, WatchRules(2.0, lambda rank: f"rank {rank}", answer.put)) for rank in (1, 0))
    dead.start()
    dead.stop()
    waiting.start()
    with waiting.waiting("recv", (1, 2)):
        sentence = answer.get(timeout=PATIENCE_S)
    waiting.stop()
    assert re.fullmatch(
        r"rank 0 waited \d+ s in recv \(at starting\) for rank 1 and rank 2\n"
        r"  rank 1 has been silent for \d+ s: it is dead, stopped, or its machine is; it was at starting\n"
        r"  rank 2 never reported: it did not start\n"
        r"  if the work is slow and not stuck, raise run.timeout_s",
        sentence,
    )


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_clocks_of_machines_may_differ(monkeypatch: pytest.MonkeyPatch, ahead_s: float) -> None:
    """A rank that publishes is alive, and one that stopped is silent, whatever its clock says."""
    now_s, store = [5000.0], dist.HashStore()
    set_clock(monkeypatch, now_s)
    heard, there = HeardRanks(store, 1.0), HeardRanks(store, 1.0)

    def publish(rank: int) -> None:
        there.publish(rank, {"doing": "a backward", "waits": None, "at": now_s[0] + ahead_s})

    publish(1)
    publish(2)
    states = heard.listen([1, 2, 3], meanwhile=lambda: publish(2))
    assert [bool(states[rank]) for rank in (1, 2, 3)] == [True, True, False]
    assert [heard.is_silent(rank) for rank in (1, 2, 3)] == [True, False, True]
    assert heard.silent_s(1) >= 2.5


@linux_only
def test_an_interruption_is_no_failure(tmp_path: Path) -> None:
    """Ctrl-C reaches the command, the server and all ranks; a batch system ends the command alone."""
    for to_all, number in ((True, signal.SIGINT), (False, signal.SIGTERM), (True, signal.SIGHUP)):
        process = start(tmp_path / number.name)
        ranks = rank_processes(process)
        (os.killpg if to_all else os.kill)(process.pid, number)
        status, err = ends(process)
        assert status == 1
        assert err.startswith(f"failed: {number.name} ended this command and all that it had started; nothing of")
        assert are_gone(ranks)


def test_under_torchrun(tmp_path: Path) -> None:
    """The same command is one rank of torchrun's."""
    fields = ("optimizer.steps=2", "optimizer.warmup_steps=1", "run.sample_tokens=2", "run.eval_batches=1")
    command = ["-m", "shardwright", *train(*fields, "plan.pp=1", f'run.folder="{tmp_path}"'), "--json"]
    done = run_forked(TORCHRUN, "--standalone", "--nproc-per-node", "2", *command)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["steps"] == 2
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 6  # the beginning, two steps, the memory account, an evaluation, what was predicted beside it
    (account,) = [line["memory"] for line in lines if "memory" in line]
    for kind in ("parameters_bytes", "gradients_bytes", "optimizer_bytes"):
        assert [m[kind] for m in account["measured"]] == [m[kind] for m in account["predicted"]]


@pytest.mark.parametrize(("world", "were_started"), [(1, "1 rank was started"), (3, "3 ranks were started")])
def test_a_wrong_number_of_ranks_is_refused(tmp_path: Path, world: int, were_started: str) -> None:
    answer: list[Failure] = []
    with pytest.raises(SystemExit) as end:
        run_rank(
            RankEnvironment(0, 0, world, world), pytest.fail, small_job(tp=2), tmp_path, answer.append, num_threads=1
        )
    assert end.value.code == 2
    (failure,) = answer
    assert (failure.kind, failure.faults) == (
        "input",
        (f"{were_started}, and the plan needs dp 1 x tp 2 x pp 1 = 2; start 2, or change the plan",),
    )


def test_diverging_loss_is_said(tmp_path: Path) -> None:
    overrides = ["optimizer.learning_rate=1e9", "optimizer.clip_grad_norm=0", "optimizer.warmup_steps=0"]
    done = run_forked(SHARDWRIGHT, *train(*overrides, f'run.folder="{tmp_path}"'))
    assert done.returncode == 1
    assert re.fullmatch(
        r"failed: the loss is nan in step \d+ \(.*\); lower optimizer.learning_rate .*\n", without_progress(done.stderr)
    )
