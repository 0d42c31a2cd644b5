"""The gate of ERNIE 4.5: scores are a softmax, and a bias keeps experts evenly used."""

from shardwright.config.gate_facts import GateFacts

FACTS = GateFacts(
    name="biased-softmax",
    place=45,
    rule="shardwright.model.gates.biased_softmax:BiasedSoftmax",
    reads=frozenset({"normalise", "num_groups", "bias_update"}),
    adds_to_one="as asked",
)
