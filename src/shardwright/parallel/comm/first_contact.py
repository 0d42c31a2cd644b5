"""The first use of every communicator of a mesh, in one order on all ranks.

NCCL creates a communicator at its first use, and the host waits there for the other ranks: for those of a group in its
first collective, for the other end of a message in the first message between two ranks. In the order of a pipeline's
work, ranks would reach these first uses one after another, each later by a stage's whole first microbatch.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from shardwright.config.phrase import say
from shardwright.parallel.comm.collectives import EXCHANGE_TAG, Axis
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.comm.transport import Transport, WorkHandle
from shardwright.schedule.action import Kind
from shardwright.schedule.schedule import Program

_TAG = EXCHANGE_TAG + 1  # of the first messages, over Gloo


def make_contact(mesh: Mesh, program: Program) -> int:
    """Use each communicator of this rank once, and send one message along each of its message paths in a program.
    Returns how many communicators and paths this rank used. Every rank must call this."""
    number = 0
    token = torch.ones(1, device=mesh.device)
    for axis, transport in communicators(mesh):
        _wait(mesh, axis, transport.all_reduce(token, dist.ReduceOp.MAX))
        number += 1
    for is_forward, sender, receiver in ways(program):
        axis = mesh.forward if is_forward else mesh.backward
        if axis.transport is None or mesh.pp.index not in (sender, receiver):
            continue
        if mesh.pp.index == sender:
            _wait(mesh, axis, axis.transport.send(token, axis.ranks[receiver], _TAG))
        else:
            _wait(mesh, axis, axis.transport.recv(token, axis.ranks[sender], _TAG))
        number += 1
    mesh.numbers(token)  # wait until the device has done all of it
    return number


def communicators(mesh: Mesh) -> Iterator[tuple[Axis, Transport]]:
    """The communicators of this rank, each once, in an order that all ranks of a communicator agree on."""
    seen = set[int]()
    for axis in axes(mesh):
        for transport in (axis.transport, axis.backward_transport):
            if transport is not None and axis.size > 1 and id(transport) not in seen:
                seen.add(id(transport))
                yield axis, transport


def axes(mesh: Mesh) -> Iterator[Axis]:
    """Every axis of a mesh that has collectives; an axis may be yielded twice. The axes of messages between stages are
    left out: a message has a communicator of two ranks, and a communicator of the whole pipeline, which no collective
    needs, would take half a GiB."""
    yield from (mesh.world, mesh.pp, mesh.dp, mesh.cp, mesh.tp, mesh.dp_cp, mesh.ep)
    if mesh.ep.by_node is not None:
        yield from (mesh.ep.by_node.between, mesh.ep.by_node.inside)
    yield from (mesh.expert_tp, mesh.ends)
    for replicas in (mesh.replicas, mesh.expert_replicas):
        yield from (*replicas.shards, replicas.copies)


def ways(program: Program) -> list[tuple[bool, int, int]]:
    """The paths of a program's messages: (is forward, sending pipeline rank, receiving pipeline rank). They are sorted:
    ranks that use them in this order never wait for each other in a circle."""
    kinds = {Kind.SEND_FORWARD: True, Kind.SEND_BACKWARD: False}
    return sorted(
        {
            (kinds[action.kind], rank, action.peer)
            for rank, row in enumerate(program.ranks)
            for action in row
            if action.kind in kinds
        }
    )


def _wait(mesh: Mesh, axis: Axis, work: WorkHandle) -> None:
    if mesh.watch is None:
        work.wait()
        return
    with mesh.watch.waiting(
        say("the first contact on axis {axis}", axis=axis.name), tuple(r for r in axis.ranks if r != mesh.rank)
    ):
        work.wait()
