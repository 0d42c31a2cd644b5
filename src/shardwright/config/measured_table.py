"""Seconds of one kind of work by its sizes, as `shardwright calibrate` measured them on a device.

If a device's entry has such tables, they replace its peaks in predictions (cost/measured_time.py): they are times of
this runtime's own operators, with all overheads.
"""

from itertools import pairwise, product
from math import prod
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from shardwright.config import largest
from shardwright.config.base import Spec
from shardwright.config.field_types import Ranks
from shardwright.config.number_types import WideNumber
from shardwright.config.phrase import say

# The torch operators of this runtime, each timed by the number of elements of its tensor.
Kernel = Literal[
    "rms norm", "layer norm", "rotary", "gated activation", "activation", "join", "embedding", "loss", "merge"
]
# The communication of parallel/comm/collectives.py; a message goes from one rank to another, an exchange around a ring.
Carried = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange", "message"]
Work = Literal["product", "attention", Kernel, "update", Carried]

# By work, the quantities that the sizes of a table count; other work has only elements.
SIZES: dict[str, tuple[str, ...]] = {
    "product": ("rows", "inner", "columns"),
    "attention": ("length", "heads"),
    **dict.fromkeys(get_args(Carried), ("ranks", "bytes")),
}

Size = Annotated[float, Field(ge=1, le=1e18)]
MeasuredSeconds = Annotated[float, Field(ge=1e-12, le=largest.SECONDS)]
MeasuredColumn = Annotated[list[MeasuredSeconds], Field(max_length=largest.TABLE_SIZES**3)]


def sizes_of(work: str) -> tuple[str, ...]:
    """The quantities that the sizes in a table of some work count."""
    return SIZES.get(work, ("elements",))


class MeasuredTable(Spec):
    """Seconds of one kind of work of this runtime, by its sizes, in row-major order."""

    work: Work = Field(
        description="What was timed: a product with a weight, attention, another operator, the optimizer's update, or "
        "a collective."
    )
    number: WideNumber = Field("float32", description="Number type that it computes in.")
    busy: Ranks = Field(1, description="Ranks of this machine that did so at the same time.")
    sizes: list[Annotated[list[Size], Field(min_length=1, max_length=largest.TABLE_SIZES)]] = Field(
        min_length=1,
        max_length=3,
        description="Sizes along each side of the table, ascending: rows, inner and columns of a product, length and "
        "heads of attention, ranks and bytes of a collective, else elements.",
    )
    seconds: MeasuredColumn = Field(description="Seconds of one call, undisturbed; of an operator, of its forward.")
    backward: MeasuredColumn = Field(
        default_factory=list, description="Of an operator, of its backward; of a product, of its input gradient."
    )
    weight_grad: MeasuredColumn = Field(
        default_factory=list, description="Of a product, of its weight gradient, which is added up."
    )

    def most_flops(self) -> float:
        """The highest rate at which a product ran, in FLOP/s; 0 for other work."""
        if self.work != "product":
            return 0.0
        flops = [2.0 * prod(sizes) for sizes in product(*self.sizes)]
        passes = (self.seconds, self.backward, self.weight_grad)
        return max(work / took_s for times in passes for work, took_s in zip(flops, times, strict=True))

    @model_validator(mode="after")
    def _is_a_table(self) -> Self:
        names, count = sizes_of(self.work), prod(map(len, self.sizes))
        if len(self.sizes) != len(names):
            raise ValueError(
                say(
                    "it should be sizes by {fields}, and there are {count} lists",
                    fields=tuple(names),
                    count=len(self.sizes),
                )
            )
        if any(first >= second for side in self.sizes for first, second in pairwise(side)):
            raise ValueError(say("it should have sizes in ascending order; write each once, the smallest first"))
        is_product, is_operator = self.work == "product", self.work in ("product", "attention", *get_args(Kernel))
        for name, is_needed in (("seconds", True), ("backward", is_operator), ("weight_grad", is_product)):
            length, expected = len(getattr(self, name)), count * is_needed
            if length != expected:
                sides = " x ".join(str(len(side)) for side in self.sizes)
                raise ValueError(
                    say(
                        "it should have {expected} {name} for {sides} sizes, and there are {length}",
                        expected=expected,
                        name=name,
                        sides=sides,
                        length=length,
                    )
                )
        return self
