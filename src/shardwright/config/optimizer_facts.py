"""The registry of optimizers by name. The facts of each are a file in config/optimizers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from shardwright.config.registry import NameOf, Registry

MatrixUpdate = Literal["none", "orthogonal", "factored"]


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """The facts of an optimizer that are known without computing anything.

    - `place` orders lists of optimizers; `title` is its name in texts.
    - `rule` is the update of elements, as "module:function" (parallel/optimizers/elementwise.py); `in_blocks`: it needs
      temporary memory, so it updates some elements at a time.
    - `moments(spec)` are torch's names of the states that it keeps for each element, given an OptimizerSpec; `decays`
      are the fields with their decay factors.
    - `reads` are fields of [optimizer] that not every optimizer reads.
    - `takes_narrow`: the rule is a fused kernel that takes elements in 16 bits, computes in float32, and
      rounds only what it writes.
    - `costs_as_adamw`: its update of an element reads and writes the same bytes as AdamW's.

    For optimizers that work on complete matrices:

    - `matrix_update` is the kind of the update: "orthogonal", computed by each matrix's owner
      (sharding/matrix_exchange.py), or "factored", with sums of squares by row and column (sharding/factored_sums.py).
      `layers_alone`: only for matrices of the layers.
    - `matrix_rule` is applied to the elements of matrices before that, and `matrix_moments` are their states.
    """

    name: str
    place: int
    title: str
    rule: str
    moments: Callable[[Any], tuple[str, ...]]
    in_blocks: bool = False
    decays: tuple[str, ...] = ()
    reads: frozenset[str] = frozenset()
    takes_narrow: bool = False
    costs_as_adamw: bool = False
    matrix_update: MatrixUpdate = "none"
    layers_alone: bool = False
    matrix_rule: str = ""
    matrix_moments: tuple[str, ...] = ()


OPTIMIZERS: Registry[OptimizerFacts] = Registry("an optimizer", "shardwright.config.optimizers", OptimizerFacts)
OptimizerName = Annotated[str, NameOf(OPTIMIZERS)]
