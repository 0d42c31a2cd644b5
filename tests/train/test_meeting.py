"""Ranks of one attempt get one name that no earlier attempt had, whatever earlier ones left in the store."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.parallel.comm import hang_watch
from shardwright.parallel.comm.hang_watch import Watch, WatchRules, in_turn_of_rank_0
from shardwright.train.launch.meeting import NotMetError, attempt_name

pytestmark = pytest.mark.long


def meet(store: dist.Store, ranks: list[int], world: int, timeout_s: float = 30.0) -> dict[int, str]:
    """The answer that each rank gets: the name, or why there is none."""
    result: dict[int, str] = {}

    def live(rank: int) -> None:
        try:
            result[rank] = attempt_name(store, rank, world, timeout_s, lambda other: f"rank {other}")
        except NotMetError as error:
            result[rank] = str(error)

    threads = [threading.Thread(target=live, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return result


@settings(max_examples=10, deadline=None)
@given(world=st.integers(1, 4), attempts=st.lists(st.permutations(range(4)), min_size=1, max_size=3))
def test_one_name_for_each_attempt(world: int, attempts: list[list[int]]) -> None:
    store, names = dist.HashStore(), list[str]()
    for order in attempts:
        results = meet(store, [rank for rank in order if rank < world], world)
        assert len(results) == world
        (name,) = set(results.values())
        names.append(name)
    assert len(set(names)) == len(attempts)


def test_who_does_not_come_is_named() -> None:
    store = dist.HashStore()
    meet(store, [0, 1, 2], 3)  # all words of an attempt before are there
    result = meet(store, [0, 1], 3, timeout_s=0.5)
    assert result[0].startswith("rank 0 waited 1 s for all ranks to meet, and rank 2 did not come")
    assert result[1].startswith("rank 1 waited 1 s for all ranks to meet, and rank 0 did not come")


def test_work_of_rank_0_may_last_longer_than_the_timeout(tmp_path: Path) -> None:
    """Others wait as long as it is heard of; and then it waits for theirs."""
    store, entered, answer = dist.HashStore(), list[int](), list[str]()
    watches = [Watch(store, rank, WatchRules(0.4, lambda other: f"rank {other}", answer.append)) for rank in range(3)]
    left = threading.Barrier(3)

    def live(rank: int) -> None:
        with in_turn_of_rank_0(watches[rank], rank, 3, "the tokens"):
            if rank == 2:
                assert 0 in entered
            watches[rank]._stop.wait(1.5 if rank != 1 else 0.0)
            entered.append(rank)
        assert len(entered) == 3
        left.wait(10)

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(3)]
    for watch in watches:
        watch.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for watch in watches:
        watch.stop()
    assert (entered[0], answer, left.broken) == (0, [], False)


def test_a_dead_rank_0_is_not_waited_for() -> None:
    store, answer = dist.HashStore(), list[str]()
    dead, waiting = (
        Watch(store, rank, WatchRules(0.4, lambda other: f"rank {other}", answer.append)) for rank in (0, 1)
    )
    dead.start()
    dead.stop()
    with (
        pytest.raises(RuntimeError, match="has not heard of it for"),
        in_turn_of_rank_0(waiting, 1, 2, "the tokens"),
    ):
        pass
    assert answer[0].startswith(
        "rank 1 waited for rank 0 to announce the tokens, and has not heard of it for 0 s: it is"
    )


def test_reading_may_take_longer_than_the_timeout() -> None:
    """Ranks that read a checkpoint come to the collective behind it when all have read: none waits in it too long."""
    store, answer, arrived = dist.HashStore(), list[str](), list[int]()
    watches = [Watch(store, rank, WatchRules(0.5, lambda other: f"rank {other}", answer.append)) for rank in range(3)]

    def read(rank: int) -> None:
        for slow in (0, 2):  # twice, for names of meetings differ
            if rank == slow:
                watches[rank]._stop.wait(1.5)
                arrived.append(rank)
            hang_watch.meet(watches[rank], rank, 3, "reading step-8")
            assert slow in arrived

    _run_beside_each_other(watches, read)
    assert (arrived, answer) == ([0, 2], [])


def test_a_meeting_may_have_a_bound_of_its_own() -> None:
    store, answer = dist.HashStore(), list[str]()
    watches = [Watch(store, rank, WatchRules(5.0, lambda other: f"rank {other}", answer.append)) for rank in range(2)]
    for watch in watches:
        watch.start()
    with pytest.raises(
        RuntimeError, match=r"waited for rank 1 to announce the warm-up.* may take 0 s and no longer; it is alive"
    ):
        hang_watch.meet(watches[0], 0, 2, "the warm-up", most_s=0.3)
    for watch in watches:
        watch.stop()
    assert len(answer) == 1


def _run_beside_each_other(watches: list[Watch], live: Callable[[int], None]) -> None:
    """Live as each rank, on threads; what they raise is raised here."""
    for watch in watches:
        watch.start()
    with ThreadPoolExecutor(len(watches)) as threads:
        lives = [threads.submit(live, rank) for rank in range(len(watches))]
    for watch in watches:
        watch.stop()
    for one in lives:
        one.result()
