"""What expert parallel sends, rank by rank and by kind of link: as many bytes as the runtime counts.

A row travels for each choice of a token, there and back, forward and backward (parallel/expert/dispatch.py). The bytes
are linear in the choices. So with counts of a run they are exact, and with expected counts they are the expectation.

Direct, each choice that lives on another node crosses the slow link. Node-aware, each node that has a choice of the
token is sent one copy. With k distinct uniform choices of E experts on n nodes, a token needs a node with probability
1 - C(E - E/n, k) / C(E, k), so the slow link carries n/k times that of what it carries directly. A gate that keeps M
nodes for a token and then chooses k of their experts makes that the same with M for n.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

COUNT_BYTES = 8  # rows for one expert, told before the rows are sent
CHOICE_BYTES = 4  # an expert's number, beside a token that travels node-aware
WEIGHT_BYTES = 4  # its weight, or the gradient of that

_QUADRATURE_STEP, _QUADRATURE_END = 1 / 8, 4.0


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


def sent_direct(counts: Counts, ranks: ExpertRanks, row_bytes: int, is_backward: bool = False) -> list[Sent]:
    """What each rank sends in one forward or backward pass of one layer, dispatch and combine together.

    `counts[r][e]` are the tokens of rank r that chose expert e, `row_bytes` are those of a token's hidden state.
    """
    rows = [[0.0] * ranks.num_ranks for _ in range(ranks.num_ranks)]  # [from][to]
    for source, of_rank in enumerate(counts):
        for expert, num_rows in enumerate(of_rank):
            rows[source][ranks.rank_of(expert)] += num_rows
    told = 0 if is_backward else COUNT_BYTES * ranks.num_experts // ranks.num_ranks
    return _sent(rows, ranks, there_bytes=row_bytes, back_bytes=row_bytes, told_bytes=told)


def sent_node_aware(
    counts: Counts, copies: Counts, ranks: ExpertRanks, row_bytes: int, top_k: int, is_backward: bool = False
) -> list[Sent]:
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
    sent = _sent(inside, ranks, row_bytes, row_bytes, told_bytes=0)
    sent = [
        a + b for a, b in zip(sent, _sent(between, ranks, row_bytes + beside, row_bytes + returned, 0), strict=True)
    ]
    if is_backward:
        return sent
    # One count for each node, and inside the node one for each of its experts.
    told = Sent(
        COUNT_BYTES * ranks.num_experts // ranks.num_nodes // per_node * (per_node - 1),
        COUNT_BYTES * (ranks.num_nodes - 1),
    )
    return [entry + told for entry in sent]


def _sent(rows: Counts, ranks: ExpertRanks, there_bytes: int, back_bytes: int, told_bytes: int) -> list[Sent]:
    """What each rank sends if rows[i][j] go from i to j and come back, and everybody tells everybody `told_bytes`."""
    found = []
    for here in range(ranks.num_ranks):
        by_link = [0.0, 0.0]
        for other in range(ranks.num_ranks):
            if other != here:
                is_far = ranks.node_of(here) != ranks.node_of(other)
                by_link[is_far] += rows[here][other] * there_bytes + rows[other][here] * back_bytes + told_bytes
        found.append(Sent(*by_link))
    return found


def expected_counts(
    ranks: ExpertRanks, num_tokens: int, top_k: int, shares: Sequence[float] | None = None
) -> tuple[list[list[float]], list[list[float]]]:
    """Counts and copies to expect, of ranks with as many tokens each, whose choices follow the same `shares`.

    Without shares every expert is as likely as any other.
    """
    shares = shares or [1.0] * ranks.num_experts
    chances = {share: chance_of_any(shares, [shares.index(share)], top_k) for share in set(shares)}
    of_rank = [num_tokens * chances[share] for share in shares]
    nodes = [num_tokens * chance_of_any(shares, ranks.experts_of(n), top_k) for n in range(ranks.num_nodes)]
    return [of_rank] * ranks.num_ranks, [nodes] * ranks.num_ranks


def expected_nodes(ranks: ExpertRanks, top_k: int, most_nodes: int = 0) -> float:
    """How many nodes a token needs whose k choices are uniform, of all nodes or, where a gate limits them, of the
    experts of `most_nodes` nodes that it has kept."""
    kept = min(most_nodes or ranks.num_nodes, ranks.num_nodes)
    per_node = ranks.num_experts // ranks.num_nodes
    return kept * (1.0 - math.comb((kept - 1) * per_node, top_k) / math.comb(kept * per_node, top_k))


def slow_link_ratio(ranks: ExpertRanks, top_k: int, most_nodes: int = 0) -> float:
    """Rows over the slow link, node-aware over direct, where choices are uniform: nodes that a token needs over k."""
    return expected_nodes(ranks, top_k, most_nodes) / top_k


def chance_of_any(shares: Sequence[float], group: Sequence[int], top_k: int) -> float:
    """The chance that a token chooses at least one expert of `group`.

    It makes k distinct choices, one after the other, each with chances in proportion to the `shares` of those left
    (Plackett 1975, Appl. Statist. 24): as if expert e rang after an exponential time of rate share e, and the first k
    were chosen. None of the group is among them if k others ring before the first of the group does.
    """
    others = [share for expert, share in enumerate(shares) if expert not in set(group)]
    if len(set(shares)) == 1:
        return 1.0 - math.comb(len(others), top_k) / math.comb(len(shares), top_k)
    rate = sum(shares[expert] for expert in group)
    none = 0.0
    for exceeded, weight in _quadrature():
        fewer = [1.0] + [0.0] * (top_k - 1)  # chances that so many of the others, less than k, have rung by then
        for share in others:
            rung = -math.expm1(-share * exceeded / rate)
            for number in range(top_k - 1, 0, -1):
                fewer[number] += rung * (fewer[number - 1] - fewer[number])
            fewer[0] *= 1.0 - rung
        none += weight * (1.0 - sum(fewer))
    return 1.0 - none


def _quadrature() -> list[tuple[float, float]]:
    """Times, in units of their mean, at which the first of the group may ring, and how much each of them counts.

    The chance u that such a time is exceeded is uniform, and the mean over u is an integral from 0 to 1 of fractional
    powers: the double-exponential rule (Takahasi and Mori 1974) is made for such ends.
    """
    num_steps = round(_QUADRATURE_END / _QUADRATURE_STEP)
    found = []
    for step in range(-num_steps, num_steps + 1):
        s = step * _QUADRATURE_STEP
        odds = math.exp(-math.pi * math.sinh(s))  # (1 - u) / u
        found.append((math.log1p(odds), _QUADRATURE_STEP * math.pi * math.cosh(s) * odds / (1.0 + odds) ** 2))
    return found
