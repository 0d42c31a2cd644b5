"""Dependencies of a computation: the table that lowering, the checker, the clocks, the timeline and the solver read.

Two products travel between stages, both of one microbatch: the output of a forward goes to the stage behind, and the
gradient of a stage's input, which a backward makes, to the stage before. All else that a computation waits for was made
on its own stage:

    F  the output of the stage before
    C  its own F, which kept the input
    B  its own F, or C; and the gradient from the stage behind
    I  the same
    W  its own I

The first stage has its tokens from the start, and the last one makes its gradient from the loss: there is no stage to
wait for. What travels to a stage on the same rank is there as soon as it is made; to another rank it is sent.
"""

from enum import IntEnum
from typing import NamedTuple

from shardwright.schedule.action import Kind


class Product(IntEnum):
    """A result that one computation makes for another one."""

    OUTPUT = 0
    GRADIENT = 1


class Need(NamedTuple):
    """A product of the same microbatch that a computation waits for, and whose: the stage relative to its own."""

    product: Product
    stage: int


MAKES = {Kind.FORWARD: Product.OUTPUT, Kind.BACKWARD: Product.GRADIENT, Kind.INPUT_GRAD: Product.GRADIENT}
_OF_BACKWARD = (Need(Product.OUTPUT, 0), Need(Product.GRADIENT, 1))
NEEDS = {
    Kind.FORWARD: (Need(Product.OUTPUT, -1),),
    Kind.RECOMPUTE: (Need(Product.OUTPUT, 0),),
    Kind.BACKWARD: _OF_BACKWARD,
    Kind.INPUT_GRAD: _OF_BACKWARD,
    Kind.WEIGHT_GRAD: (Need(Product.GRADIENT, 0),),
}
# How far a product travels, in stages: one ahead or one back.
TRAVELS = {need.product: -need.stage for needs in NEEDS.values() for need in needs if need.stage}
MESSAGES = {
    Product.OUTPUT: (Kind.SEND_FORWARD, Kind.RECV_FORWARD),
    Product.GRADIENT: (Kind.SEND_BACKWARD, Kind.RECV_BACKWARD),
}
RECEIVED = {receive: product for product, (_, receive) in MESSAGES.items()}
