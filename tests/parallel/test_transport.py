"""The transport of messages: over Gloo each direction between two ranks has a group of its own."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.parallel.comm.transport import GroupTransport

UPWARDS, DOWNWARDS = object(), object()


def carried(monkeypatch: pytest.MonkeyPatch, rank: int, transport: GroupTransport) -> dict[tuple[int, int], Any]:
    """The group of each message that a rank sends to ranks 0 to 3 or receives of them, by (source, destination)."""
    result = dict[tuple[int, int], Any]()
    x = torch.zeros(1)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "isend", lambda x, to, group, tag: result.update({(rank, to): group}))
    monkeypatch.setattr(dist, "irecv", lambda x, source, group, tag: result.update({(source, rank): group}))
    for other in {0, 1, 2, 3} - {rank}:
        transport.send(x, other)
        transport.recv(x, other)
    return result


def test_both_ends_of_a_message_take_the_same_group(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = GroupTransport(UPWARDS, DOWNWARDS)  # type: ignore[arg-type]
    for rank in range(4):
        for (source, to), group in carried(monkeypatch, rank, transport).items():
            assert group is (UPWARDS if source < to else DOWNWARDS)


def test_one_group_carries_all_where_there_is_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = GroupTransport(UPWARDS)  # type: ignore[arg-type]
    assert set(carried(monkeypatch, 1, transport).values()) == {UPWARDS}


def test_a_message_to_a_rank_that_is_gone_is_told_by_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo raises where the message would begin, where nobody says who left and why; another error comes at once."""
    transport = GroupTransport(UPWARDS)  # type: ignore[arg-type]
    reasons = ["Connection closed by peer", "tensors must be contiguous"]

    def refuse(*args: Any, **options: Any) -> None:
        raise RuntimeError(reasons[0])

    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    for name in ("isend", "irecv"):
        monkeypatch.setattr(dist, name, refuse)
    for begin in (transport.send, transport.recv):
        work = begin(torch.zeros(1), 0)
        with pytest.raises(RuntimeError, match="closed by peer"):
            work.wait()
    reasons.pop(0)
    for begin in (transport.send, transport.recv):
        with pytest.raises(RuntimeError, match="contiguous"):
            begin(torch.zeros(1), 0)
