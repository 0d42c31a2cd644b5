"""An optimizer on the host of a device: its copies run on streams of their own, a unit ahead, and nothing is read or
overwritten before they are over.

Copies of this device are done when somebody waits for them, and no sooner.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain, pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.config.optimizer import OptimizerSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.optimizers.elementwise import make_optimizer
from shardwright.parallel.zero import host_link
from shardwright.parallel.zero.host_link import HostLink
from shardwright.parallel.zero.master_weights import Masters, ShardPiece
from shardwright.train.build import build
from shardwright.train.train_step import train_step
from support.cases import made_up_tokens, small_job, with_optimizer
from support.ranks import run_on_mesh

CUDA = torch.device("cuda")


class Stream:
    """Work in its order; each part may wait for that of another stream."""

    current: "Stream"

    def __init__(self, device: torch.device | None = None) -> None:
        self.work: list[Callable[[], None]] = []
        self.num_done = 0

    def catch_up(self, until: int) -> None:
        while self.num_done < until:
            self.num_done += 1
            self.work[self.num_done - 1]()

    def wait_stream(self, other: "Stream") -> None:
        self.work.append(partial(other.catch_up, len(other.work)))

    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace(synchronize=partial(self.catch_up, len(self.work)))


class LateTensor(Tensor):
    """A tensor whose copies without blocking are put on the current stream."""

    def copy_(self, source: Tensor, non_blocking: bool = False) -> "LateTensor":  # type: ignore[override]
        into, values = self.as_subclass(Tensor), source.as_subclass(Tensor)
        if non_blocking:
            assert into.dtype == values.dtype, "torch would convert on the CPU, and wait"
            Stream.current.work.append(lambda: into.copy_(values))
        else:
            into.copy_(values)
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def late(x: Tensor) -> Tensor:
    return x.as_subclass(LateTensor)


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, stream
    yield
    Stream.current = before


class LateStreams:
    """The streams of a device whose copies come late."""

    def current(self) -> Stream:
        return Stream.current

    def made(self) -> Stream:
        return Stream()

    def using(self, stream: Stream) -> AbstractContextManager[None]:
        return on(stream)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return late(torch.zeros(shape, dtype=dtype))

    def is_on_host(self, x: Any) -> bool:
        return bool(x.device.type == "cpu" and not isinstance(x, OnDevice))

    def host_waits(self) -> AbstractContextManager[None]:
        return nullcontext()


def late_link() -> HostLink:
    return HostLink(LateStreams())  # type: ignore[arg-type]


@pytest.fixture
def device() -> Stream:
    """The stream that computes."""
    Stream.current = Stream()
    return Stream.current


def test_values_are_rounded_block_by_block(device: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_link, "_BLOCK_BYTES", 20)
    link, values = late_link(), torch.randn(47)
    expected, into = values.bfloat16(), torch.zeros(47, dtype=torch.bfloat16)
    late_into = late(into)
    link.bring(late_into, values)
    values.zero_()  # the CPU goes on with its weights
    assert link._inward.num_done < len(link._inward.work), "the host waited for the last copies"
    device.catch_up(len(device.work))
    assert torch.equal(into, expected)
    assert len(link._blocks) == 2


def test_the_host_reads_gradients_once_they_are_there(device: Stream) -> None:
    link, gradients, into = late_link(), torch.randn(5), torch.zeros(5)
    event = link.send(late(into), gradients)
    assert not into.count_nonzero()
    event.synchronize()
    assert torch.equal(into, gradients)


def on_two_units(is_device: bool, ahead: bool = True, steps: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    """Values after some steps of two shards on the host, and the gradients that these were given."""
    generator = torch.Generator().manual_seed(3)
    pieces = [ShardPiece(0, 80, decays=True, on_host=True)]
    place, link = (CUDA, late_link()) if is_device else (torch.device("cpu"), None)
    values = [torch.randn(80, generator=generator).bfloat16() for _ in range(2)]
    shards = [Masters(pieces, value, place, link) for value in values]
    for shard, value in zip(shards, values, strict=True):
        shard.fill(0, 80, lambda at, out, value=value: out.copy_(value[at : at + len(out)]))  # type: ignore[misc]
        shard.make_optimizer(partial(make_optimizer, OptimizerSpec()))
    given = []
    for _ in range(steps):
        gradients = [torch.randn(80, generator=generator) for _ in range(2)]
        for unit, (shard, value) in enumerate(zip(shards, values, strict=True)):
            if ahead and unit == 0:
                shards[1].send_ahead(gradients[1], 0.5)
            shard.begin_step(gradients[unit], 0.5, 1e-2)
            given.append(shard.tensors[0].grad.as_subclass(Tensor).clone())
            shard.end_step()
            shard.write_values(seen(value, is_device))
    if is_device:
        Stream.current.catch_up(len(Stream.current.work))
    return values, given


def seen(values: Tensor, is_device: bool) -> Tensor:
    """Values as those of a device, which the fake can't be."""
    return OnDevice(values) if is_device else values  # type: ignore[return-value]


class OnDevice:
    """A tensor that says it is on a device, and copies when its stream comes to it."""

    device, dtype = CUDA, torch.bfloat16

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def __getitem__(self, index: slice) -> "OnDevice":
        return OnDevice(self._values[index])

    def __len__(self) -> int:
        return len(self._values)

    def element_size(self) -> int:
        return self._values.element_size()

    def split(self, size: int) -> list[Tensor]:
        return [late(part) for part in self._values.split(size)]


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_are_those_of_a_host_alone(device: Stream, monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    monkeypatch.setattr(host_link, "_BLOCK_BYTES", 64)
    (expected, of_host), (result, of_device) = on_two_units(False, ahead=False), on_two_units(True, ahead)
    assert all(torch.equal(a, b) for a, b in zip(of_host, of_device, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(expected, result, strict=True))


def updates_in_turn(mesh: Mesh, job: JobSpec) -> list[tuple[str, int]]:
    replica, turns = build(job, mesh), list[tuple[str, int]]()
    masters = [unit.masters for shards in replica.shards.values() for unit in shards.units]
    begin, ahead = Masters.begin_step, Masters.send_ahead

    def begins(self: Masters, *args: Any) -> None:
        turns.append(("begins", masters.index(self)))
        begin(self, *args)

    def goes(self: Masters, *args: Any) -> None:
        turns.append(("ahead", masters.index(self)))
        ahead(self, *args)

    with patch.object(Masters, "begin_step", begins), patch.object(Masters, "send_ahead", goes):
        train_step(replica, 0, made_up_tokens(job, 0))
    return turns


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_gradients_of_the_next_unit_are_on_their_way(optimizer: str) -> None:
    job = with_optimizer(small_job(bucket_mib=0.01, offload_optimizer=0.5), name=optimizer)
    (turns,) = run_on_mesh(job, updates_in_turn, job)
    begun = [unit for what, unit in turns if what == "begins"]
    assert len(begun) > 2
    expected = [[("ahead", following), ("begins", unit)] for unit, following in pairwise(begun)]
    assert turns == [*chain.from_iterable(expected), ("begins", begun[-1])]
