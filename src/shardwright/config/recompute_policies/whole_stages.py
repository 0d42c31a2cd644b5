"""Recomputation of stages from their inputs. Chen et al. 2016 (arXiv 1604.06174)."""

from shardwright.config.recompute_facts import RecomputeFacts
from shardwright.config.recompute_policy import KEEP_ALL

FACTS = RecomputeFacts(
    name="stage",
    place=20,
    does="all of a stage, from its input, before its backward",
    by_stage=True,
    layers=lambda plan, num_layers: [KEEP_ALL] * num_layers,
    searched=({},),
    search_place=40,
)
