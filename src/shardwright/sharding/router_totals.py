"""The counts of routers that all ranks sum at the end of a step: their names, and their number in a layer."""

from shardwright.config.moe import MoeSpec

COUNTED = ("tokens", "dropped", "unserved", "entropy", "balance_loss", "z_loss")
MOST_PICTURED = 32  # most experts whose pairs are counted for display: their number squared is summed over ranks


def counts_pairs(spec: MoeSpec) -> bool:
    """True if a router counts the pairs of experts chosen together: its gate needs them, or they are few enough."""
    return spec.gate_facts.counts_pairs or spec.experts <= MOST_PICTURED


def size_of_totals(spec: MoeSpec) -> int:
    """Numbers of a layer: one for each of `COUNTED`, two for each expert, and one for each pair of experts if
    counted."""
    return len(COUNTED) + 2 * spec.experts + (spec.experts**2 if counts_pairs(spec) else 0)
