"""Bytes that expert parallel sends for given choices, by rank and kind of link: written once more, for tests.

A row travels for each choice of a token, there and back, forward and backward (parallel/expert/dispatch.py); there with
the choice's weight, and back in the backward with its gradient. The bytes are linear in the choices: with counts of a
run they are exact, and with mean counts they are the mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass

COUNT_BYTES = 8  # rows for one expert, told before the rows are sent
CHOICE_BYTES = 4  # an expert's number, beside a token that travels node-aware
WEIGHT_BYTES = 4  # its weight, or the gradient of that


@dataclass(frozen=True)
class Sent:
    """Bytes that one rank sends to others in its own node and to other nodes."""

    inside_bytes: float
    between_bytes: float

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.inside_bytes + other.inside_bytes, self.between_bytes + other.between_bytes)


@dataclass(frozen=True)
class ExpertRanks:
    """An ep axis: its experts, a block on each of its ranks, and how many of its ranks share a node."""

    num_experts: int
    num_ranks: int
    ranks_per_node: int

    @property
    def num_nodes(self) -> int:
        """Nodes that the axis spans."""
        return self.num_ranks // self.ranks_per_node

    def rank_of(self, expert: int) -> int:
        """The index on the axis that an expert lives on."""
        return expert // (self.num_experts // self.num_ranks)

    def node_of(self, rank: int) -> int:
        """The node of an index on the axis."""
        return rank // self.ranks_per_node

    def experts_of(self, node: int) -> range:
        """The experts of a node."""
        per_node = self.num_experts // self.num_nodes
        return range(node * per_node, (node + 1) * per_node)


Counts = Sequence[Sequence[float]]


def sent_direct(
    counts: Counts, ranks: ExpertRanks, row_bytes: int, is_backward: bool = False, there_bytes: int = 0
) -> list[Sent]:
    """The bytes that each rank sends in one forward or backward pass of one layer, dispatch and combine together.

    `counts[r][e]` are the tokens of rank r that chose expert e, `row_bytes` are those of a token's hidden state, and
    `there_bytes` on its way to an expert, if that is another number.
    """
    rows = [[0.0] * ranks.num_ranks for _ in range(ranks.num_ranks)]  # [from][to]
    for source, of_rank in enumerate(counts):
        for expert, num_rows in enumerate(of_rank):
            rows[source][ranks.rank_of(expert)] += num_rows
    answer = 0 if is_backward else COUNT_BYTES * ranks.num_experts // ranks.num_ranks
    there, back = _both_ways(there_bytes or row_bytes, row_bytes, is_backward)
    return _sent(rows, ranks, there_bytes=there, back_bytes=back, told_bytes=answer)


def _both_ways(there_bytes: int, back_bytes: int, is_backward: bool) -> tuple[int, int]:
    return there_bytes + WEIGHT_BYTES * (not is_backward), back_bytes + WEIGHT_BYTES * is_backward


def sent_node_aware(
    counts: Counts, copies: Counts, ranks: ExpertRanks, row_bytes: int, top_k: int, is_backward: bool = False,
    there_bytes: int = 0,
) -> list[Sent]:  # fmt: skip
    """The same where tokens travel node-aware. `copies[r][n]` are the tokens of rank r that chose on node n.

    Between nodes a token's choices travel along and their weights; in the backward the weights' gradients return.
    """
    size, per_node = ranks.num_ranks, ranks.ranks_per_node
    between = [[0.0] * size for _ in range(size)]
    inside = [[0.0] * size for _ in range(size)]
    for source, of_rank in enumerate(copies):
        for node, num_tokens in enumerate(of_rank):
            between[source][node * per_node + source % per_node] += num_tokens
    for source, of_rank in enumerate(counts):
        for expert, num_rows in enumerate(of_rank):
            home = ranks.rank_of(expert)
            inside[ranks.node_of(home) * per_node + source % per_node][home] += num_rows
    beside = 0 if is_backward else top_k * (CHOICE_BYTES + WEIGHT_BYTES)
    returned = top_k * WEIGHT_BYTES if is_backward else 0
    there_bytes = there_bytes or row_bytes
    sent = _sent(inside, ranks, *_both_ways(there_bytes, row_bytes, is_backward), told_bytes=0)
    sent = [
        a + b for a, b in zip(sent, _sent(between, ranks, there_bytes + beside, row_bytes + returned, 0), strict=True)
    ]
    if is_backward:
        return sent
    # One count for each node, and inside the node one for each of its experts.
    answer = Sent(
        COUNT_BYTES * ranks.num_experts // ranks.num_nodes // per_node * (per_node - 1),
        COUNT_BYTES * (ranks.num_nodes - 1),
    )
    return [entry + answer for entry in sent]


def _sent(rows: Counts, ranks: ExpertRanks, there_bytes: int, back_bytes: int, told_bytes: int) -> list[Sent]:
    """The bytes that each rank sends if rows[i][j] go from i to j and come back, and all tell all `told_bytes`."""
    results = []
    for here in range(ranks.num_ranks):
        by_link = [0.0, 0.0]
        for other in range(ranks.num_ranks):
            if other != here:
                is_far = ranks.node_of(here) != ranks.node_of(other)
                by_link[is_far] += rows[here][other] * there_bytes + rows[other][here] * back_bytes + told_bytes
        results.append(Sent(*by_link))
    return results
