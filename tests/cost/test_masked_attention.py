"""torch's attention with a mask: transformers of February to April 2024, with DeepSpeed or without."""

from dataclasses import replace

import pytest
from tests.cost.test_shard_copies import RUN

from shardwright.config.attention_kernels import ATTENTION_KERNELS
from shardwright.config.software import software_of
from shardwright.config.software_generations import generation_of
from shardwright.cost.calibration import shipped
from shardwright.simulate.closed_form import step_time


@pytest.mark.parametrize("framework", ["transformers", "deepspeed"])
def test_a_month_says_which_attention_transformers_takes(framework: str) -> None:
    """4.38 is of 21 February 2024, 4.40 of 18 April, 4.41 of 17 May."""
    months = ("2024-01", "2024-02", "2024-04", "2024-05")
    versions = [software_of(generation_of(framework, month)) for month in months]
    assert [software.attention for software in versions] == ["flash2", "efficient", "efficient", "flash2"]
    assert [software.causal for software in versions] == [True, False, False, True]


@pytest.mark.parametrize(("kernel", "is_causal"), [("efficient", False), ("torch", False), ("flash2", True)])
def test_a_kernel_that_reads_a_mask_computes_all(kernel: str, is_causal: bool) -> None:
    assert software_of(f"fsdp-2024+{kernel}").causal == is_causal
    assert ATTENTION_KERNELS[kernel].computes_masked != is_causal


def test_a_mask_costs_twice_the_scores_and_a_slower_kernel() -> None:
    masked_s, causal_s = (
        float(step_time(replace(RUN, software=name), shipped()).compute)
        for name in ("deepspeed-2024-02", "deepspeed-2024-05")
    )
    assert 1.05 < masked_s / causal_s < 1.3
