"""The plain gate: a token gets the most probable experts."""

from shardwright.config.gate_facts import GateFacts

FACTS = GateFacts(
    name="softmax",
    place=10,
    rule="shardwright.model.gates.softmax:Softmax",
    reads=frozenset({"normalise", "softmax_over", "num_groups"}),
    adds_to_one="as asked",
)
