"""Pinned memory takes the bytes that the account says, and what is given back is taken again."""

import gc
import mmap
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from shardwright.parallel import pinned_memory
from shardwright.parallel.device_streams import CudaStreams
from shardwright.parallel.pinned_memory import pinned_empty
from shardwright.parallel.recompute.offload import HostPool
from shardwright.parallel.zero.host_link import HostLink
from shardwright.parallel.zero.master_weights import Masters, ShardPiece


class Driver:
    """Stands for CUDA's runtime, and notes the pages that it is told of."""

    def __init__(self) -> None:
        self.pages: list[tuple[int, int]] = []
        self.status = 0

    def register(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 1
        self.pages.append((address, num_bytes))
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    result = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=result.register))
    pinned_memory._free.clear()
    yield result
    gc.collect()
    pinned_memory._free.clear()


def test_it_takes_no_more_than_is_asked_for(driver: Driver) -> None:
    x = pinned_empty((3, 1000), torch.float32)
    assert x.shape == (3, 1000) and x.dtype == torch.float32
    assert x.untyped_storage().nbytes() == 12_000  # torch would take 16,384
    assert driver.pages == [(x.data_ptr(), 12_000)]
    assert x.data_ptr() % mmap.PAGESIZE == 0
    assert pinned_empty((0, 4), torch.bfloat16).shape == (0, 4) and len(driver.pages) == 1


def test_what_is_given_back_is_taken_again(driver: Driver) -> None:
    first = pinned_empty((100,), torch.float32).fill_(7.0)
    part, address = first[50:], first.data_ptr()
    del first
    other = pinned_empty((100,), torch.float32)
    assert other.data_ptr() != address and (part == 7.0).all()  # a part of it is in use
    del part
    gc.collect()
    again, larger = pinned_empty((200,), torch.bfloat16), pinned_empty((101,), torch.float32)
    assert again.data_ptr() == address
    assert larger.data_ptr() not in (address, other.data_ptr())
    assert [size for _, size in driver.pages] == [400, 400, 404]


def test_pages_that_a_driver_refuses_are_told(driver: Driver) -> None:
    driver.status = 2
    with pytest.raises(MemoryError, match="400 bytes of host memory could not be pinned"):
        pinned_empty((100,), torch.float32)


def test_states_on_the_host_lie_in_it(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    pieces, streams = [ShardPiece(0, 1000, decays=True, on_host=True)], CudaStreams(torch.device("cuda"))
    masters = Masters(pieces, torch.zeros(1000, dtype=torch.bfloat16), torch.device("cuda"), HostLink(streams))
    assert not any(tensor.count_nonzero() for tensor in masters.memory(on_host=True))
    assert [size for _, size in driver.pages] == [4000, 4000]  # weights and gradients
    masters.optimizer = SimpleNamespace(state={}, names=())  # type: ignore[assignment]
    assert sum(tensor.untyped_storage().nbytes() for tensor in masters.memory(on_host=True)) == 8000
    saved = masters.copy_out("weights", 100, 1000)
    assert driver.pages[2] == (saved.data_ptr(), 3600)

    pool = HostPool(torch.device("cuda"), streams)
    kept = pool._make(torch.zeros(3, 5))
    assert driver.pages[3] == (kept.tensor.data_ptr(), 60) and kept.tensor.shape == (3, 5)
    assert pool.allocated_bytes == 60
