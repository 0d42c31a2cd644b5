"""Ranks of tests that are kept for the next run."""

from pathlib import Path

import torch.distributed as dist

import support.ranks as ranks
from support.ranks import leaves_nothing, run_ranks

_stores: list[tuple[dist.Store, Path]] = []


@leaves_nothing
def hold_the_store(rank: int, store: str) -> int:
    _stores.append((dist.FileStore(store, 2), Path(store).parent))
    return rank


@leaves_nothing
def let_go_of_it(rank: int, store: str) -> bool:
    _, folder = _stores.pop()
    return folder.is_dir()


def test_a_store_may_outlive_its_run() -> None:
    """Its destructor opens its file, and ends the process with SIGABRT if the folder is removed at that moment."""
    ranks._end(ranks._kept)  # ranks that earlier tests used may have had their last run, and hold nothing for another
    ranks._kept.clear()
    assert run_ranks(2, hold_the_store) == [0, 1]
    assert run_ranks(2, let_go_of_it) == [True, True]
