"""Collectives with a root: who has what afterwards, what the ledger counts, and what a dry run asks for."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.parallel.comm.collectives import Axis, broadcast, gather, reduce, scatter
from shardwright.parallel.comm.ledger import INSIDE, Ledger
from shardwright.parallel.comm.transport import DryTransport, GroupTransport
from support.ranks import in_group, leaves_nothing, run_ranks

WORLD, ROOT, ROWS = 3, 1, 2
ROW_BYTES = 4


def axis_of(rank: int, world: int) -> Axis:
    assert dist.group.WORLD is not None
    ledger = Ledger(torch.device("cpu"), rank, ranks_per_node=world)
    return Axis("dp", tuple(range(world)), rank, GroupTransport(dist.group.WORLD), ledger, None)


@leaves_nothing
def all_four(rank: int, world: int) -> dict[str, tuple[Any, Any, int]]:
    """The values, the tallies and the sent bytes of each collective."""
    results = {}
    for name in ("broadcast", "reduce", "scatter", "gather"):
        axis = axis_of(rank, world)
        own = torch.full((ROWS,), float(rank + 1))
        full = torch.arange(ROWS * world, dtype=torch.float32) if rank == ROOT else None
        if name == "broadcast":
            values = broadcast(own, axis, ROOT)
        elif name == "reduce":
            values = reduce(own, axis, ROOT)
        elif name == "scatter":
            values = scatter(own, full, axis, ROOT)
        else:
            out = None if full is None else torch.empty(ROWS * world)
            values = gather(out, own, axis, ROOT)
        tallies = axis.ledger.table()
        results[name] = (None if values is None else values.tolist(), tallies, axis.ledger.sent_bytes(INSIDE))
    return results


def test_each_rank_has_what_it_should() -> None:
    ranks = run_ranks(WORLD, in_group, WORLD, all_four)
    values = {name: [rank[name][0] for rank in ranks] for name in ranks[0]}
    assert values["broadcast"] == [[ROOT + 1.0] * ROWS] * WORLD
    assert values["reduce"][ROOT] == [1.0 + 2 + 3] * ROWS
    assert values["scatter"] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert values["gather"] == [None, [1.0, 1.0, 2.0, 2.0, 3.0, 3.0], None]

    share, full = ROWS * ROW_BYTES, ROWS * WORLD * ROW_BYTES
    sizes = {"broadcast": share, "reduce": share, "scatter": full, "gather": full}
    for name, size in sizes.items():
        assert all(rank[name][1] == {f"{name} dp": {"count": 1, "bytes": size}} for rank in ranks)
    sent = {name: [rank[name][2] for rank in ranks] for name in ranks[0]}
    assert sent == {
        "broadcast": [0, share, share],  # along a ring from the root on, whose last rank sends nothing
        "reduce": [share, 0, share],
        "scatter": [0, 2 * share, 0],
        "gather": [share, 0, share],
    }


def test_a_rank_alone_sends_nothing() -> None:
    axis = Axis("dp", (5,), 0, None, Ledger(torch.device("cpu")), None)
    x, out = torch.ones(3), torch.zeros(3)
    assert reduce(x, axis, 0) is x
    assert torch.equal(scatter(out, x, axis, 0), x)
    gathered = gather(out.zero_(), x, axis, 0)
    assert gathered is out and torch.equal(out, x)
    assert axis.ledger.table() == {}


@pytest.mark.parametrize("index", [0, 1])
def test_a_dry_run_counts_the_same(index: int) -> None:
    axis = Axis("dp", (0, 1), index, DryTransport(is_gloo=False), Ledger(torch.device("meta")), None)
    x = torch.empty(4, device="meta")
    reduce(x, axis, 0)
    scatter(x, None if index else x.new_empty(8), axis, 0)
    gather(None if index else x.new_empty(8), x, axis, 0)
    sizes = {kind.split()[0]: tally["bytes"] for kind, tally in axis.ledger.table().items()}
    assert sizes == {"reduce": 16, "scatter": 32, "gather": 32}
