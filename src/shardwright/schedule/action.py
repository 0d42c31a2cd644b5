"""The actions of a pipeline schedule: the things that one rank can do, as data.

A schedule is a list of actions for each rank. It is written and read as text, one token per action:

    2F5      forward of microbatch 5 through stage 2
    2B5      its whole backward; 2I5 and 2W5 are its two halves, input gradient and weight gradient
    2C5      recompute of its forward from the kept input, so that its backward has activations
    2SF5>1   send the output of stage 2 to rank 1          2RF5<0   receive the input of stage 2 from rank 0
    2SB5>0   send the input gradient of stage 2 to rank 0  2RB5<1   receive its output gradient from rank 1
    2G       gather the parameters of stage 2              2L       release the gathered parameters
    2R       reduce the gradients of stage 2 over its replicas
    S        optimizer step
    (3F5+3B2)  two compute actions that run as one, so that each hides the other's communication
"""

import re
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from shardwright.config.phrase import say


class Kind(StrEnum):
    """The kind of an action; the value is its letter in the text form."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    RECOMPUTE = "C"
    SEND_FORWARD = "SF"
    RECV_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECV_BACKWARD = "RB"
    GATHER = "G"
    RELEASE = "L"
    REDUCE = "R"
    STEP = "S"
    OVERLAP = "O"

    # Enum's own hash is a slow Python function, and schedules of a million actions use kinds as dictionary keys.
    __hash__ = str.__hash__


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.RECOMPUTE})
SEND = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
RECV = frozenset({Kind.RECV_FORWARD, Kind.RECV_BACKWARD})
ADDS = frozenset({Kind.BACKWARD, Kind.WEIGHT_GRAD})  # kinds that add to a stage's gradients


class Action(NamedTuple):
    """One action of one rank. A tuple, because schedules have a million actions, and tuples are made three times as
    fast as dataclasses.

    `stage` and `microbatch` are -1 if the action has none; `peer` is the rank at the other end of a send or receive;
    `parts` are the two actions of an overlapped pair.
    """

    kind: Kind
    stage: int = -1
    microbatch: int = -1
    peer: int = -1
    parts: tuple["Action", ...] = ()

    def __str__(self) -> str:
        if self.kind is Kind.OVERLAP:
            return "(" + "+".join(map(str, self.parts)) + ")"
        text = f"{'' if self.stage < 0 else self.stage}{self.kind}"
        text += "" if self.microbatch < 0 else str(self.microbatch)
        if self.peer >= 0:
            text += (">" if self.kind in SEND else "<") + str(self.peer)
        return text

    def computes(self) -> tuple["Action", ...]:
        """The compute actions in this action: the action itself, the parts of a pair, or none."""
        if self.kind in COMPUTE:
            return (self,)
        return self.parts


# An action from the values of all its fields, in half the time of a call of the class: for lists of a million.
action_of: Callable[[tuple[Kind, int, int, int, tuple[Action, ...]]], Action] = partial(tuple.__new__, Action)

_TOKEN = re.compile(r"(?P<stage>\d+)?(?P<kind>SF|RF|SB|RB|F|B|I|W|C|G|L|R|S)(?P<microbatch>\d+)?([<>](?P<peer>\d+))?")


def parse(text: str) -> Action:
    """Parse the text that `str` of an action wrote. ValueError if the text is not an action."""
    if text.startswith("(") and text.endswith(")"):
        return Action(Kind.OVERLAP, parts=tuple(parse(part) for part in text[1:-1].split("+")))
    match = _TOKEN.fullmatch(text)
    if match is None:
        raise ValueError(say("{text} is not an action; write one as 2F5, 2SF5>1, (3F5+3B2), 2R or S", text=repr(text)))
    stage, microbatch, peer = (int(match[key] or -1) for key in ("stage", "microbatch", "peer"))
    return Action(Kind(match["kind"]), stage, microbatch, peer)


def forward(stage: int, microbatch: int) -> Action:
    """F of one microbatch through one stage."""
    return Action(Kind.FORWARD, stage, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    """B of one microbatch through one stage: input and weight gradient in one."""
    return Action(Kind.BACKWARD, stage, microbatch)
