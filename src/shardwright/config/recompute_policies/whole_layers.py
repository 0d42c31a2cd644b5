"""Recomputation of layers from their inputs, of all or of one in several. Chen et al. 2016 (arXiv 1604.06174)."""

from shardwright.config.recompute_facts import RecomputeFacts, every_so_many
from shardwright.config.recompute_policy import WHOLE_LAYER

FACTS = RecomputeFacts(
    name="full",
    place=30,
    does="each layer, from its input, when its turn comes",
    layers=lambda plan, num_layers: every_so_many(plan, num_layers, WHOLE_LAYER),
    reads=frozenset({"recompute_every", "offload_activations"}),
    searched=({"recompute_every": 4}, {"recompute_every": 2}, {}, {"offload_activations": True}),
    search_place=30,
    is_simple=True,
    is_guessed=True,
)
