"""A search finds the same whoever does its work: one process, or forked copies of it too."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from shardwright.config.base import PlanError, RunError
from shardwright.cost.calibration import shipped
from shardwright.planner.search import adjacent_search, forked_copies
from shardwright.planner.search.constraints import constraints_of
from shardwright.planner.search.forked_copies import ForkedCopy, num_processes, shared
from shardwright.planner.search.search import search
from support.planned import small_job

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture
def on_cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let this process believe that it may use so many cores."""
    return lambda count: monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))


@pytest.fixture(autouse=True)
def _no_copy_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All copies that a test has forked have ended, and were waited for."""
    pids, fork = [], os.fork

    def counted_fork() -> int:
        pids.append(fork())
        return pids[-1]

    monkeypatch.setattr(os, "fork", counted_fork)
    monkeypatch.setattr(forked_copies, "_MOST", 4)  # the suite has 1
    yield
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_a_search_finds_the_same_in_any_number_of_processes(model: str, on_cores: Callable[[int], None]) -> None:
    constraints = constraints_of(["plan.cp=1", "plan.recompute=none"], ["plan.virtual_stages=1,2"])
    results = []
    for count in (1, 3):
        on_cores(count)
        assert num_processes() == count
        result = search(small_job(model), constraints, shipped(), num_shown=4)
        results.append((result.candidates, replace(result.tally, seconds=0.0)))
    assert results[0] == results[1]
    assert len(results[0][0]) > 1


def test_shared_work_is_done_once_and_in_order(on_cores: Callable[[int], None]) -> None:
    on_cores(3)
    pids = list(shared(range(7), lambda number: (number, os.getpid())))
    assert [item for item, _ in pids] == list(range(7))
    assert [result is None for _, result in pids] == [number % 3 == 0 for number in range(7)]
    assert all(result[0] == item and result[1] != os.getpid() for item, result in pids if result)
    assert len({result[1] for _, result in pids if result}) == 2


def test_an_iterator_that_is_closed_early_ends_its_copies(on_cores: Callable[[int], None]) -> None:
    on_cores(2)
    with closing(shared([0, 1], lambda _: signal.pause())) as items:
        assert next(items) == (0, None)


def test_what_a_copy_has_found_so_far_is_read_without_waiting() -> None:
    def found(number: int) -> int:
        return signal.pause() if number == 3 else 10 // number  # 0 raises an exception

    copy, results = ForkedCopy(found, [0, 1, 2, 3]), list[int]()
    try:
        while results != [10, 5]:
            results += copy.results_so_far()
        assert list(copy.results_so_far()) == []
    finally:
        copy.end()


def test_an_exception_is_raised_by_the_first_process(on_cores: Callable[[int], None]) -> None:
    """With its own type and fields, which a pipe may not carry."""

    def refuse(number: int) -> None:
        raise PlanError("work", [f"fault {number}"])

    on_cores(2)
    with pytest.raises(PlanError) as error:
        list(shared([0, 1], refuse))
    assert error.value.faults == ["fault 1"]


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda _: os.kill(os.getpid(), signal.SIGKILL), r"\(signal 9\)"),
        (lambda _: os._exit(3), r"\(exit status 3\)"),
    ],
)
def test_the_death_of_a_copy_is_one_error(end: Callable[[Any], None], words: str) -> None:
    copy = ForkedCopy(end, [0])
    with pytest.raises(RunError, match=f"beside this one has ended {words}.*taskset -c 0"):
        copy.result()
    copy.end()


def test_a_death_in_a_search_is_told(on_cores: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    first_pid, known = os.getpid(), adjacent_search.StepTimes.known

    def dying_elsewhere(times: adjacent_search.StepTimes) -> Any:
        if os.getpid() != first_pid:
            os.kill(os.getpid(), signal.SIGKILL)
        return known(times)

    monkeypatch.setattr(adjacent_search.StepTimes, "known", dying_elsewhere)
    on_cores(2)
    with pytest.raises(RunError, match="signal 9"):
        search(small_job("dense"), constraints_of(["plan.cp=1", "plan.recompute=none"], []), shipped(), num_shown=4)


def test_only_the_main_thread_forks(on_cores: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    on_cores(2)
    thread = threading.Thread(target=lambda: counts.append(num_processes()))
    thread.start()
    thread.join()
    assert counts == [1]
    on_cores(1)
    assert num_processes() == 1
    on_cores(64)
    assert 1 < num_processes() < 8  # each takes memory of its own
    monkeypatch.setattr(forked_copies.sys, "platform", "darwin")
    assert num_processes() == 1


def test_a_signal_to_all_ends_copies_at_once() -> None:
    """Ctrl-C reaches all processes of a terminal; the first one tells it."""
    copy = ForkedCopy(lambda _: signal.pause(), [0])
    os.kill(copy._pid, signal.SIGINT)
    with pytest.raises(RunError, match=r"\(signal 2\)"):
        copy.result()
    copy.end()


def test_copies_end_with_a_process_that_is_killed() -> None:
    code = (
        "import os, signal\n"
        "from shardwright.planner.search.forked_copies import ForkedCopy\n"
        "def sleep(_): os.write(1, b'%d\\n' % os.getpid()); signal.pause()\n"
        "copy = ForkedCopy(sleep, [0])\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) != process.pid
        process.kill()
        assert process.stdout.read() == b""  # which ends when the copy, too, has closed it
