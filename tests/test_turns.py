"""Passes of one rank compute in turn, and hand over where they wait."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from shardwright.parallel.turns import Turns


def test_only_waits_hand_over() -> None:
    turns, met = Turns(), Barrier(2, timeout=10)
    log: list[str] = []

    def work(name: str) -> None:
        with turns.taking():
            log.append(f"{name} begins")
            with turns.waiting():
                met.wait()  # only if both can be here at once
            log.append(f"{name} goes on")
            log.append(f"{name} ends")

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(work, name) for name in "FB"]:
            done.result(timeout=10)
    for name in "FB":
        assert log.index(f"{name} ends") == log.index(f"{name} goes on") + 1
        assert log.index(f"{name} begins") < 2


def test_a_failure_gives_the_turn_back() -> None:
    turns = Turns()
    try:
        with turns.taking(), turns.waiting():
            raise RuntimeError
    except RuntimeError:
        pass
    with ThreadPoolExecutor(1) as threads:

        def take() -> bool:
            with turns.taking(), turns.waiting():
                return True

        assert threads.submit(take).result(timeout=10)


def test_who_takes_no_turns_is_never_held_up() -> None:
    turns = Turns()
    with ThreadPoolExecutor(1) as threads, turns.taking():

        def wait() -> bool:
            with turns.waiting():
                return True

        assert threads.submit(wait).result(timeout=10)
