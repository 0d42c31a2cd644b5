"""The gate of a model, by its name."""

from pkgutil import resolve_name

from shardwright.config.moe import MoeSpec
from shardwright.model.gates.choice import Gate


def make_gate(spec: MoeSpec) -> Gate:
    """The gate that `spec.gate` names. The gate's facts name the class."""
    rule = resolve_name(spec.gate_facts.rule)
    assert issubclass(rule, Gate), spec.gate_facts
    gate: Gate = rule(spec)
    return gate
