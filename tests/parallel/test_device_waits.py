"""Waits of a device: bracketed by events that are made once, and read without waiting for other streams."""

import pytest
import torch

from shardwright.parallel.comm.ledger import Ledger


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
    ledger = Ledger(torch.device("cuda"))
    for step in range(3):
        ledger.clear()
        waits(ledger, "tp", 4)
        waits(ledger, "pp", 2)
        if step != 1:  # a step of which nobody asks
            assert ledger.blocked_s() == {"tp": 4.0, "pp": 2.0}
            assert ledger.blocked_s() == {"tp": 4.0, "pp": 2.0}
    assert Event.num_made == 12
