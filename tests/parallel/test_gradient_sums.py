"""Rows added to a table as on CUDA: in float32, once a token, in one order. Products added to sums in dry runs."""

import pytest
import torch
from torch import Tensor

from shardwright.model.embedding import LearnedPositions
from shardwright.parallel.comm.collectives import Axis
from shardwright.parallel.comm.ledger import Ledger
from shardwright.parallel.tensor import added_on_meta, gradient_sums
from shardwright.parallel.tensor.gradient_sums import add_product, add_rows_in_order
from shardwright.parallel.tensor.linear import LayerSharding
from shardwright.parallel.tensor.parameter import PlacedParameter, whole
from support.cases import small_job
from support.kernel_traffic import KernelTraffic


def by_loop(table_VH: Tensor, rows_T: Tensor, dy_TH: Tensor) -> Tensor:
    """The same in float64, row by row."""
    sum_VH = table_VH.double()
    for row, dy_H in zip(rows_T.tolist(), dy_TH.double(), strict=True):
        sum_VH[row] += dy_H
    return sum_VH


@pytest.mark.parametrize("columns", [8, 3])  # those of a block: the last one may be narrower
def test_a_token_that_is_often_there_gets_all_of_it(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    frequent, generator = 10_000, torch.Generator().manual_seed(1)
    rows_T = torch.cat((torch.full((frequent,), 5), torch.randint(0, 40, (777,), generator=generator)))
    rows_T = rows_T[torch.randperm(len(rows_T), generator=generator)]
    monkeypatch.setattr(gradient_sums, "_ELEMENTS", columns * len(rows_T))
    dy_TH = (torch.rand(len(rows_T), 8, generator=generator) + 0.5).bfloat16()
    table_VH = torch.zeros(40, 8, dtype=torch.bfloat16)
    exact_VH = by_loop(table_VH, rows_T, dy_TH)

    lost_H = torch.zeros(8, dtype=torch.bfloat16)
    for dy_H in dy_TH[rows_T == 5]:
        lost_H += dy_H
    assert lost_H.double().max() < 0.1 * exact_VH[5].min()  # what atomics in 16 bits make of it

    sum_VH = table_VH.clone()
    add_rows_in_order(sum_VH, rows_T, dy_TH)
    torch.testing.assert_close(sum_VH.double(), exact_VH, rtol=2.0**-8, atol=0)  # rounded once

    again_VH = table_VH.clone()
    add_rows_in_order(again_VH, rows_T, dy_TH)
    assert torch.equal(sum_VH, again_VH)


@pytest.mark.parametrize("num_rows", [0, 1, 63, 64, 65, 300])
def test_sums_are_added_to_what_is_there(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    rows_T = torch.randint(2, 7, (num_rows,), generator=generator)
    dy_TH, table_VH = (torch.randn(n, 4, generator=generator) for n in (num_rows, 9))
    exact_VH = by_loop(table_VH, rows_T, dy_TH)
    add_rows_in_order(sum_VH := table_VH.clone(), rows_T, dy_TH)
    torch.testing.assert_close(sum_VH.double(), exact_VH, rtol=1e-5, atol=1e-5)
    assert torch.equal(sum_VH[[0, 1, 7, 8]], table_VH[[0, 1, 7, 8]])


def test_devices_add_in_their_own_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        "shardwright.parallel.tensor.parameter.add_rows_in_order", lambda into, rows, dy: asked.append(len(rows))
    )
    parameter = PlacedParameter(torch.zeros(4, 2), whole((4, 2), "normal").place)
    rows_T, dy_TH = torch.tensor([1, 1, 3]), torch.ones(3, 2)
    parameter.add_rows(rows_T, dy_TH, kind="cpu")
    assert parameter.gradient is not None and parameter.gradient[:, 0].tolist() == [0.0, 2.0, 0.0, 1.0] and not asked
    parameter.add_rows(rows_T, dy_TH, kind="cuda")
    assert asked == [3]


def gradient_of_positions(kind: str) -> Tensor:
    axis = Axis("tp", (0,), 0, None, Ledger(torch.device("cpu"), kind=kind), None)
    module = LearnedPositions(small_job("gpt").model, LayerSharding(axis, axis, axis, axis))
    module.weight = weight = PlacedParameter(torch.zeros(module.weight.shape), module.weight.place)
    positions_SB = torch.tensor([[0, 1], [1, 2], [0, 0]])
    x_SBH = torch.randn(3, 2, weight.shape[1], generator=torch.Generator().manual_seed(0))
    (module(torch.zeros_like(x_SBH), positions_SB) * x_SBH).sum().backward()
    assert weight.gradient is not None
    return weight.gradient


def test_positions_are_looked_up_as_tokens_are_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = gradient_of_positions("cpu")
    assert expected.count_nonzero()
    asked: list[int] = []

    def counting(into_VH: Tensor, rows_T: Tensor, dy_TH: Tensor) -> None:
        asked.append(len(rows_T))
        add_rows_in_order(into_VH, rows_T, dy_TH)

    monkeypatch.setattr("shardwright.parallel.tensor.parameter.add_rows_in_order", counting)
    torch.testing.assert_close(gradient_of_positions("cuda"), expected)
    assert asked == [6]


def test_a_product_is_added_in_one_call_without_memory() -> None:
    """With every torch that is allowed; the form for older ones refuses what torch's own refuses."""
    dy_TN, x_TH = (torch.empty(6, width, dtype=torch.bfloat16, device="meta") for width in (3, 5))
    sum_NH = torch.empty(3, 5, device="meta")
    with KernelTraffic() as traffic:
        add_product(sum_NH, dy_TN, x_TH, has_sum=True, kind="cuda")
    assert [kernel.operator for kernel in traffic.kernels.elements()] == ["addmm"]
    made = added_on_meta._added(sum_NH, dy_TN.t(), x_TH, torch.float32, out=sum_NH)
    assert made is sum_NH
    with pytest.raises(RuntimeError):
        added_on_meta._added(sum_NH, dy_TN.t(), x_TH[:, :4], torch.float32, out=sum_NH)
    with pytest.raises(RuntimeError):
        added_on_meta._added(sum_NH, dy_TN, x_TH, torch.float32, out=sum_NH)
