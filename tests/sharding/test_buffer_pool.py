"""The pool of buffers: what is lent is large enough and nobody else's, and no more is held than needed."""

from hypothesis import given
from hypothesis import strategies as st

from shardwright.sharding.buffer_pool import BufferPool, Loan


def test_the_smallest_that_fits_is_lent() -> None:
    made: list[int] = []
    pool = BufferPool[None](made.append)
    large, small = pool.borrow(100), pool.borrow(90)
    pool.give_back(large)
    pool.give_back(small)
    assert pool.borrow(85) is small
    assert pool.borrow(85) is large
    assert made == [100, 90]


def test_none_is_lent_for_much_less() -> None:
    """Else all buffers would become as large as the largest that was ever asked for."""
    pool = BufferPool[None](lambda num_bytes: None)
    values, gradients = pool.borrow(40), pool.borrow(80)
    pool.give_back(gradients)
    pool.give_back(values)
    assert pool.borrow(40) is values
    small = pool.borrow(40)
    assert (small.num_bytes, pool.held_bytes, pool.peak_bytes) == (40, 80, 120)


def test_free_ones_give_way_before_there_is_more_than_ever() -> None:
    pool = BufferPool[None](lambda num_bytes: None)
    lent = [pool.borrow(4), pool.borrow(6)]
    for loan in lent:
        pool.give_back(loan)
    pool.borrow(10)
    assert (pool.held_bytes, pool.peak_bytes) == (10, 10)


@given(st.lists(st.one_of(st.integers(0, 100), st.floats(0, 1, exclude_max=True)), max_size=60))
def test_lent_buffers_are_apart(steps: list[int | float]) -> None:
    """An integer borrows so many bytes, a fraction gives back one of what is lent."""
    pool = BufferPool[bytearray](bytearray)
    lent: list[tuple[int, Loan[bytearray]]] = []
    for step in steps:
        if isinstance(step, int):
            lent.append((step, pool.borrow(step)))
        elif lent:
            pool.give_back(lent.pop(int(step * len(lent)))[1])
        assert all(len(buffer.memory) == buffer.num_bytes >= asked for asked, buffer in lent)
        assert len({id(buffer.memory) for _, buffer in lent}) == len(lent)
        assert sum(buffer.num_bytes for _, buffer in lent) <= pool.held_bytes <= pool.peak_bytes
