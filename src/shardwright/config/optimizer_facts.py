"""Optimizers by name: the facts of each are a file in config/optimizers, and here one asks for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from shardwright.config.registry import NameOf, Registry

MatrixUpdate = Literal["none", "orthogonal", "factored"]


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """The facts of an optimizer, known without computing anything.

    - `place` is where lists show it; `title` is how people call it.
    - `rule` is the update of elements, as "module:function" (parallel/optimizers/elementwise.py); `in_blocks`: it needs
      memory, and does some elements at a time.
    - `moments` are the states that it keeps for each element, of an OptimizerSpec, by torch's names; `decays` are the
      fields that they decay by.
    - `reads` are fields of [optimizer] that not every optimizer reads.
    - `costs_as_adamw`: its update of elements reads and writes what AdamW's does.

    Of those that look at whole matrices:

    - `matrix_update` says how these are updated: made orthogonal by their owners (sharding/matrix_exchange.py), or by
      sums of squares by row and column (sharding/factored_sums.py). `layers_alone`: only those of the layers.
    - `matrix_rule` is what is done with the elements of matrices before, and `matrix_moments` are their states.
    """

    name: str
    place: int
    title: str
    rule: str
    moments: Callable[[Any], tuple[str, ...]]
    in_blocks: bool = False
    decays: tuple[str, ...] = ()
    reads: frozenset[str] = frozenset()
    costs_as_adamw: bool = False
    matrix_update: MatrixUpdate = "none"
    layers_alone: bool = False
    matrix_rule: str = ""
    matrix_moments: tuple[str, ...] = ()


OPTIMIZERS: Registry[OptimizerFacts] = Registry("an optimizer", "shardwright.config.optimizers", OptimizerFacts)
OptimizerName = Annotated[str, NameOf(OPTIMIZERS)]
