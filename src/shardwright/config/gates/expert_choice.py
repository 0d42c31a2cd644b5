"""The expert-choice gate: experts choose tokens, the same number each."""

from shardwright.config.gate_facts import GateFacts

FACTS = GateFacts(
    name="expert-choice",
    place=50,
    rule="shardwright.model.gates.expert_choice:ExpertChoice",
    sees_all=True,
)
