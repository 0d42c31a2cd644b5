"""Gradients that add up whole over microbatches (FSDP's no_sync), heads whose logits are gathered, Liger's kernels."""

from dataclasses import replace

import pytest
from tests.cost.test_shard_copies import RUN

from shardwright.config.software import software_of
from shardwright.config.software_generations import generation_of
from shardwright.cost.calibration import shipped
from shardwright.layers.query import Run
from shardwright.memory.rank_estimate import rank_memory
from shardwright.simulate.closed_form import step_time


def run_of(software: str, **plan: object) -> Run:
    return replace(RUN, software=software, grid=replace(RUN.grid, **plan))


def peak_bytes(run: Run) -> float:
    return float(max(memory.total for memory in rank_memory(run, shipped())))


@pytest.mark.parametrize("zero", [2, 3])
def test_gradients_that_add_up_whole_are_sent_once_a_step(zero: int) -> None:
    parts, whole = "fsdp-2024", "fsdp-2024+whole-gradients"
    one, many = ({"zero": zero, "global_batch": 8 * num} for num in (1, 8))
    assert float(step_time(run_of(whole, **one), shipped()).total) == float(
        step_time(run_of(parts, **one), shipped()).total
    )
    network = {"network_bytes_per_s": 1e9, "devices_per_node": 1}
    seconds = [float(step_time(replace(run_of(name, **many), **network), shipped()).total) for name in (parts, whole)]
    assert seconds[1] < 0.85 * seconds[0]


def test_gradients_that_add_up_whole_take_the_bytes_in_which_they_travel() -> None:
    many = {"global_batch": 64}
    added = peak_bytes(run_of("fsdp-2024+whole-gradients", **many)) - peak_bytes(run_of("fsdp-2024", **many))
    elements = RUN.shape.parameters
    # 2 bytes of all in place of 4 of an eighth, in which the shards of float32 parameters have theirs.
    assert added == pytest.approx(elements * (2 - 4 / 8), rel=0.03)
    assert peak_bytes(run_of("fsdp-2024+whole-gradients")) == peak_bytes(run_of("fsdp-2024"))


def test_who_adds_up_whole() -> None:
    """accelerate's accumulate and Fabric's no_backward_sync do; DeepSpeed, torchtune, torchtitan, composer do not."""
    whole, parts = ("transformers-2024", "litgpt"), ("deepspeed-2025", "torchtune", "torchtitan", "fsdp-2023")
    assert [software_of(name).zero.whole_gradients for name in whole + parts] == [True] * 2 + [False] * 4


def test_gathered_logits_are_whole_on_each_rank() -> None:
    plan = {"tp": 8, "dp": 1, "zero": 0, "global_batch": 1}
    gathered, shared = (peak_bytes(run_of(name, **plan)) for name in ("fsdp-2024", "torchtitan"))
    logits = RUN.shape.vocab * RUN.shape.sequence
    assert gathered - shared == pytest.approx(8 * logits - 16 * logits / 8, rel=0.25)


def test_liger_has_no_logits_and_fewer_bytes() -> None:
    assert generation_of("liger", "2025-10") == "transformers-liger"
    plain, liger = run_of("transformers-2025", microbatch=4, global_batch=32), run_of("transformers-liger")
    liger = replace(liger, grid=plain.grid)
    logits = 4 * RUN.shape.vocab * RUN.shape.sequence
    assert peak_bytes(plain) - peak_bytes(liger) > 0.8 * 10 * logits
    assert float(step_time(liger, shipped()).total) < 0.95 * float(step_time(plain, shipped()).total)


def test_deepspeed_with_liger_is_like_both() -> None:
    """Layers are as under FSDP with Liger, and gathers as under DeepSpeed."""
    assert generation_of("deepspeed-liger", "2025-07") == "deepspeed-liger"
    both, deepspeed, liger = map(software_of, ("deepspeed-liger", "deepspeed-2025", "transformers-liger"))
    assert all(getattr(both, name) == getattr(liger, name) for name in ("norm", "activation", "rotary", "logit_peak"))
    assert both.zero == deepspeed.zero != liger.zero
    fewer = [plain - fused for plain, fused in zip(deepspeed.kernels, both.kernels, strict=True)]
    plain = software_of("transformers-2025").kernels
    assert fewer == [count - fused for count, fused in zip(plain, liger.kernels, strict=True)]


def test_a_loss_by_parts_has_no_logits() -> None:
    plan = {"microbatch": 4, "global_batch": 32}
    whole, parts = (run_of(name, **plan) for name in ("transformers-2025", "transformers-2025+loss-by-parts"))
    logits = 4 * RUN.shape.vocab * RUN.shape.sequence
    assert peak_bytes(whole) - peak_bytes(parts) > 0.8 * 10 * logits
