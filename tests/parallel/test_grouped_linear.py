"""Products of many experts against one product each; gradients where they belong, at once or put off."""

from contextlib import nullcontext

import pytest
import torch

from shardwright.parallel.expert import grouped_linear as grouped_linear_module
from shardwright.parallel.expert.grouped_linear import grouped_linear, grouped_product
from shardwright.parallel.tensor.deferred_gradients import DeferredGradients
from shardwright.parallel.tensor.parameter import PlacedParameter
from shardwright.sharding.parameter_shard import ParameterShard

COUNTS = ([3, 0, 5, 1], [0, 2, 0, 0], [0, 0, 0, 0])  # three microbatches; the last brings this rank nothing
SHAPE = (4, 2, 6, 8)  # experts, gate and up, inner, hidden


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def plain(x_NH: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Every row gathers its matrix."""
    expert_N = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return torch.einsum("nh,noh->no", x_NH, weight.reshape(4, 12, 8)[expert_N])


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("gradient_dtype", [torch.float64, torch.float32])
def test_equal_to_a_matrix_for_each_row(is_deferred: bool, gradient_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    place = ParameterShard(SHAPE, tuple((0, n) for n in SHAPE), "normal", 1.0, "w")
    weight, expected = PlacedParameter(torch.randn(SHAPE, dtype=torch.float64), place), leaf(*SHAPE)
    weight.gradient = torch.full(SHAPE, torch.nan, dtype=gradient_dtype)  # memory without a meaning yet
    expected.data = weight.data.clone()
    deferred = DeferredGradients()
    for i, counts in enumerate(COUNTS):
        x, dy = leaf(sum(counts), 8), torch.randn(sum(counts), 12, dtype=torch.float64)
        y = grouped_linear(x, weight, torch.tensor(counts), deferred)
        with deferred.keeping(i) if is_deferred else nullcontext():
            y.backward(dy)
        own, x.grad = x.grad, None
        reference = plain(x, expected, counts)
        reference.backward(dy)
        torch.testing.assert_close(y, reference)
        torch.testing.assert_close(own, x.grad)
    assert weight.has_gradient != is_deferred
    for i in range(deferred.num_kept()):
        deferred.compute(i)
    torch.testing.assert_close(weight.gradient, expected.grad.to(gradient_dtype))


def test_where_nobody_has_rows_no_kernel_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of ep that the gate sent nothing: nobody says that the kernel takes it."""
    monkeypatch.setattr(grouped_linear_module.functional, "grouped_mm", pytest.fail)
    x_NH, matrices_eHO = torch.empty(0, 8, dtype=torch.bfloat16), torch.empty(4, 8, 16, dtype=torch.bfloat16)
    assert grouped_product(x_NH, matrices_eHO, torch.zeros(4, dtype=torch.int64), "cuda").shape == (0, 16)
