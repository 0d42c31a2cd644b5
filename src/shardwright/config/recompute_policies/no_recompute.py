"""No recomputation: each layer keeps all that its backward needs."""

from shardwright.config.recompute_facts import RecomputeFacts
from shardwright.config.recompute_policy import KEEP_ALL

FACTS = RecomputeFacts(
    name="none",
    place=10,
    layers=lambda plan, num_layers: [KEEP_ALL] * num_layers,
    searched=({},),
    search_place=10,
    is_simple=True,
    is_guessed=True,
)
