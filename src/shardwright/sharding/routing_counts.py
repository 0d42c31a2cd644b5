"""Numbers of routing that both wings know: rows that travel to experts, and counts that all ranks sum.

In a dry run, and before any run, the gates' choices are unknown. The routing is then assumed even: every rank of an
axis receives equally many rows, no chosen expert is full, and the choices of a token lie on as many nodes as they can.
"""

from shardwright.config.moe import MoeSpec
from shardwright.config.plan import split_evenly

# Rows that travel.


def even_shares(num_rows: int, num_ranks: int) -> list[int]:
    """Rows for each of `num_ranks` ranks; the first ranks get the remainder."""
    return [stop - start for start, stop in (split_evenly(num_rows, num_ranks, i) for i in range(num_ranks))]


def rows_to_nodes(num_tokens: int, num_choices: int, num_nodes: int) -> int:
    """Rows that a rank sends to nodes, its own included: each token goes to a node once."""
    return num_tokens * min(num_choices, num_nodes)


def rows_inside(num_copies: int, num_choices: int, num_nodes: int) -> int:
    """Choices that `num_copies` copies of tokens, which came to a node, have on this node; the others are elsewhere."""
    return num_copies * num_choices // min(num_choices, num_nodes)


# Counts of routers, summed at the end of a step.

COUNTED = ("tokens", "dropped", "unserved", "entropy", "balance_loss", "z_loss")
MOST_PICTURED = 32  # most experts whose pairs are counted for display: their number squared is summed over ranks


def counts_pairs(spec: MoeSpec) -> bool:
    """True if a router counts the pairs of experts chosen together: its gate needs them, or they are few enough."""
    return spec.gate_facts.counts_pairs or spec.experts <= MOST_PICTURED


def size_of_totals(spec: MoeSpec) -> int:
    """Numbers of a layer: one for each of `COUNTED`, two for each expert, and one for each pair of experts if
    counted."""
    return len(COUNTED) + 2 * spec.experts + (spec.experts**2 if counts_pairs(spec) else 0)
