"""Results that are made anew without asking the operator are those that it gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.config.job import JobSpec
from shardwright.measure.dryrun import dry_run
from shardwright.measure.meta_results import MetaResults, _are_new
from support.cases import small_job

ATEN = torch.ops.aten


class Counted(MetaResults):
    """Counts the operators that are not views and were asked."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0

    def _call_and_remember(self, key: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.num_asked += 1
        return super()._call_and_remember(key, func, args, kwargs)


class Plain(MetaResults):
    """Asks each operator in each call."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


class _Both(TorchDispatchMode):
    """Gives results of the second call, which nobody computes, after they were held against those of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.results, self.num_compared = MetaResults(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first, second = (self.results.call(func, args, kwargs) for _ in range(2))
        for one, other in zip(leaves(first), leaves(second), strict=True):
            assert isinstance(one, Tensor) == isinstance(other, Tensor), func
            if isinstance(one, Tensor):
                assert (one.size(), one.stride(), one.dtype) == (other.size(), other.stride(), other.dtype), func
                assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes(), func
                self.num_compared += 1
        return second


def leaves(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]


def meta(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


@pytest.mark.parametrize(
    "compute",
    [
        lambda: (meta(3, 5) @ meta(5, 7)).relu().sum(),
        lambda: torch.nn.functional.layer_norm(meta(2, 3, 8), (8,), meta(8), meta(8)).square().mean(),
        lambda: torch.nn.functional.scaled_dot_product_attention(*(meta(2, 4, 8, 16) for _ in range(3))).sum(),
        lambda: torch.cat([meta(2, 3).t(), meta(3, 2)], dim=1).softmax(-1).amax(),
        lambda: torch.nn.functional.embedding(meta(2, 3, dtype=torch.long), meta(9, 4)).to(torch.bfloat16).sum(),
        lambda: torch.stack(meta(4, 6).chunk(2)).transpose(0, 2).contiguous().view(-1).norm(),
    ],
)  # fmt: skip
def test_results_are_those_of_the_operator(compute: Callable[[], Tensor]) -> None:
    mode = _Both()
    with mode:
        compute().backward()
    assert mode.num_compared > 3


def test_numbers_of_other_types_are_other_arguments() -> None:
    results, whole = MetaResults(), torch.empty(3, dtype=torch.long, device="meta")
    result = [results.call(ATEN.mul.Tensor, (whole, number), {}).dtype for number in (2, 2.0, 1, True, 1.0)]
    assert result == [torch.long, torch.float32, torch.long, torch.long, torch.float32]


def test_each_result_has_a_storage_of_its_own() -> None:
    results, given = Counted(), torch.empty(4, device="meta")
    result = [results.call(ATEN.add.Tensor, (given, given), {}) for _ in range(5)]
    assert len({id(tensor.untyped_storage()) for tensor in (given, *result)}) == 6 and results.num_asked == 1
    view = [results.call(ATEN.view.default, (given, [2, 2]), {}) for _ in range(2)]
    assert all(tensor.untyped_storage() is given.untyped_storage() for tensor in view)


def test_what_is_changed_in_place_is_given_back() -> None:
    results = Counted()
    one, other = (torch.empty(4, device="meta") for _ in range(2))
    for given in (one, other, one):
        assert results.call(ATEN.add_.Tensor, (given, other), {}) is given
        assert results.call(ATEN.mul.out, (one, other), {"out": given}) is given
    assert results.num_asked == 2
    grown = torch.empty(4, device="meta")
    for size in (8, 8, 2):  # its form changes, so that it is asked each time
        assert results.call(ATEN.resize_.default, (grown, [size]), {}).shape == (size,)


def test_tensors_with_memory_are_computed() -> None:
    results = MetaResults()
    for number in (1.0, 2.0):
        given = torch.full((2,), number)
        assert results.call(ATEN.add.Tensor, (given, given), {}).tolist() == [2 * number] * 2


def job(batch: int = 8, **plan: Any) -> JobSpec:
    return small_job("mixtral" if plan.get("ep", 1) > 1 else "llama", batch=batch, **plan)


PLANS: dict[str, dict[str, Any]] = {
    "zero": {"dp": 2, "tp": 2, "zero": 3, "recompute": "full"},
    "experts": {"dp": 4, "ep": 2, "zero": 2},
    "pipeline": {"dp": 1, "pp": 2, "schedule": "zb-h1"},
    "asynchronous": {"dp": 2, "pp": 2, "schedule": "pipedream"},
}


@pytest.mark.parametrize("name", PLANS)
def test_dry_run_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory by kind and action, what was made where, and the ledger: all but how long it took."""
    asked = job(**PLANS[name])
    if name == "asynchronous":
        asked = asked.model_copy(update={"optimizer": asked.optimizer.model_copy(update={"clip_grad_norm": 0.0})})

    def told() -> dict[str, Any]:
        return {key: value for key, value in dry_run(asked, 1, "cuda").as_dict().items() if key not in _OF_THE_HOST}

    result = told()
    monkeypatch.setattr("shardwright.measure.memory_trace.MetaResults", Plain)
    assert result == told()


_OF_THE_HOST = ("took_s", "host_peak_bytes")


def test_more_microbatches_ask_no_more_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Counted] = []

    def counted() -> Counted:
        made.append(Counted())
        return made[-1]

    monkeypatch.setattr("shardwright.measure.memory_trace.MetaResults", counted)
    few, many = (dry_run(job(batch, dp=2, zero=1), 0, "cuda").num_operators for batch in (8, 32))
    assert many > 3 * few
    assert made[1].num_asked <= 1.1 * made[0].num_asked


def test_a_result_that_shares_a_keyword_is_not_new() -> None:
    given = torch.empty(3, device="meta")
    assert _are_new((torch.empty(3, device="meta"),), ((), {"other": given}))
    assert not _are_new((given.detach(),), ((), {"other": given}))
