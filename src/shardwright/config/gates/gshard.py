"""The gate of GShard: a token gets the best expert and, at random, the second best."""

from shardwright.config.gate_facts import GateFacts

FACTS = GateFacts(
    name="gshard",
    place=30,
    rule="shardwright.model.gates.gshard:GShard",
    only_top_k=True,
    draws=True,
    adds_to_one="always",
)
