"""The gate of Switch: a token gets only the most probable expert."""

from shardwright.config.gate_facts import GateFacts

FACTS = GateFacts(
    name="switch",
    place=20,
    rule="shardwright.model.gates.switch:Switch",
    top_k=1,
    only_top_k=True,
)
