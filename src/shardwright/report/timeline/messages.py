"""Messages of a timeline: each send with its receive."""

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.schedule.action import RECV, SEND, Kind
from shardwright.schedule.dependencies import RECEIVED, TRAVELS, Product
from shardwright.simulate.timeline import Span, Timeline


@dataclass(frozen=True, slots=True)
class Message:
    """An activation or a gradient between two ranks. `about` is (stage that made it, microbatch, step).

    It begins to leave at the start of `send`, frees its link at the end of `send`, and has arrived at the end of
    `receive`.
    """

    sender: int
    receiver: int
    backward: bool
    about: tuple[int, int, int]
    send: Span
    receive: Span


def messages(timeline: Timeline) -> Iterator[Message]:
    """All messages, by sender and in the order of its sends."""
    receives: dict[tuple[bool, tuple[int, int, int]], Span] = {}
    for row in timeline.ranks:
        for span in row.spans:
            action = span.action
            if action.kind in RECV:
                product = RECEIVED[action.kind]
                source_stage = action.stage - TRAVELS[product]
                receives[product is Product.GRADIENT, (source_stage, action.microbatch, span.step)] = span
    for rank, row in enumerate(timeline.ranks):
        for span in row.spans:
            action = span.action
            if action.kind in SEND:
                backward = action.kind is Kind.SEND_BACKWARD
                about = action.stage, action.microbatch, span.step
                yield Message(rank, action.peer, backward, about, send=span, receive=receives[backward, about])
