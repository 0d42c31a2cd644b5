"""Collectives step by step: which rank sends which piece to which rank, and who holds what before and after.

A tensor is cut into as many pieces as there are ranks. A rank holds a piece as a sum of the contributions of some
ranks: its own alone at first, all of them after a reduction. In an all-to-all, contribution r of piece i is what rank r
has for rank i. Rank 0 is the root of collectives that have one.

Algorithms: Thakur et al. 2005, Optimization of collective communication operations in MPICH; van de Geijn's broadcast
there (section 5).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, get_args

CollectiveKind = Literal[
    "broadcast", "scatter", "gather", "reduce", "all-gather", "reduce-scatter", "all-reduce", "all-to-all"
]
KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
SUMS = ("reduce", "reduce-scatter", "all-reduce")  # kinds whose result is a sum
Holding = dict[int, dict[int, frozenset[int]]]  # by rank, by piece: the ranks whose contributions it holds


@dataclass(frozen=True)
class Transfer:
    """One message of a step: `sender` sends some pieces to `receiver`, which adds them to its own or takes them."""

    sender: int
    receiver: int
    pieces: tuple[int, ...]
    adds: bool = False


Step = tuple[Transfer, ...]


def held_before(kind: CollectiveKind, num_ranks: int) -> Holding:
    """The pieces that each rank holds at first."""
    ranks = range(num_ranks)
    if kind in ("broadcast", "scatter"):
        return {rank: {piece: frozenset({0}) for piece in ranks} if rank == 0 else {} for rank in ranks}
    if kind in ("gather", "all-gather"):
        return {rank: {rank: frozenset({rank})} for rank in ranks}
    return {rank: {piece: frozenset({rank}) for piece in ranks} for rank in ranks}


def held_after(kind: CollectiveKind, num_ranks: int) -> Holding:
    """The pieces that each rank holds at the end, without those that only helped on the way."""
    ranks, everyone = range(num_ranks), frozenset(range(num_ranks))
    contributions = dict.fromkeys(ranks, everyone)
    if kind in ("broadcast", "scatter"):
        contributions = dict.fromkeys(ranks, frozenset({0}))
    elif kind in ("gather", "all-gather"):
        contributions = {piece: frozenset({piece}) for piece in ranks}
    if kind in ("scatter", "reduce-scatter", "all-to-all"):
        return {rank: {rank: contributions[rank]} for rank in ranks}
    holders = (0,) if kind in ("gather", "reduce") else ranks
    return {rank: dict(contributions) if rank in holders else {} for rank in ranks}


def play(kind: CollectiveKind, num_ranks: int, steps: Sequence[Step]) -> Holding:
    """The pieces that each rank holds after some steps. ValueError if a rank sends what it lacks, or adds twice.

    In an all-to-all a transfer of a piece carries the sender's own contribution to it.
    """
    held = held_before(kind, num_ranks)
    for number, step in enumerate(steps, 1):
        sent = [(move, piece, held[move.sender].get(piece)) for move in step for piece in move.pieces]
        for move, piece, held_by_sender in sent:
            own = held[move.receiver].get(piece, frozenset())
            contributions = frozenset({move.sender}) if kind == "all-to-all" else held_by_sender
            if not contributions or (move.adds and own & contributions):
                raise ValueError(f"step {number}: rank {move.sender} can't send piece {piece} to {move.receiver}")
            held[move.receiver][piece] = own | contributions if move.adds else contributions
    return held


def _around(ring: Sequence[int], shares: Sequence[tuple[int, ...]], adds: bool) -> Iterator[Step]:
    """Each rank of a ring sends one of the shares on, the one that it has just received. With `adds` rank i of the ring
    ends with the sum of share i (reduce-scatter), else it begins with share i and ends with all (all-gather)."""
    size = len(ring)
    for step in range(size - 1):
        yield tuple(
            Transfer(ring[place], ring[(place + 1) % size], shares[(place - step - adds) % size], adds)
            for place in range(size)
        )


def _ring_reduce_scatter(n: int) -> Iterator[Step]:
    return _around(range(n), [(piece,) for piece in range(n)], adds=True)


def _ring_all_gather(n: int) -> Iterator[Step]:
    return _around(range(n), [(piece,) for piece in range(n)], adds=False)


def _hierarchical(n: int, inside: int) -> Iterator[Step]:
    """A reduce-scatter inside each node, an all-reduce among the ranks of the same place in their nodes, and an
    all-gather inside. Pieces are dealt to places like cards."""
    nodes = [range(first, first + inside) for first in range(0, n, inside)]
    by_place = [tuple(range(place, n, inside)) for place in range(inside)]
    for adds in (True, False):
        across = [_around(ranks, [(piece,) for piece in ranks], adds) for ranks in by_place]
        within = [_around(ranks, by_place, adds) for ranks in nodes]
        for rings in (within, across) if adds else (across, within):
            for step in zip(*rings, strict=True):
                yield tuple(move for part in step for move in part)


def _ring_broadcast(n: int) -> Iterator[Step]:
    """Pieces follow each other along the ring, as in a pipeline."""
    for step in range(2 * n - 2):
        yield tuple(Transfer(rank, rank + 1, (step - rank,)) for rank in range(n - 1) if 0 <= step - rank < n)


def _ring_reduce(n: int) -> Iterator[Step]:
    for step in range(2 * n - 2):
        yield tuple(
            Transfer(rank, rank - 1, (step - (n - 1 - rank),), adds=True)
            for rank in range(1, n)
            if 0 <= step - (n - 1 - rank) < n
        )


def _tree(n: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """The levels of a binomial tree of rank 0: (distance, pairs of a parent and its child), the farthest first."""
    distance = 1 << max(0, (n - 1).bit_length() - 1)
    while distance and n > 1:
        yield distance, [(rank, rank + distance) for rank in range(0, n, 2 * distance) if rank + distance < n]
        distance //= 2


def _tree_broadcast(n: int) -> Iterator[Step]:
    for _, pairs in _tree(n):
        yield tuple(Transfer(parent, child, tuple(range(n))) for parent, child in pairs)


def _tree_reduce(n: int) -> Iterator[Step]:
    for _, pairs in reversed(list(_tree(n))):
        yield tuple(Transfer(child, parent, tuple(range(n)), adds=True) for parent, child in pairs)


def _tree_scatter(n: int) -> Iterator[Step]:
    for distance, pairs in _tree(n):
        yield tuple(Transfer(a, child, tuple(range(child, min(n, child + distance)))) for a, child in pairs)


def _tree_gather(n: int) -> Iterator[Step]:
    for distance, pairs in reversed(list(_tree(n))):
        yield tuple(Transfer(child, a, tuple(range(child, min(n, child + distance)))) for a, child in pairs)


def _direct_scatter(n: int) -> Iterator[Step]:
    yield tuple(Transfer(0, rank, (rank,)) for rank in range(1, n))


def _direct_gather(n: int) -> Iterator[Step]:
    yield tuple(Transfer(rank, 0, (rank,)) for rank in range(1, n))


def _direct_exchange(n: int) -> Iterator[Step]:
    yield tuple(Transfer(a, b, (b,), adds=True) for a in range(n) for b in range(n) if a != b)


def _direct_all_gather(n: int) -> Iterator[Step]:
    yield tuple(Transfer(a, b, (a,)) for a in range(n) for b in range(n) if a != b)


def _halving(n: int) -> Iterator[Step]:
    """Pairs at doubling distance; each keeps the half of its pieces whose numbers agree with its own."""
    distance = 1
    while distance < n:
        mask = 2 * distance - 1
        yield tuple(
            Transfer(a, a ^ distance, tuple(piece for piece in range(n) if (piece ^ a ^ distance) & mask == 0), True)
            for a in range(n)
        )
        distance *= 2


def _doubling(n: int) -> Iterator[Step]:
    distance = n // 2
    while distance:
        mask = 2 * distance - 1
        yield tuple(
            Transfer(a, a ^ distance, tuple(piece for piece in range(n) if (piece ^ a) & mask == 0)) for a in range(n)
        )
        distance //= 2


Steps = Callable[[int], Iterator[Step]]


def _in_turn(*parts: Steps) -> Steps:
    """The steps of several algorithms, one after the other."""
    return lambda n: chain.from_iterable(part(n) for part in parts)


_HALVING_DOUBLING = _in_turn(_halving, _doubling)
_OF_POWERS = (_halving, _doubling, _HALVING_DOUBLING)  # algorithms for a power of two of ranks

_ALGORITHMS: Mapping[CollectiveKind, Mapping[str, Steps]] = {
    "broadcast": {
        "ring": _ring_broadcast,
        "tree": _tree_broadcast,
        "scatter-gather": _in_turn(_tree_scatter, _ring_all_gather),
    },
    "scatter": {"direct": _direct_scatter, "tree": _tree_scatter},
    "gather": {"direct": _direct_gather, "tree": _tree_gather},
    "reduce": {"ring": _ring_reduce, "tree": _tree_reduce},
    "all-gather": {"ring": _ring_all_gather, "direct": _direct_all_gather, "doubling": _doubling},
    "reduce-scatter": {"ring": _ring_reduce_scatter, "direct": _direct_exchange, "halving": _halving},
    "all-reduce": {
        "ring": _in_turn(_ring_reduce_scatter, _ring_all_gather),
        "direct": _in_turn(_direct_exchange, _direct_all_gather),
        "tree": _in_turn(_tree_reduce, _tree_broadcast),
        "halving-doubling": _HALVING_DOUBLING,
    },
    "all-to-all": {"direct": _direct_exchange},
}


def algorithms(kind: CollectiveKind, num_ranks: int, inside: int) -> tuple[str, ...]:
    """The names of the algorithms of a kind that a number of ranks admits, of which `inside` share a node."""
    is_power = num_ranks & (num_ranks - 1) == 0
    names = tuple(name for name, steps in _ALGORITHMS[kind].items() if is_power or steps not in _OF_POWERS)
    spans_nodes = kind == "all-reduce" and 1 < inside < num_ranks and num_ranks % inside == 0
    return (*names, "hierarchical") if spans_nodes else names


def steps_of(kind: CollectiveKind, algorithm: str, num_ranks: int, inside: int) -> list[Step]:
    """All steps of an algorithm. KeyError if the kind has none of that name."""
    if algorithm == "hierarchical" and kind == "all-reduce":
        return list(_hierarchical(num_ranks, inside))
    return list(_ALGORITHMS[kind][algorithm](num_ranks))


@dataclass(frozen=True)
class BusiestSender:
    """Pieces that the busiest rank sends inside its node (`inside`) and out of it (`out_of_rank`), and that the busiest
    node sends out (`out_of_node`), in all steps together."""

    inside: int
    out_of_rank: int
    out_of_node: int


def busiest_sender(steps: Sequence[Step], inside: int) -> BusiestSender:
    """The loads of the busiest ranks and of the busiest node, if each node has `inside` ranks."""
    near, far, far_of_nodes = Counter[int](), Counter[int](), Counter[int]()
    for move in chain.from_iterable(steps):
        node = move.sender // inside
        if move.receiver // inside == node:
            near[move.sender] += len(move.pieces)
        else:
            far[move.sender] += len(move.pieces)
            far_of_nodes[node] += len(move.pieces)
    return BusiestSender(*(max(counts.values(), default=0) for counts in (near, far, far_of_nodes)))
