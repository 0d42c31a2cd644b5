"""A method of context parallelism that is described in this file alone, as one that somebody adds: all keys and values
come at once, as with "all-gather", and each is asked for in a function of its own."""

from typing import Any

from torch import Tensor

from shardwright.config.context_facts import CONTEXT_METHODS, ContextFacts
from shardwright.parallel.context.ring_attention import gathered_attention
from support.ranks import _on_mesh

NAME = "all-at-once"


def all_at_once(q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, *rest: Any) -> Tensor:
    """Attention of this rank's queries to the keys of all."""
    out_SBNE: Tensor = gathered_attention(q_SBND, k_SBGD, v_SBGE, *rest)
    return out_SBNE


FACTS = ContextFacts(name=NAME, place=25, rule="support.added_context_method:all_at_once", exchange="all_gather")


def on_mesh_with_it(rank: int, store: str, *args: Any) -> Any:
    """Do on a rank as `run_on_mesh` does, where there is such a method."""
    with CONTEXT_METHODS.also(FACTS):
        return _on_mesh(rank, store, *args)
