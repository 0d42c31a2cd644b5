"""An optimizer that is described and computed in this file alone, as one that somebody adds: signum.

Steps of one size, in the direction of the sign of the momentum. Bernstein et al. 2018 (arXiv 1802.04434, algorithm 2).
"""

from typing import Any

from shardwright.config.optimizer import OptimizerSpec
from shardwright.config.optimizer_facts import OPTIMIZERS, OptimizerFacts
from shardwright.parallel.optimizers.elementwise import Elements
from support.ranks import _on_mesh

NAME = "signum"


def signum(spec: OptimizerSpec, of: Elements) -> None:
    """Update elements of a weight, and their momentum."""
    (moment,) = of.moments
    moment.mul_(spec.momentum).add_(of.gradient, alpha=1 - spec.momentum)
    of.weight.mul_(1 - of.rate * of.weight_decay).add_(moment.sign(), alpha=-of.rate)


FACTS = OptimizerFacts(
    name=NAME,
    place=45,
    title="Signum",
    rule="support.added_optimizer:signum",
    in_blocks=True,
    moments=lambda spec: ("momentum_buffer",),
    decays=("momentum",),
    reads=frozenset({"momentum"}),
)


def on_mesh_with_it(rank: int, store: str, *args: Any) -> Any:
    """Do on a rank as `run_on_mesh` does, where there is such an optimizer."""
    with OPTIMIZERS.also(FACTS):
        return _on_mesh(rank, store, *args)
