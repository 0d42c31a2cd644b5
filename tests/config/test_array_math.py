"""Arithmetic without numpy gives what numpy gives, of numbers, of arrays and of both together."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.config.array_math import MixedError, holds, least, most, where

numbers = st.integers(-9, 9) | st.floats(-1e6, 1e6).map(lambda x: x / 3)
values = numbers | st.lists(numbers, min_size=3, max_size=3).map(np.array)


@given(first=values, second=values, third=values)
def test_it_is_numpys(first: Any, second: Any, third: Any) -> None:
    np.testing.assert_array_equal(least(first, second), np.minimum(first, second))
    np.testing.assert_array_equal(most(first, second), np.maximum(first, second))
    np.testing.assert_array_equal(most(first, second, third), np.maximum(np.maximum(first, second), third))
    np.testing.assert_array_equal(where(first > second, first, third), np.where(first > second, first, third))


@given(rows=st.lists(numbers, min_size=2, max_size=2), columns=st.lists(numbers, min_size=3, max_size=3))
def test_arrays_of_other_shapes_meet(rows: list[float], columns: list[float]) -> None:
    first, second = np.array(rows)[:, None], np.array(columns)
    for own, numpys in ((least, np.minimum), (most, np.maximum)):
        np.testing.assert_array_equal(own(first, second), numpys(first, second))
        np.testing.assert_array_equal(own(second, first), numpys(first, second))


@given(of=st.lists(numbers, min_size=1, max_size=4), than=numbers)
def test_a_condition_holds_of_all_or_says_of_which(of: list[float], than: float) -> None:
    each = [holds(one > than) for one in of]
    if len(set(each)) == 1:
        assert holds(np.array(of) > than) is each[0]
        return
    with pytest.raises(MixedError) as caught:
        holds(np.array(of) > than)
    assert caught.value.condition.tolist() == each
