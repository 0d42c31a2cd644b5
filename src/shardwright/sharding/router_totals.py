"""The counts of routers that all ranks sum at the end of a step: their names, and how many there are of a layer."""

from shardwright.config.moe import MoeSpec

COUNTED = ("tokens", "dropped", "unserved", "entropy", "balance_loss", "z_loss")
MOST_PICTURED = 32  # experts up to which it is counted who was chosen together: the square of it is summed over ranks


def counts_pairs(spec: MoeSpec) -> bool:
    """True if a router counts which experts were chosen together: where its gate goes by it, or few enough to show."""
    return spec.gate_facts.counts_pairs or spec.experts <= MOST_PICTURED


def size_of_totals(spec: MoeSpec) -> int:
    """Numbers of a layer: those of `COUNTED`, two for each expert, and one for each two that go together."""
    return len(COUNTED) + 2 * spec.experts + (spec.experts**2 if counts_pairs(spec) else 0)
