"""The gate of DeepSeek-V3: scores are sigmoids, and a bias keeps experts evenly used."""

from shardwright.config.gate_facts import GateFacts

FACTS = GateFacts(
    name="sigmoid",
    place=40,
    rule="shardwright.model.gates.sigmoid:Sigmoid",
    reads=frozenset({"normalise", "num_groups", "bias_update"}),
    adds_to_one="as asked",
    scores_add_up=False,
)
