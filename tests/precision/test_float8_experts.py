"""fp8 products of experts: what each expert would do by itself, over a cut too, and the kernel for all at once."""

import pytest
import torch
from torch import Tensor

from shardwright.config.float8_facts import FLOAT8_RECIPES
from shardwright.precision import float8_experts, scaled_mm
from shardwright.precision.float8 import E4M3, Quantised, Ranges, quantise
from shardwright.precision.float8_experts import Float8Experts
from shardwright.precision.float8_linear import (
    CutDim,
    ReduceMax,
    forward_product,
    input_gradient,
    make_float8_state,
    on_one_rank,
)
from shardwright.precision.float8_product import dequantise
from support.float8_reference import end_step, random
from support.rank_threads import on_two_ranks

NAMES = list(FLOAT8_RECIPES)
COUNTS = [[5, 0, 17, 130], [0, 3, 0, 0], [0, 0, 0, 0], [16, 32, 1, 7]]  # of four experts, by microbatch
E, N, K = 4, 144, 272


def ranges_of(counts: list[int]) -> Ranges:
    starts = [sum(counts[:e]) for e in range(len(counts))]
    return [(e, slice(starts[e], starts[e] + n)) for e, n in enumerate(counts) if n]


def experts(name: str, cut: CutDim = "none", reduce_max: ReduceMax = on_one_rank) -> Float8Experts:
    return Float8Experts([make_float8_state(name, cut, reduce_max, history=2) for _ in range(E)])


def steps(name: str, cut: CutDim = "none", reduce_max: ReduceMax = on_one_rank, index: int = 0) -> list[Tensor]:
    """The results of two steps of four microbatches, on one of two ranks if there is a cut."""
    states, results = experts(name, cut, reduce_max), []
    for step in range(2):
        weight = random(E, N, K, seed=step)
        weight = weight if cut == "none" else weight.chunk(2, 1 if cut == "outputs" else 2)[index]
        for number, counts in enumerate(COUNTS):
            x, dy = (random(sum(counts), width, seed=10 * step + number) for width in (K, N))
            x = x.chunk(2, 1)[index] if cut == "inputs" else x
            dy = dy.chunk(2, 1)[index] if cut == "outputs" else dy
            results.append(states.forward_product(x, weight, ranges_of(counts))[0])
            results.append(states.input_gradient(dy, weight, ranges_of(counts))[0])
        end_step(states.experts, reduce_max)
    return results


@pytest.mark.parametrize("name", NAMES)
def test_each_expert_is_a_layer_of_its_own(name: str) -> None:
    """An expert that first has rows in a later step begins its past there."""
    alone, result = experts(name).experts, steps(name)
    for step in range(2):
        weight = random(E, N, K, seed=step)
        for number, counts in enumerate(COUNTS):
            x, dy = (random(sum(counts), width, seed=10 * step + number) for width in (K, N))
            y, dx = result[8 * step + 2 * number :][:2]
            for expert, rows in ranges_of(counts):
                assert torch.equal(y[rows], forward_product(alone[expert], x[rows], weight[expert]))
                assert torch.equal(dx[rows], input_gradient(alone[expert], dy[rows], weight[expert]))
        for state in alone:  # all are cast, whoever has rows
            state.weight(weight[alone.index(state)])
        end_step(alone)


@pytest.mark.parametrize("cut", ["outputs", "inputs"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "blockwise"])
def test_a_cut_casts_as_the_whole_does(name: str, cut: CutDim) -> None:
    """Parts of what is cut are those of the whole; what the cut is summed over adds up, to rounding."""
    whole = steps(name)
    parts = on_two_ranks(lambda index, reduce_max: steps(name, cut, reduce_max, index))
    for number, expected in enumerate(whole):
        of_both = [part[number] for part in parts]
        is_beside = (number % 2 == 0) == (cut == "outputs")
        result = torch.cat(of_both, 1) if is_beside else of_both[0] + of_both[1]
        size = float(expected.abs().max()) if len(expected) else 0.0
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-5 * size)


def test_weights_lie_side_by_side() -> None:
    states, weight = experts("rowwise"), random(E, N, K)
    casts = states.weight(weight)
    assert len({of.rows.values.untyped_storage().data_ptr() for of in casts}) == 1
    beside = casts[0].rows.values.as_strided((E, N, K), (N * K, K, 1))
    expected = torch.stack([quantise(w, "row", E4M3).values.view(torch.uint8) for w in weight])
    assert torch.equal(beside.view(torch.uint8), expected)
    assert states.weight(weight) == casts
    states.drop_weight()
    assert states.memory() == []


def test_one_kernel_gets_what_the_loop_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments of the kernel that a CPU does not have are enough: the product is computed here from them alone."""

    def grouped(
        a: Tensor, b: Tensor, scale_a: Tensor, _: object, scale_b: Tensor, __: object, offs: Tensor, **options: object
    ) -> Tensor:
        assert b.stride(-2) == 1 and options["output_dtype"] == torch.bfloat16
        rows, begin = [], 0
        for matrix, scales, end in zip(b, scale_b, offs.tolist(), strict=True):
            left = dequantise(Quantised(a[begin:end], scale_a[begin:end, None], "row"), torch.float32)
            right = dequantise(Quantised(matrix.t(), scales[:, None], "row"), torch.float32)
            rows.append(left @ right.t())
            begin = end
        return torch.cat(rows).bfloat16()

    x, weight, ranges = random(sum(COUNTS[0]), K).bfloat16(), random(E, N, K, seed=1), ranges_of(COUNTS[0])
    expected, _ = experts("rowwise").forward_product(x, weight, ranges)
    monkeypatch.setattr(scaled_mm.functional, "scaled_grouped_mm", grouped)
    monkeypatch.setattr(float8_experts, "has_scaled_grouped_product", lambda *_: True)
    result, _ = experts("rowwise").forward_product(x, weight, ranges)
    torch.testing.assert_close(result, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_the_device_gives_what_the_emulation_gives(name: str) -> None:
    x, weight, ranges = random(sum(COUNTS[0]), K).bfloat16(), random(E, N, K, seed=1).bfloat16(), ranges_of(COUNTS[0])
    expected, _ = experts(name).forward_product(x, weight, ranges)
    result, _ = experts(name).forward_product(x.cuda(), weight.cuda(), ranges)
    scale = expected.float().abs().amax()
    assert (result.cpu().float() - expected.float()).abs().amax() <= 2.0**-7 * scale
