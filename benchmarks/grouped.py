"""Products of many experts: a loop of ours over the experts beside torch's grouped product, on a CPU.

    .venv/bin/python benchmarks/grouped.py

One thread. Forward, input gradient and weight gradient of one weight; torch's weight gradient is added to what is
there, as ours adds up in place. Rows are shared out evenly, or as 1 / (1 + rank of the expert). Below 1 ours is faster.
"""

import torch
from alternate import RATIO_HEADER, alternate, check_close, print_row, run_ranks
from torch import Tensor
from torch.nn import functional

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.expert.grouped_linear import grouped_linear
from shardwright.parallel.tensor.deferred_gradients import DeferredGradients
from shardwright.parallel.tensor.parameter import PlacedParameter
from shardwright.sharding.parameter_shard import ParameterShard

HIDDEN, OUTPUT = 256, 512
CASES = [(experts, rows, skewed) for experts, rows in ((4, 512), (16, 512), (64, 1024)) for skewed in (False, True)]
MOST_ROUNDS, MOST_S = 100, 4.0


def row_counts(num_experts: int, num_rows: int, skewed: bool) -> Tensor:
    """Rows of each expert."""
    share = 1.0 / (1.0 + torch.arange(num_experts)) if skewed else torch.ones(num_experts)
    counts_e = (share / share.sum() * num_rows).long()
    counts_e[0] += num_rows - counts_e.sum()
    return counts_e


def compare(num_experts: int, num_rows: int, skewed: bool, dtype: torch.dtype) -> list[str]:
    """A row of the table."""
    generator = torch.Generator().manual_seed(0)
    shape = (num_experts, OUTPUT, HIDDEN)
    values = torch.randn(shape, generator=generator, dtype=dtype)
    weight = PlacedParameter(values, ParameterShard(shape, tuple((0, size) for size in shape), "normal"))
    reference = values.clone().requires_grad_()
    counts_e = row_counts(num_experts, num_rows, skewed)
    x_NH = torch.randn(num_rows, HIDDEN, generator=generator, dtype=dtype).requires_grad_()
    dy_NO = torch.randn(num_rows, OUTPUT, generator=generator, dtype=dtype)
    deferred = DeferredGradients()

    def ours() -> Tensor:
        x_NH.grad = None
        grouped_linear(x_NH, weight, counts_e, deferred).backward(dy_NO)
        return x_NH.grad

    def baseline() -> Tensor:
        x_NH.grad = None
        ends_e = counts_e.cumsum(0).to(torch.int32)
        functional.grouped_mm(x_NH, reference.transpose(1, 2), offs=ends_e).backward(dy_NO)
        return x_NH.grad

    for _ in range(2):  # twice: gradients add up
        check_close("input gradient", ours().float(), baseline().float(), 1e-2 if dtype == torch.bfloat16 else 1e-5)
    check_close("weight gradient", weight.gradient.float(), reference.grad.float(), 1e-2)
    name = f"{num_experts} experts, {num_rows} rows {'skewed' if skewed else 'even'}, {str(dtype).split('.')[1]}"
    return [name, *alternate(ours, baseline, MOST_ROUNDS, MOST_S).cells()]


def benchmark(mesh: Mesh, job: JobSpec) -> None:
    """The table."""
    print_row(["case", *RATIO_HEADER], is_header=True)
    for dtype in (torch.float32, torch.bfloat16):
        for case in CASES:
            print_row(compare(*case, dtype))


if __name__ == "__main__":
    run_ranks(benchmark, {}, 1)
