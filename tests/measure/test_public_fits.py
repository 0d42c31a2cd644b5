"""Adapters: does it fit? Public answers, each from a paper or the documentation of another trainer, and ours."""

import statistics
from pathlib import Path
from typing import Any

import pytest

from shardwright.config.load import job_of_fields
from shardwright.cost.calibration import shipped
from shardwright.measure.measured_runs.runs import read_runs
from shardwright.measure.validate import predict
from shardwright.memory.job_memory import job_memory
from shardwright.report.fit_verdict import device_room_bytes

TRUTH = Path(__file__).parents[2] / "benchmarks" / "truth"
QLORA = {"rank": 64, "alpha": 16.0, "base": "nf4", "double_quantization": True}
PAGED = {"offload_optimizer": 1.0}  # the paper's optimizer lies in host memory where the device has no room
RANK_8 = {"rank": 8, "alpha": 16.0}
QWEN = {"rank": 64, "alpha": 16.0}

# Each: source, model, tokens, adapter ({} trains all weights), device, number of devices, plan, and if it fits.
PAPER, FACTORY = "arXiv 2305.14314, abstract and section 1", "LLaMA-Factory, README, table of hardware requirements"
QWEN_README, PEFT = "QwenLM/Qwen, README, profiling of memory and speed", "huggingface/peft, README at 0032f32"
VERTEX = "Google Cloud, Vertex AI, LoRA and QLoRA recommendations"
ANSWERS: dict[str, tuple[str, str, int, dict[str, Any], str, int, dict[str, Any], bool]] = {
    "65B on 48 GB": (PAPER, "llama-65b", 512, QLORA, "rtx-a6000", 1, PAGED, True),
    "33B on 24 GB": (PAPER, "llama-33b", 512, QLORA, "rtx-3090", 1, PAGED, True),
    "65B on 48 GB, rank 8": (FACTORY, "llama-65b", 512, QLORA | RANK_8, "rtx-a6000", 1, {}, True),
    "65B in 16 bits on 80 GB": (FACTORY, "llama-65b", 512, RANK_8, "a100-sxm-80g", 1, {}, False),
    "72B on 80 GB": (QWEN_README, "qwen-72b", 8192, QLORA, "a100-sxm-80g", 1, {}, True),
    "72B in 16 bits, ZeRO-2 on 4": (QWEN_README, "qwen-72b", 256, QWEN, "a100-sxm-80g", 4, {"zero": 2}, False),
    "72B in 16 bits, ZeRO-3 on 4": (QWEN_README, "qwen-72b", 256, QWEN, "a100-sxm-80g", 4, {"zero": 3}, True),
    "all of 7B on 80 GB": (PEFT, "bloom-7b1", 512, {}, "a100-sxm-80g", 1, {}, False),
    "adapters of bloomz 7B on 80 GB": (PEFT, "bloom-7b1", 512, RANK_8, "a100-sxm-80g", 1, {}, True),
    "7B, 12 samples on an L4": (VERTEX, "open-llama-7b", 512, QLORA, "l4", 1, {"microbatch_size": 12}, True),
}


def bytes_of(
    model: str, tokens: int, adapter: dict[str, Any], device: str, devices: int = 1, **plan: Any
) -> tuple[int, int]:
    """The bytes of the fullest rank with layers that are computed again, and those that the device offers."""
    size = plan.get("microbatch_size", 1)
    fields: dict[str, Any] = {
        "model": {"name": model, "sequence": tokens, "adapter": adapter},
        "cluster": {"device": device, "nodes": 1, "devices_per_node": devices},
        "plan": {"dp": devices, "recompute": "full"} | plan,
        "batch": {"global_batch_size": size * devices},
        "precision": {"compute": "bf16"},
    }
    job = job_of_fields(fields, [], "a public answer")
    room = device_room_bytes(job)
    assert room is not None
    return max(rank.total_bytes for rank in job_memory(job)), room


@pytest.mark.parametrize("name", ANSWERS)
def test_the_answer_is_the_public_one(name: str) -> None:
    _, model, tokens, adapter, device, devices, plan, fits = ANSWERS[name]
    needed, room = bytes_of(model, tokens, adapter, device, devices, **plan)
    assert (needed <= room) is fits, f"{needed / 1e9:.1f} GB, and {device} offers {room / 1e9:.1f}"


def test_llama2_7b_needs_less_than_10_gb() -> None:
    """torchtune, tutorial "Fine-Tuning Llama2 with QLoRA": two samples, adapters of query, value and out."""
    adapter = QLORA | RANK_8 | {"targets": ["query", "value", "out"]}
    assert bytes_of("llama2-7b", 2048, adapter, "rtx-3090", microbatch_size=2)[0] < 10e9


def test_adapters_of_other_trainers_beside_public_tables() -> None:
    """Qwen's under peft, 24 runs to which nothing is fitted: within the goals for memory and for small models."""
    rows = [row for row in predict(read_runs(TRUTH / "adapters.csv"), shipped()) if row.row.family == "qwenlora"]
    seconds = [float(row.time.total) / row.row.step_s - 1 for row in rows if row.time]
    memory = [row.memory_gb / row.row.memory_gb - 1 for row in rows]
    assert len(rows) == 24
    assert statistics.median(map(abs, memory)) <= 0.08 and statistics.median(map(abs, seconds)) <= 0.15
    long = [error for row, error in zip(rows, seconds, strict=True) if row.row.run.shape.sequence >= 2048]
    assert max(map(abs, long)) <= 0.15
