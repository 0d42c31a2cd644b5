"""The number of rows that travel to experts if the gates' choices are unknown: in a dry run, and before any run.

The routing is assumed even: every rank of an axis receives equally many rows, no chosen expert is full, and the choices
of a token lie on as many nodes as they can.
"""

from shardwright.config.plan import split_evenly


def even_shares(num_rows: int, num_ranks: int) -> list[int]:
    """Rows for each of `num_ranks` ranks; the first ranks get the remainder."""
    return [stop - start for start, stop in (split_evenly(num_rows, num_ranks, i) for i in range(num_ranks))]


def rows_to_nodes(num_tokens: int, num_choices: int, num_nodes: int) -> int:
    """Rows that a rank sends to nodes, its own included: each token goes to a node once."""
    return num_tokens * min(num_choices, num_nodes)


def rows_inside(num_copies: int, num_choices: int, num_nodes: int) -> int:
    """Choices that `num_copies` copies of tokens, which came to a node, have on this node; the others are elsewhere."""
    return num_copies * num_choices // min(num_choices, num_nodes)
