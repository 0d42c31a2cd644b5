"""Which parameters are matrices, for optimizers that look at whole ones."""

import pytest

from cases import KINDS, RULES, small_job
from shardwright.sharding.optimizer_state import is_matrix
from shardwright.sharding.stage_parameters import model_parameters


@pytest.mark.parametrize("kind", [*KINDS, *RULES])
def test_only_what_is_drawn_is_a_matrix(kind: str) -> None:
    """Norms of all heads, sinks and biases are vectors, in whatever shape ranks share them."""
    places = model_parameters(small_job(kind).model)
    for place in places:
        assert is_matrix(place.name, place.full_shape) == (place.init == "normal"), place.name
    if kind == "olmo":
        assert any(len(place.full_shape) > 1 and "norm" in place.name for place in places)
