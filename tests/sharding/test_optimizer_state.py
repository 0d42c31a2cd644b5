"""Which parameters are matrices, for optimizers that look at whole ones."""

import math

import pytest

from shardwright.config.model_shape import shape_of
from shardwright.sharding.optimizer_state import is_matrix
from shardwright.sharding.stage_parameters import model_parameters
from shardwright.sharding.update_matrices import update_matrices
from support.cases import EXPERT_BLOCKS, KINDS, RULES, small_job


@pytest.mark.parametrize("kind", [*KINDS, *RULES])
def test_only_what_is_drawn_is_a_matrix(kind: str) -> None:
    """Norms of all heads, sinks and biases are vectors, in whatever shape ranks share them."""
    places = model_parameters(small_job(kind).model)
    for place in places:
        assert is_matrix(place.name, place.full_shape) == (place.init == "normal"), place.name
    if kind == "olmo":
        assert any(len(place.full_shape) > 1 and "norm" in place.name for place in places)


@pytest.mark.parametrize("kind", EXPERT_BLOCKS)
def test_no_expert_is_updated_with_another(kind: str) -> None:
    """Ranks that have other experts would update a matrix, or a bias, by another measure of its size."""
    model = small_job(kind).model
    for place in model_parameters(model):
        matrices = update_matrices(shape_of(model), place)
        if place.is_expert:
            assert len(matrices) % model.moe.experts == 0, place.name
            assert sum(matrix.full_elements for matrix in matrices) == math.prod(place.full_shape)
