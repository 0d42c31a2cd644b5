"""NF4 (QLoRA): its numbers by the definition, and the rules, bytes and seconds of bases in it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import job_of_fields, make_job
from shardwright.config.nf4_rows import BLOCK, GROUP, Nf4Row
from shardwright.cost.calibration import shipped
from shardwright.cost.from_job import run_of
from shardwright.memory.job_memory import job_memory
from shardwright.memory.rank_estimate import rank_memory
from shardwright.precision import nf4
from shardwright.precision.fused_operator import compiled
from shardwright.precision.nf4 import LEVELS, dequantise, levels, quantise
from shardwright.sharding.stage_parameters import model_parameters
from shardwright.simulate.full_step import simulated_step

CPU = torch.device("cpu")


def plainly_quantised(row: list[float]) -> list[float]:
    """The elements of a row after NF4, one by one."""
    values = []
    for first in range(0, len(row), BLOCK):
        block = row[first : first + BLOCK]
        scale = max(map(abs, block))
        values += [scale * min(LEVELS, key=lambda level, x=x: abs(x / (scale or 1.0) - level)) for x in block]
    return values


def test_elements_are_the_nearest_levels_times_the_greatest_of_their_block() -> None:
    values_RC = torch.randn(5, 192, generator=torch.Generator().manual_seed(0))
    values_RC[1, :64] = 0.0
    row = Nf4Row(0, 192, 192, is_double=False)
    words_RW = quantise(values_RC, row)
    assert words_RW.shape == (5, row.num_words) and 4 * row.num_words == 192 // 2 + 3 * 4
    plain = torch.tensor([plainly_quantised(values.tolist()) for values in values_RC])
    assert torch.allclose(dequantise(words_RW, row, torch.float32), plain, rtol=1e-6, atol=0)


def test_scales_in_8_bits_are_within_a_level_and_parts_of_rows_have_those_of_whole_rows() -> None:
    full = 3 * BLOCK * GROUP // 2  # the first group is whole, the second a half
    values_RC = torch.randn(3, full, generator=torch.Generator().manual_seed(1))
    whole, exact = Nf4Row(0, full, full, is_double=True), Nf4Row(0, full, full, is_double=False)
    assert 4 * whole.num_words == full // 2 + full // BLOCK + 2 * 4
    made_RC = dequantise(quantise(values_RC, whole), whole, torch.float32)
    exact_RC = dequantise(quantise(values_RC, exact), exact, torch.float32)
    assert 0 < (made_RC - exact_RC).abs().max() < 0.9 / 128 / 2 * values_RC.abs().max() * 1.01
    for start, stop in ((0, full // 3), (full // 3, full)):
        part = Nf4Row(start, stop, full, is_double=True)
        assert torch.equal(dequantise(quantise(values_RC, part), part, torch.float32), made_RC[:, start:stop])


FULL = 3 * BLOCK * GROUP // 2
PARTS = [(0, FULL), (FULL // 3, FULL), (5 * BLOCK, 8 * BLOCK), (FULL - BLOCK, FULL)]


def both_ways(row: Nf4Row, dtype: torch.dtype, backend: str) -> tuple[Tensor, Tensor]:
    """The elements of a row in NF4 as a CPU makes them, and as the compiler of a device takes the work apart."""
    values_RC = torch.randn(7, FULL, generator=torch.Generator().manual_seed(3))
    values_RC[1, :BLOCK], values_RC[2], values_RC[3] = 0.0, 1e-30 * values_RC[2], 1e-38 * values_RC[3]
    words_RW = quantise(values_RC if row.is_double else values_RC[:, row.first : row.stop], row)
    made_RC = torch.full((7, row.num_elements), torch.nan, dtype=dtype)
    tables = nf4._tables(row.is_double, CPU)
    compiled(nf4._numbers_at_once, backend)(words_RW, *tables, row.first // BLOCK, made_RC)
    return dequantise(words_RW, row, dtype), made_RC


@pytest.mark.long
@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_double", [False, True])
@pytest.mark.parametrize(("first", "stop"), PARTS)
def test_a_kernel_makes_the_same_bits(first: int, stop: int, is_double: bool, dtype: torch.dtype) -> None:
    in_turn, at_once = both_ways(Nf4Row(first, stop, FULL, is_double=is_double), dtype, "aot_eager")
    assert torch.equal(in_turn, at_once)


@pytest.mark.long
def test_compiled_code_makes_the_same_bits() -> None:
    in_turn, at_once = both_ways(Nf4Row(FULL // 3, FULL, FULL, is_double=True), torch.bfloat16, "inductor")
    assert torch.equal(in_turn, at_once)


def test_bytes_are_those_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    values_RC = torch.randn(128, 512, generator=torch.Generator().manual_seed(2)).bfloat16()
    row = Nf4Row(0, 512, 512, is_double=False)
    words_RW = quantise(values_RC.float(), row)
    codes, state = functional.quantize_4bit(values_RC, blocksize=64, quant_type="nf4", compress_statistics=False)
    assert torch.equal(words_RW[:, : row.code_words].contiguous().view(torch.uint8).flatten(), codes.flatten())
    assert torch.equal(dequantise(words_RW, row, torch.bfloat16), functional.dequantize_4bit(codes, state))
    dynamic = functional.create_dynamic_map(signed=False)
    assert torch.allclose(levels("scales", CPU), dynamic, rtol=0, atol=1e-7)


LLAMA = {"name": "llama3-8b", "sequence": 2048}


def llama(base: dict[str, Any] | None = None, **plan: Any) -> JobSpec:
    devices = plan.get("dp", 1) * plan.get("tp", 1) * plan.get("pp", 1)
    fields: dict[str, Any] = {
        "model": LLAMA | {"adapter": {"rank": 16} | (base or {})},
        "cluster": {"device": "a100-sxm-80g", "nodes": 1, "devices_per_node": devices},
        "plan": plan,
        "batch": {"global_batch_size": 8},
        "precision": {"compute": "bf16"},
    }
    return job_of_fields(fields, [], "Llama beside adapters")


NF4, DOUBLE = {"base": "nf4"}, {"base": "nf4", "double_quantization": True}


@pytest.mark.parametrize(("base", "bits"), [(NF4, 4.5), (DOUBLE, 4.1313)])
def test_an_element_takes_four_bits_and_its_part_of_scales(base: dict[str, Any], bits: float) -> None:
    stored = [place for place in model_parameters(llama(base).model) if place.row_format]
    assert sum(place.num_elements for place in stored) == 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336)
    share = sum(32 * place.num_words for place in stored) / sum(place.num_elements for place in stored)
    assert share == pytest.approx(bits, abs=1e-4)


@pytest.mark.parametrize("base", [NF4, DOUBLE], ids=["plain", "double"])
@pytest.mark.parametrize("plan", [{"tp": 4}, {"pp": 2, "dp": 2, "zero": 3}, {"dp": 4, "zero": 3, "recompute": "full"}])
def test_arrays_of_a_search_are_near_the_account(base: dict[str, Any], plan: dict[str, Any]) -> None:
    job = llama(base, **plan)
    for exact, estimate in zip(job_memory(job), rank_memory(run_of(job), shipped()), strict=True):
        assert float(estimate.parameters) == pytest.approx(exact.parameters_bytes, rel=1e-3)
        assert float(estimate.total) == pytest.approx(exact.total_bytes, rel=0.03)


def test_numbers_are_made_in_each_pass_and_take_their_traffic() -> None:
    """Of 7 G elements: half a byte, a float32 for 64 and a number of 16 bits, forward, backward and again; and gaps of
    128 kernels each time."""
    plain, in_nf4 = (simulated_step(llama(base, recompute="full"), shipped()).total for base in ({}, NF4))
    moved_bytes = 8 * 3 * (0.5 + 4 / 64 + 2) * 6.98e9
    assert moved_bytes / 2.1e12 < float(in_nf4 - plain) < moved_bytes / 1.2e12  # at its peak and well below


def test_zero_3_gathers_rows_as_they_are_stored() -> None:
    plain, in_nf4 = (simulated_step(llama(base, dp=4, zero=3), shipped()) for base in ({}, NF4))
    assert 0 < float(in_nf4.data) < 0.6 * float(plain.data)


SMALL = {"layers": 2, "hidden": 64, "heads": 8, "kv_heads": 4, "head_dim": 16, "ffn": 256, "vocab": 61, "sequence": 16}
SMALL |= {"adapter": {"rank": 4, "base": "nf4"}}
REFUSED: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
    ({"hidden": 96}, {}, "hidden 96 is no multiple (96 / 64 = 1.50)"),
    ({"ffn": 160}, {}, "ffn 160 is no multiple"),
    ({"ffn": 320}, {"tp": 2}, "(320 / 2 / 64 = 2.50); use 1, or"),  # of 5 ranks none has whole heads
    ({}, {"tp": 4}, "plan.tp 4 cuts rows of 128 elements (heads x head size) within blocks"),
    ({"adapter": {"rank": 4, "double_quantization": True}}, {}, "double_quantization is of the scales of NF4"),
)


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_rows_that_are_no_whole_blocks_are_refused_with_a_way_out(number: int) -> None:
    model, plan, words = REFUSED[number]
    fields = make_job({"model": SMALL}).model_dump()
    with pytest.raises(PlanError) as caught:
        make_job(fields | {"model": fields["model"] | model, "plan": plan})
    (fault,) = [fault for fault in caught.value.faults if words in fault]
    assert "; " in fault
