"""Passes of one rank compute in turn, and hand over where they wait."""

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch

from shardwright.parallel.comm.collectives import Axis
from shardwright.parallel.comm.compute_turns import Turns
from shardwright.parallel.comm.ledger import Ledger


def test_only_waits_hand_over() -> None:
    turns, met = Turns(), Barrier(2, timeout=100)
    log: list[str] = []

    def work(name: str) -> None:
        with turns.taking("forward"):
            log.append(f"{name} begins")
            with turns.waiting():
                met.wait()  # only if both can be here at once
            log.append(f"{name} goes on")
            log.append(f"{name} ends")

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(work, name) for name in "FB"]:
            done.result(timeout=100)
    for name in "FB":
        assert log.index(f"{name} ends") == log.index(f"{name} goes on") + 1
        assert log.index(f"{name} begins") < 2


def test_a_failure_gives_the_turn_back() -> None:
    turns = Turns()
    try:
        with turns.taking("backward"), turns.waiting():
            raise RuntimeError
    except RuntimeError:
        pass
    with ThreadPoolExecutor(1) as threads:

        def take() -> bool:
            with turns.taking("backward"), turns.waiting():
                return True

        assert threads.submit(take).result(timeout=100)


def test_who_takes_no_turns_is_never_held_up() -> None:
    turns = Turns()
    with ThreadPoolExecutor(1) as threads, turns.taking("forward"):

        def wait() -> bool:
            with turns.waiting():
                return True

        assert threads.submit(wait).result(timeout=100)


def test_time_in_which_the_turn_is_kept_stands_still_for_all() -> None:
    """Of two passes one waits and keeps the turn: nobody computes, whether the other waits too or not."""
    ledger, ends = Ledger(torch.device("cpu")), Barrier(2, timeout=100)

    def wait(name: str, keeps_turn: bool, alone_s: float) -> None:
        with ledger.blocked(name, keeps_turn):
            ends.wait()
            time.sleep(alone_s)

    with ledger.lanes(+1), ThreadPoolExecutor(2) as threads:
        start_s = time.perf_counter()
        for done in [threads.submit(wait, "kept", True, 0.06), threads.submit(wait, "given", False, 0.03)]:
            done.result(timeout=100)
        # To the end of the longer, and what both waited only once.
        assert 0.06 <= sum(ledger.blocked_s().values()) <= time.perf_counter() - start_s
        threads.submit(wait_alone, ledger).result(timeout=100)
        assert "waits" not in ledger.blocked_s()  # the other pass could compute


def wait_alone(ledger: Ledger) -> None:
    with ledger.blocked("waits"):
        time.sleep(0.01)


def test_a_forward_beside_a_backward_uses_no_communicator_of_both() -> None:
    """Each pass has its own group of an axis; an axis with one group is the backward's, which reduces on it."""
    both: Any = object()
    own: Any = object()
    turns = Turns()
    ledger = Ledger(torch.device("cpu"))
    one = Axis("dp", (0, 1), 0, both, ledger, None, None, turns)
    two = Axis("tp", (0, 1), 0, both, ledger, None, own, turns)
    assert one.communicator is two.communicator is both  # where one pass runs
    with turns.taking("backward"):
        assert (one.communicator, two.communicator) == (both, own)
    with turns.taking("forward"):
        assert two.communicator is both
        with pytest.raises(AssertionError, match="a forward beside a backward may not use axis dp"):
            _ = one.communicator
