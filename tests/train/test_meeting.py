"""Ranks of one attempt get one name that no earlier attempt had, whatever earlier ones left in the store."""

import threading
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.parallel.comm.hang_watch import Watch, in_turn_of_rank_0
from shardwright.train.launch.meeting import NotMetError, attempt_name


def meet(store: dist.Store, ranks: list[int], world: int, timeout_s: float = 30.0) -> dict[int, str]:
    """What each rank finds: the name, or why there is none."""
    found: dict[int, str] = {}

    def live(rank: int) -> None:
        try:
            found[rank] = attempt_name(store, rank, world, timeout_s, lambda other: f"rank {other}")
        except NotMetError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=live, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@settings(max_examples=10, deadline=None)
@given(world=st.integers(1, 4), attempts=st.lists(st.permutations(range(4)), min_size=1, max_size=3))
def test_one_name_for_each_attempt(world: int, attempts: list[list[int]]) -> None:
    store, names = dist.HashStore(), list[str]()
    for order in attempts:
        found = meet(store, [rank for rank in order if rank < world], world)
        assert len(found) == world
        (name,) = set(found.values())
        names.append(name)
    assert len(set(names)) == len(attempts)


def test_who_does_not_come_is_named() -> None:
    store = dist.HashStore()
    meet(store, [0, 1, 2], 3)  # all words of an attempt before are there
    found = meet(store, [0, 1], 3, timeout_s=0.5)
    assert found[0].startswith("rank 0 waited 1 s for all ranks to meet, and rank 2 did not come")
    assert found[1].startswith("rank 1 waited 1 s for all ranks to meet, and rank 0 did not come")


def test_work_of_rank_0_may_last_longer_than_the_timeout(tmp_path: Path) -> None:
    """Others wait as long as it is heard of; and then it waits for theirs."""
    store, entered, told = dist.HashStore(), list[int](), list[str]()
    watches = [Watch(store, rank, 0.4, lambda other: f"rank {other}", told.append) for rank in range(3)]
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
    assert (entered[0], told, left.broken) == (0, [], False)


def test_a_dead_rank_0_is_not_waited_for() -> None:
    store, told = dist.HashStore(), list[str]()
    dead, waiting = (Watch(store, rank, 0.4, lambda other: f"rank {other}", told.append) for rank in (0, 1))
    dead.start()
    dead.stop()
    with (
        pytest.raises(RuntimeError, match="has not heard of it for"),
        in_turn_of_rank_0(waiting, 1, 2, "the tokens"),
    ):
        pass
    assert told[0].startswith("rank 1 waited for rank 0 to announce the tokens, and has not heard of it for 0 s: it is")
