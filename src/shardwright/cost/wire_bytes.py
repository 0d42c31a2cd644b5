"""Bytes that a rank sends in a collective, within its domain of fast links and out of it.

The algorithms are those of collective_time.py: rings, and all-to-alls that send directly.
"""

from dataclasses import dataclass

from shardwright.cost.topology import Group


@dataclass(frozen=True)
class SentBytes:
    """The bytes that one rank of a group sends, on average over the ranks of its domain."""

    inside: float = 0.0
    between: float = 0.0

    @property
    def total(self) -> float:
        """Bytes over all links."""
        return self.inside + self.between

    def times(self, count: float) -> "SentBytes":
        """The bytes of `count` collectives."""
        return SentBytes(count * self.inside, count * self.between)

    def __add__(self, other: "SentBytes") -> "SentBytes":
        return SentBytes(self.inside + other.inside, self.between + other.between)


# Times that a tensor goes along a ring, by the kind of a collective. Keys of the ranks of a context go along one once.
RING_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "ring": 1}


def ring_sent(group: Group, full_bytes: float, rounds: int = 1) -> SentBytes:
    """Bytes sent along a ring: (n - 1) / n of the tensor in each round (Thakur et al. 2005, section 3); an all-reduce
    has two rounds. One of its n hops leaves each domain, if there are several."""
    n, domains = float(group.size), float(group.domains)
    sent_bytes = rounds * full_bytes * (n - 1) / n
    between = sent_bytes * domains / n if domains > 1 else 0.0
    return SentBytes(sent_bytes - between, between)


def all_to_all_sent(group: Group, full_bytes: float, copies: float = 1.0) -> SentBytes:
    """Bytes sent in an all-to-all: 1 / n of the tensor to each other rank. Only a share `copies` of the data for other
    domains is sent; if it is below 1, the data that arrives in a domain is spread inside."""
    n, inside = float(group.size), float(group.inside)
    near = full_bytes * (inside - 1) / (inside if copies < 1 else n)
    return SentBytes(near, copies * full_bytes * (n - inside) / n)
