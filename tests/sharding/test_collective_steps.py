"""Played step by step, each algorithm of a collective leaves every rank with what it should have."""

import pytest

from shardwright.sharding.collective_steps import (
    KINDS,
    Transfer,
    algorithms,
    busiest_sender,
    held_after,
    play,
    steps_of,
)


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_ends_with_its_pieces(kind: str) -> None:
    for num_ranks, inside in ((1, 1), (2, 2), (3, 3), (4, 2), (6, 3), (7, 7), (8, 4), (8, 8), (12, 4)):
        for name in algorithms(kind, num_ranks, inside):  # type: ignore[arg-type]
            steps = steps_of(kind, name, num_ranks, inside)  # type: ignore[arg-type]
            held, wanted = play(kind, num_ranks, steps), held_after(kind, num_ranks)  # type: ignore[arg-type]
            for rank, pieces in wanted.items():
                assert {piece: held[rank].get(piece) for piece in pieces} == pieces, (name, num_ranks, rank)


def test_a_rank_can_neither_send_what_it_lacks_nor_add_twice() -> None:
    with pytest.raises(ValueError, match="rank 1 can't send piece 0 to 2"):
        play("broadcast", 3, [(Transfer(1, 2, (0,)),)])
    with pytest.raises(ValueError, match="step 2"):
        play("all-reduce", 2, [(Transfer(0, 1, (0,), True),), (Transfer(0, 1, (0,), True),)])


@pytest.mark.parametrize(
    ("kind", "name", "num_steps", "inside", "out"),
    [
        # In pieces of an eighth of the tensor; two nodes of 4. A ring sends 2 (n - 1) of n pieces, whatever n is.
        ("all-reduce", "ring", 14, 14, 14),
        ("all-reduce", "halving-doubling", 6, 12, 8),
        ("all-reduce", "tree", 6, 16, 8),
        ("all-reduce", "hierarchical", 8, 12, 8),
        ("all-gather", "ring", 7, 7, 7),
        ("all-to-all", "direct", 1, 3, 16),
        ("scatter", "tree", 3, 3, 4),
        ("broadcast", "tree", 3, 16, 8),
    ],
)
def test_bytes_are_those_of_the_textbook(kind: str, name: str, num_steps: int, inside: int, out: int) -> None:
    steps = steps_of(kind, name, 8, 4)  # type: ignore[arg-type]
    load = busiest_sender(steps, 4)
    assert (len(steps), load.inside, load.out_of_node) == (num_steps, inside, out)
