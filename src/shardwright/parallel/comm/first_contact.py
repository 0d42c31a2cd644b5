"""The first use of every communicator of a mesh, in one order on all ranks.

NCCL makes a communicator at its first use, and the host waits there for the other ranks: of a group in its first
collective, of two ranks in the first message between them. In the order of a pipeline's work ranks would come to these
one after another, with a stage's whole first microbatch between them.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from shardwright.parallel.comm.collectives import EXCHANGE_TAG, Axis
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.comm.transport import Transport, Underway
from shardwright.schedule.action import Kind
from shardwright.schedule.schedule import Program

_TAG = EXCHANGE_TAG + 1  # over Gloo, of the first messages


def make_contact(mesh: Mesh, program: Program) -> int:
    """Use each communicator of this rank once, and send each message's way of a program once. Returns how many ways
    there were. Every rank calls this."""
    number = 0
    one = torch.ones(1, device=mesh.device)
    for axis, transport in communicators(mesh):
        _wait(mesh, axis, transport.all_reduce(one, dist.ReduceOp.MAX))
        number += 1
    for is_forward, sender, receiver in ways(program):
        axis = mesh.forward if is_forward else mesh.backward
        if axis.transport is None or mesh.pp.index not in (sender, receiver):
            continue
        if mesh.pp.index == sender:
            _wait(mesh, axis, axis.transport.send(one, axis.ranks[receiver], _TAG))
        else:
            _wait(mesh, axis, axis.transport.recv(one, axis.ranks[sender], _TAG))
        number += 1
    mesh.numbers(one)  # the device has done all of it
    return number


def communicators(mesh: Mesh) -> Iterator[tuple[Axis, Transport]]:
    """The communicators of this rank, each once, in an order that is the same on all ranks of one."""
    seen = set[int]()
    for axis in axes(mesh):
        for transport in (axis.transport, axis.backward_transport):
            if transport is not None and axis.size > 1 and id(transport) not in seen:
                seen.add(id(transport))
                yield axis, transport


def axes(mesh: Mesh) -> Iterator[Axis]:
    """Every axis of a mesh that has collectives; some may come again. Messages between stages have communicators of two
    ranks, and one of the whole pipeline that no collective needs would take half a GiB."""
    yield from (mesh.world, mesh.pp, mesh.dp, mesh.cp, mesh.tp, mesh.dp_cp, mesh.ep)
    if mesh.ep.by_node is not None:
        yield from (mesh.ep.by_node.between, mesh.ep.by_node.inside)
    yield from (mesh.expert_tp, mesh.ends)
    for replicas in (mesh.replicas, mesh.expert_replicas):
        yield from (*replicas.shards, replicas.copies)


def ways(program: Program) -> list[tuple[bool, int, int]]:
    """The ways that messages of a program go: whether forward, and the pipeline ranks that send and receive. Sorted, so
    that ranks which take them in this order never wait for each other in a circle."""
    kinds = {Kind.SEND_FORWARD: True, Kind.SEND_BACKWARD: False}
    return sorted(
        {
            (kinds[action.kind], rank, action.peer)
            for rank, row in enumerate(program.ranks)
            for action in row
            if action.kind in kinds
        }
    )


def _wait(mesh: Mesh, axis: Axis, work: Underway) -> None:
    if mesh.watch is None:
        work.wait()
        return
    with mesh.watch.waiting(f"the first contact on axis {axis.name}", tuple(r for r in axis.ranks if r != mesh.rank)):
        work.wait()
