"""A request to save and leave: SIGTERM or SIGUSR1 to the command, to all of its processes, or to a rank."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.collectives import barrier
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.launch.ending import Ended
from shardwright.train.launch.preemption import (
    PREEMPTIONS,
    PreemptedEarly,
    Preemption,
    heard,
    heeded,
    is_asked,
    leave_early,
    saved_sentence,
    watch_requests,
)
from support.cases import small_job
from support.forked_commands import ForkedCommand
from support.ranks import PATIENCE_S

TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
SAVES = "interrupted: the run saves at the end of this step and leaves; Ctrl-C again ends it at once, unsaved\n"
EARLY = "before its ranks had done a step: there was nothing to save; run the same command again to go on\n"


@contextmanager
def a_preemption() -> Iterator[Preemption]:
    preemption = Preemption()
    yield preemption
    preemption.close()


@pytest.mark.parametrize(
    ("signals", "taken", "asked"),
    [
        ([TERM], [True], TERM),
        ([USR1, USR1], [True, True], USR1),
        ([USR1, TERM], [True, True], TERM),
        ([TERM, USR1], [True, True], TERM),
        ([TERM, TERM], [True, False], TERM),
        ([USR1, TERM, TERM], [True, True, False], TERM),
        ([INT], [True], INT),
        ([INT, INT], [True, False], INT),
        ([USR1, INT, INT], [True, True, False], INT),
        ([INT, USR1], [True, True], INT),
        ([INT, TERM], [True, False], INT),
        ([TERM, INT], [True, False], TERM),
        ([TERM, signal.SIGHUP], [True, False], TERM),
    ],
)
def test_which_signals_are_requests(
    signals: list[signal.Signals], taken: list[bool], asked: signal.Signals | None
) -> None:
    with a_preemption() as preemption:
        preemption.is_watched = preemption.can_save = True
        assert [preemption.takes(number) for number in signals] == taken
        assert preemption.signal is asked
        assert type(preemption.end_of(TERM)) is (PreemptedEarly if asked is None else Ended)


def test_before_ranks_can_save_a_request_ends_the_command() -> None:
    with a_preemption() as preemption:
        assert not preemption.takes(TERM)
        assert (preemption.end_of(TERM).status, preemption.end_of(INT).status) == (3, 1)
        assert preemption.end_of(TERM).sentence() == f"preempted by SIGTERM {EARLY}".strip()


@pytest.mark.parametrize("number", [TERM, USR1, INT], ids=lambda signal: signal.name)
def test_a_request_is_answered_when_the_messages_before_it_are_read(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank may have told of its first step, and the launcher not have read that yet."""
    with a_preemption() as preemption:
        preemption.is_watched = True
        assert preemption.takes(number) and not capfd.readouterr().err
        preemption.can_save = True
        preemption.answer()
        assert preemption.signal is number
        assert capfd.readouterr().err == (SAVES if number is INT else "")


@pytest.mark.parametrize("number", [TERM, USR1, INT], ids=lambda signal: signal.name)
def test_a_request_before_the_first_step_ends_the_command(number: signal.Signals) -> None:
    numbers = list[int]()
    before = signal.signal(number, lambda number, _: numbers.append(number))
    try:
        with a_preemption() as preemption:
            preemption.is_watched = True
            assert preemption.takes(number)
            preemption.answer()
            assert numbers == [number] and not preemption.takes(number)
            assert preemption.end_of(number).status == (1 if number is INT else 3)
    finally:
        signal.signal(number, before)


def test_two_signals_before_the_first_step_are_one_preemption() -> None:
    """`timeout` sends SIGTERM to a command, and again to its group."""
    with a_preemption() as preemption:
        preemption.is_watched = True
        assert preemption.takes(TERM) and not preemption.takes(TERM)
        assert preemption.end_of(TERM).status == 3


def test_nothing_is_asked_outside() -> None:
    before = [signal.getsignal(number) for number in PREEMPTIONS]
    assert not is_asked()
    calls = list[str]()
    with heeded(lambda: calls.append("step"), lambda number: calls.append(str(number))):
        os.kill(os.getpid(), USR1)
        assert calls == [str(int(USR1))] and is_asked()
        watch_requests()
        watch_requests()
        os.kill(os.getpid(), TERM)
        assert calls == [str(int(USR1)), "step"] and is_asked()
    assert not is_asked()
    with heeded():
        assert not is_asked()
    assert [signal.getsignal(number) for number in PREEMPTIONS] == before


def test_the_sentence() -> None:
    assert (
        saved_sentence(TERM, 120)
        == "preempted by SIGTERM: saved step 120; run the same command again, without --fresh, to go on"
    )
    assert saved_sentence(None, 1) == "preempted: saved step 1; run the same command again, without --fresh, to go on"


def until_asked(job: JobSpec, mesh: Mesh, folder: Path) -> int:
    """Steps until any rank is asked, or for ever. In the folder, what to do instead."""
    for step in range(1, 10**6):
        if (folder / "builds").exists():
            (folder / "steps").write_text("0")
            time.sleep(PATIENCE_S)
        time.sleep(0.02)
        watch_requests()
        asked = is_asked()
        if asked:
            (folder / f"asked {mesh.rank}").write_text("")
        barrier(mesh.world)  # what was written before it, each rank sees after it
        leaves = any((folder / f"asked {rank}").exists() for rank in range(mesh.world.size))
        barrier(mesh.world)
        if leaves and (folder / "hangs").exists():
            time.sleep(PATIENCE_S)
        if leaves:
            return step
        if mesh.rank == 0:
            (folder / "steps").write_text(str(step))
    raise AssertionError


PROGRAM = f"""
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_preemption
from fuzz import preloaded
from shardwright.train.launch import preemption
from shardwright.train.launch.ending import telling_of_signals
from shardwright.train.launch.restarts import launch_with_restarts
def command():
    with preemption.heard() as asked:
        folder = Path(sys.argv[1])
        job = test_preemption.job_of(float(sys.argv[2]))
        try:
            results = launch_with_restarts(test_preemption.until_asked, job, folder, asked, print, num_threads=1)
        except RuntimeError as error:
            sys.exit(f"failed: {{error}}")
        print(preemption.saved_sentence(asked.signal, results[0]), file=sys.stderr)
        sys.exit(3)
preloaded.fork_servers()
telling_of_signals(command)
"""


def job_of(timeout_s: float) -> JobSpec:
    job = small_job(dp=2)
    run = job.run.model_copy(update={"device": "cpu", "timeout_s": timeout_s})
    return job.model_copy(update={"run": run})


@contextmanager
def running(folder: Path, timeout_s: float = 60.0) -> Iterator[ForkedCommand]:
    """A command whose ranks do steps."""
    process = ForkedCommand(PROGRAM, str(folder), str(timeout_s))
    try:
        late_s = time.monotonic() + PATIENCE_S
        while not (folder / "steps").exists() and process.poll() is None and time.monotonic() < late_s:
            time.sleep(0.02)
        time.sleep(0.1)
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ends(process: ForkedCommand) -> tuple[int, str]:
    _, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, err


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
@pytest.mark.parametrize("to_all", [False, True], ids=["the command", "all its processes"])
def test_ranks_save_and_leave(tmp_path: Path, name: str, to_all: bool) -> None:
    with running(tmp_path) as process:
        (os.killpg if to_all else os.kill)(process.pid, signal.Signals[name])
        status, err = ends(process)
    assert status == 3, err
    step = int((tmp_path / "steps").read_text()) + 1
    answer = SAVES if name == "SIGINT" else ""
    assert err == answer + saved_sentence(signal.Signals[name], step) + "\n"


def test_before_the_first_step_it_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "builds").touch()
    with running(tmp_path) as process:
        process.send_signal(TERM)
        assert ends(process) == (3, f"preempted by SIGTERM {EARLY}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("first", "number"), [(TERM, TERM), (TERM, INT), (INT, INT)], ids=lambda signal: signal.name)
def test_a_second_signal_ends_it_at_once(tmp_path: Path, first: signal.Signals, number: signal.Signals) -> None:
    """A terminal sends Ctrl-C to all processes, of which the command alone answers."""
    (tmp_path / "hangs").touch()
    with running(tmp_path) as process:
        process.send_signal(first)
        while not list(tmp_path.glob("asked *")):
            time.sleep(0.02)
        os.killpg(process.pid, number) if number is INT else process.send_signal(number)
        answer = SAVES if first is INT else ""
        assert ends(process) == (1, f"{answer}failed: {number.name} ended this command and all that it had started\n")
        assert not alive_in_group(process.pid)


def alive_in_group(group: int) -> list[int]:
    """The processes of a group that run, a moment after its first one has ended."""
    late_s = time.monotonic() + PATIENCE_S
    while (result := members(group)) and time.monotonic() < late_s:
        time.sleep(0.02)
    return result


def members(group: int) -> list[int]:
    results = list[int]()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ProcessLookupError):
            if os.getpgid(int(entry.name)) == group and ") Z " not in (entry / "stat").read_text():
                results.append(int(entry.name))
    return results


RANK = """
import os, signal, sys, time
from shardwright.train.launch.preemption import ONE_PRESS_S, heeded, is_asked, watch_requests
with heeded(hears_interrupts=True, tells=True):
    watch_requests()
    assert not is_asked()
    os.kill(os.getpid(), signal.SIGINT)
    assert is_asked()
    os.kill(os.getpid(), signal.SIGINT)  # the same press of the user's, from the terminal and from torchrun
    print("lives", flush=True)
    time.sleep(ONE_PRESS_S + 0.2)
    os.kill(os.getpid(), signal.SIGINT)
    print("not here", flush=True)
"""


def test_a_rank_of_torchruns_hears_ctrl_c_itself() -> None:
    process = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (process.returncode, process.stdout, process.stderr) == (-INT, "lives\n", SAVES)


def test_in_a_program_of_the_users_the_second_ctrl_c_is_pythons() -> None:
    before = signal.signal(INT, signal.default_int_handler)
    try:
        with heard() as preemption:
            with pytest.raises(KeyboardInterrupt):  # no rank can save yet
                os.kill(os.getpid(), INT)
            preemption.is_watched = preemption.can_save = True
            os.kill(os.getpid(), INT)
            assert preemption.signal is INT
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), INT)
        assert signal.getsignal(INT) is signal.default_int_handler
    finally:
        signal.signal(INT, before)


def test_a_run_that_keeps_nothing_says_so() -> None:
    program = """
import os, signal
from shardwright.train.launch.ending import telling_of_signals
from shardwright.train.launch.preemption import unkept
def command():
    with unkept():
        os.kill(os.getpid(), signal.SIGINT)
telling_of_signals(command)
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert process.returncode == 1
    assert process.stderr.startswith(
        "failed: SIGINT ended this command and all that it had started; nothing of the run"
    )
    assert "checkpoint.every_steps" in process.stderr


def test_a_rank_that_does_not_leave_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "hangs").touch()
    with running(tmp_path, timeout_s=2.0) as process:
        process.send_signal(TERM)
        # Longer than a command that is stuck is given after a signal.
        status, err = ends(process)
    assert status == 1
    assert "had not saved and left 2 s after SIGTERM; what was saved before stays" in err


def test_only_the_main_thread_hears_of_signals() -> None:
    """And others look at what it heard only where they are told of it."""
    seen = list[bool]()
    with heeded():
        os.kill(os.getpid(), USR1)
        other = threading.Thread(target=lambda: seen.append(is_asked()))
        other.start()
        other.join()
        assert is_asked()
    assert seen == [False]


def test_a_rank_leaves_early_in_the_middle_of_a_print(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A signal that interrupts a buffered write may not flush what is written."""

    def flush() -> None:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    statuses: list[int] = []
    monkeypatch.setattr("sys.stdout", SimpleNamespace(flush=flush))
    monkeypatch.setattr("os._exit", statuses.append)
    leave_early(0)(TERM)
    assert statuses == [3] and EARLY.partition(";")[0] in capfd.readouterr().err
