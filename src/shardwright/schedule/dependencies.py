"""Dependencies of a computation: the table that lowering, the checker, the clocks, the timeline and the solver read.

Two products of a microbatch travel between stages: the output of a forward goes to the next stage, and the gradient of
a stage's input, which a backward makes, goes to the stage before. All other inputs of a computation are made on its own
stage:

    F  the output of the stage before
    C  its own F, which kept the input
    B  its own F, or C; and the gradient from the next stage
    I  as B
    W  its own I

The first stage has its tokens from the start, and the last stage makes its gradient from the loss: neither waits for
another stage. A product for a stage on the same rank arrives when it is made; to another rank it is sent.
"""

from enum import IntEnum
from typing import NamedTuple

from shardwright.schedule.action import Kind


class Product(IntEnum):
    """A result that one computation makes for another."""

    OUTPUT = 0
    GRADIENT = 1


class Need(NamedTuple):
    """A product of the same microbatch that a computation waits for, and the stage of its maker relative to its own."""

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
# The distance that a product travels, in stages: +1 or -1.
TRAVELS = {need.product: -need.stage for needs in NEEDS.values() for need in needs if need.stage}
MESSAGES = {
    Product.OUTPUT: (Kind.SEND_FORWARD, Kind.RECV_FORWARD),
    Product.GRADIENT: (Kind.SEND_BACKWARD, Kind.RECV_BACKWARD),
}
RECEIVED = {receive: product for product, (_, receive) in MESSAGES.items()}
