"""A policy of recomputation that is described in this file alone, as one that somebody adds: the first half of the
model's layers keep their inputs only, and the others recompute attention."""

from typing import Any

from shardwright.config.recompute_facts import RECOMPUTES, RecomputeFacts
from shardwright.config.recompute_policy import WHOLE_LAYER, Policy
from support.ranks import _on_mesh

NAME = "first-half"


def _layers(plan: Any, num_layers: int) -> list[Policy]:
    half = num_layers // 2
    return [WHOLE_LAYER] * half + [frozenset({"attention"})] * (num_layers - half)


FACTS = RecomputeFacts(
    name=NAME,
    place=35,
    does="the first half of the layers, and the attention of the others",
    layers=_layers,
    searched=({},),
    search_place=25,
    is_simple=True,
)


def on_mesh_with_it(rank: int, store: str, *args: Any) -> Any:
    """Do on a rank as `run_on_mesh` does, where there is such a policy."""
    with RECOMPUTES.also(FACTS):
        return _on_mesh(rank, store, *args)
