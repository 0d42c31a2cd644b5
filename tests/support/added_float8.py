"""A recipe of fp8 that is described in this file alone, as one that somebody adds: a scale for each 128 numbers in a
row, of weights too, so that a weight has two casts."""

from typing import Any

from shardwright.config.float8_facts import FLOAT8_RECIPES, Float8Facts
from support.ranks import _on_mesh

NAME = "tilewise"

FACTS = Float8Facts(name=NAME, place=35, activation="tile", weight="tile", gradient="e4m3")


def on_mesh_with_it(rank: int, store: str, *args: Any) -> Any:
    """Do on a rank as `run_on_mesh` does, where there is such a recipe."""
    with FLOAT8_RECIPES.also(FACTS):
        return _on_mesh(rank, store, *args)
