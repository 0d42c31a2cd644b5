"""The correlation gate: later choices of a token are among the experts often chosen together with its first."""

from shardwright.config.gate_facts import GateFacts

FACTS = GateFacts(
    name="correlation",
    place=60,
    rule="shardwright.model.gates.correlation:Correlation",
    reads=frozenset({"normalise", "partners", "co_activation_decay"}),
    least_top_k=2,
    instead="softmax",
    adds_to_one="as asked",
    counts_pairs=True,
)
