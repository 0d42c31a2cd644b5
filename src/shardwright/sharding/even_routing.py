"""How many rows travel to experts where nobody knows what gates choose: in a dry run, and before any run.

All is even: every rank of an axis is sent as many rows, no choice finds its expert full, and the choices of a token lie
on as many nodes as they can.
"""

from shardwright.config.plan import split_evenly


def even_shares(num_rows: int, num_ranks: int) -> list[int]:
    """Rows for each of so many ranks; the first ones get those that are left over."""
    return [stop - start for start, stop in (split_evenly(num_rows, num_ranks, i) for i in range(num_ranks))]


def rows_to_nodes(num_tokens: int, num_choices: int, num_nodes: int) -> int:
    """Rows that cross to other ranks' nodes, this rank's own among them: each token goes to a node once."""
    return num_tokens * min(num_choices, num_nodes)


def rows_inside(num_copies: int, num_choices: int, num_nodes: int) -> int:
    """Choices that so many copies of tokens, which came to a node, have there: the others' are on other nodes."""
    return num_copies * num_choices // min(num_choices, num_nodes)
