"""Waits of a device: bracketed by events that are made once, and read without waiting for other streams."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from shardwright.parallel.comm.ledger import Ledger
from shardwright.parallel.device_streams import CudaStreams, host_reading


class Event:
    """An event of a device on which everything takes a second."""

    num_made = 0
    now_s = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        Event.num_made += 1

    def record(self) -> None:
        Event.now_s += 1.0
        self._at_s, self._is_over = Event.now_s, False

    def query(self) -> bool:
        return self._is_over

    def synchronize(self) -> None:
        self._is_over = True

    def elapsed_time(self, end: "Event") -> float:
        assert end._is_over, "torch raises here"
        return (end._at_s - self._at_s) * 1e3


def waits(ledger: Ledger, axis: str, num: int) -> None:
    for _ in range(num):
        with ledger.blocked(axis):
            pass


def test_events_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("copies beside need not be over"))
    ledger = Ledger(torch.device("cuda"), streams=CudaStreams(torch.device("cuda")))
    for step in range(3):
        ledger.clear()
        waits(ledger, "tp", 4)
        waits(ledger, "pp", 2)
        if step != 1:  # a step of which nobody asks
            assert ledger.blocked_s() == {"tp": 4.0, "pp": 2.0}
            assert ledger.blocked_s() == {"tp": 4.0, "pp": 2.0}
    assert Event.num_made == 12


def test_reads_of_the_host_are_watched() -> None:
    """Numbers that were sent ahead, numbers that are read at once, and the account of waits."""
    watched = list[str]()

    @contextmanager
    def wait() -> Iterator[None]:
        watched.append("begins")
        yield
        watched.append("ends")

    streams = CudaStreams(torch.device("cuda"), wait)
    with host_reading(streams, torch.zeros(1)):
        assert watched == ["begins"]
    with streams.host_waits():
        assert watched == ["begins", "ends", "begins"]
    with host_reading(None, torch.zeros(1)):  # a CPU has nothing to wait for
        assert len(watched) == 4
