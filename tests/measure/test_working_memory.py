"""The account's total, working memory included, is the peak of a dry run, as far as it is of the same moment."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.config.job import JobSpec
from shardwright.config.load import load_job
from shardwright.measure.dryrun import dry_run

# Layers of known models, few of them: what a layer needs is as large as in the whole model.
LLAMA = {"name": "llama3-8b", "layers": 4, "sequence": 4096, "vocab": 2048}
ADAPTED = LLAMA | {"adapter.rank": 16}
IN_NF4 = ADAPTED | {"adapter.base": "nf4"}
WORDS = LLAMA | {"vocab": 128_256}  # the logits are the most
GPT = {"name": "gpt3-175b", "layers": 2, "sequence": 2048, "vocab": 2048}
MIXTRAL = {"name": "mixtral-8x7b", "layers": 2, "sequence": 4096, "vocab": 2048}
EXPERTS_ADAPTED = MIXTRAL | {"adapter.rank": 16}
QWEN = {"name": "qwen3-30b-a3b", "layers": 4, "sequence": 4096, "vocab": 2048, "adapter.rank": 16}
IN_EXPERTS = {"adapter.targets": ["query", "key", "value", "out", "expert_gate", "expert_up", "expert_down"]}
DEEPSEEK = {"name": "deepseek-v3", "layers": 4, "sequence": 4096, "vocab": 2048}
SEQUENCE = {"sequence_parallel": True}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp": (LLAMA, {"dp": 8, "zero": 1}),
    "windows": (LLAMA | {"window.size": 512, "layers": 1, "sequence": 1024}, {"dp": 2, "zero": 1}),
    "capped": (LLAMA | {"attention_softcap": 50.0, "layers": 2, "sequence": 1024}, {"dp": 2, "zero": 1}),
    "sinks over tp": (LLAMA | {"sinks": True, "qkv_bias": True}, {"dp": 2, "tp": 4, "zero": 1} | SEQUENCE),
    "norms of all heads": (LLAMA | {"qk_norm": "full"}, {"dp": 2, "tp": 4, "zero": 1}),
    "logits": (WORDS, {"dp": 8, "zero": 1}),
    "logits over tp": (WORDS, {"dp": 2, "tp": 4, "zero": 1} | SEQUENCE),
    "logits of an odd vocabulary": (WORDS | {"vocab": 128_257}, {"dp": 8, "zero": 1}),
    "logits of an odd vocabulary over tp": (WORDS | {"vocab": 50_257}, {"dp": 2, "tp": 4, "zero": 1} | SEQUENCE),
    "tp": (LLAMA, {"dp": 2, "tp": 4, "zero": 1}),
    "sequence": (LLAMA, {"dp": 2, "tp": 4, "zero": 1} | SEQUENCE),
    "1f1b": (LLAMA, {"dp": 4, "pp": 2, "zero": 1}),
    "layers again": (LLAMA, {"dp": 4, "pp": 2, "zero": 1, "recompute": "full"}),
    "operators again": (LLAMA, {"dp": 4, "pp": 2, "zero": 1, "recompute": "selective"}),
    "zb-h1": (LLAMA, {"dp": 4, "pp": 2, "zero": 1, "schedule": "zb-h1"}),
    "zb-h1 again": (LLAMA, {"dp": 4, "pp": 2, "zero": 1, "schedule": "zb-h1", "recompute": "full"}),
    "dualpipe": (LLAMA, {"dp": 4, "pp": 2, "zero": 2, "schedule": "dualpipe"}),
    "ring": (LLAMA, {"dp": 2, "cp": 4, "zero": 1}),
    "all-gather": (LLAMA, {"dp": 2, "cp": 4, "zero": 1, "cp_method": "all-gather"}),
    "ulysses": (LLAMA, {"dp": 2, "cp": 4, "zero": 1, "cp_method": "ulysses"}),
    "gpt": (GPT, {"tp": 8, "zero": 1}),
    "gpt sequence": (GPT, {"tp": 8, "zero": 1} | SEQUENCE),
    "experts": (MIXTRAL, {"dp": 8, "zero": 1, "ep": 8}),
    "several experts": (MIXTRAL, {"dp": 8, "zero": 1, "ep": 4}),
    "experts over tp": (MIXTRAL, {"dp": 4, "tp": 2, "zero": 1, "ep": 4} | SEQUENCE),
    "whole experts": (MIXTRAL, {"dp": 4, "tp": 2, "zero": 1, "ep": 4, "expert_tp": 1} | SEQUENCE),
    "latents": (DEEPSEEK, {"dp": 8, "zero": 1, "ep": 8}),
    "further": (LLAMA | {"mtp_layers": 1}, {"dp": 8, "zero": 1}),
    "two further": (LLAMA | {"mtp_layers": 2}, {"dp": 8, "zero": 1}),
    "further sequence": (LLAMA | {"mtp_layers": 1}, {"dp": 2, "tp": 4, "zero": 1} | SEQUENCE),
    "further again": (LLAMA | {"mtp_layers": 1}, {"dp": 4, "pp": 2, "zero": 1, "recompute": "full"}),
    "further dualpipe": (LLAMA | {"mtp_layers": 1}, {"dp": 4, "pp": 2, "zero": 2, "schedule": "dualpipe"}),
    "norms around": (LLAMA | {"norm_place": "around"}, {"dp": 2, "tp": 4, "zero": 1} | SEQUENCE),
    "weighed input": (MIXTRAL | {"moe.weigh": "input"}, {"dp": 8, "zero": 1, "ep": 4}),
    "latents in fp8": (DEEPSEEK, {"dp": 8, "zero": 1, "ep": 8}),
    "latents in fp8 by nodes": (DEEPSEEK, {"dp": 64, "zero": 1, "ep": 64, "dispatch": "node-aware"}),
    "dense in fp8": (LLAMA, {"dp": 2, "tp": 4, "zero": 1} | SEQUENCE),
    "adapters": (ADAPTED, {"dp": 8, "zero": 1}),
    "adapters over tp": (ADAPTED, {"dp": 2, "tp": 4, "zero": 1} | SEQUENCE),
    "adapters again": (ADAPTED, {"dp": 4, "pp": 2, "zero": 1, "recompute": "full"}),
    "adapters of some": (ADAPTED | {"adapter.targets": ["query", "value"]}, {"dp": 8, "zero": 3}),
    "adapters with zb-h1": (ADAPTED, {"dp": 4, "pp": 2, "zero": 1, "schedule": "zb-h1"}),
    "adapters in nf4": (IN_NF4 | {"adapter.double_quantization": True}, {"dp": 8, "zero": 1}),
    "adapters in nf4 over tp": (IN_NF4, {"dp": 2, "tp": 4, "zero": 1} | SEQUENCE),
    "adapters in nf4 again": (IN_NF4, {"dp": 8, "zero": 3, "recompute": "full"}),
    "adapters beside experts": (EXPERTS_ADAPTED, {"dp": 8, "zero": 1, "ep": 8}),
    "adapters beside experts over tp": (EXPERTS_ADAPTED, {"dp": 2, "tp": 4, "zero": 1} | SEQUENCE),
    "adapters beside experts in nf4": (EXPERTS_ADAPTED | {"adapter.base": "nf4"}, {"dp": 8, "zero": 1}),
    "adapters in experts": (EXPERTS_ADAPTED | IN_EXPERTS, {"dp": 8, "zero": 1, "ep": 8}),
    "adapters in experts again": (EXPERTS_ADAPTED | IN_EXPERTS, {"dp": 8, "zero": 2, "recompute": "full"}),
    "adapters in small experts": (QWEN | IN_EXPERTS, {"dp": 8, "zero": 3}),
    "adapters in small experts in nf4 again": (
        QWEN | IN_EXPERTS | {"adapter.base": "nf4"},
        {"dp": 8, "zero": 1, "recompute": "full"},
    ),
    "waiting in fp8": (DEEPSEEK, {"dp": 8, "pp": 2, "zero": 1, "ep": 8, "schedule": "zb-h1"}),
}
FLOAT8 = {"float8": "blockwise", "float8_weight_gradients": True}


def overrides_of(model: dict[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
    """The fields of a job on CUDA, with microbatches enough for all that are kept at once."""
    overrides = {f"model.{key}": value for key, value in model.items()} | {f"plan.{k}": v for k, v in plan.items()}
    batch = plan.get("dp", 1) * 2 * plan.get("pp", 1)
    return overrides | {"precision.compute": "bf16", "batch.global_batch_size": batch, "run.device": "cuda"}


def job_of(folder: Path, overrides: dict[str, Any]) -> JobSpec:
    """The job of some fields, and of defaults."""
    (folder / "job.toml").write_text("")
    return load_job(str(folder / "job.toml"), [f"{key}={json.dumps(value)}" for key, value in overrides.items()])


@pytest.mark.long
@pytest.mark.parametrize("plan", [{"pp": 2, "zero": 1, "recompute": "full"}, {"pp": 2, "zero": 2}], ids=str)
def test_adapters_of_a_whole_model_are_within_a_hundredth(plan: dict[str, Any], tmp_path: Path) -> None:
    """Of few layers what is added up of other moments is a larger share than of all 32."""
    whole = {"name": "llama3-8b", "sequence": 4096, "adapter.rank": 16}
    job = job_of(tmp_path, overrides_of(whole, {"dp": 4} | plan))
    run = dry_run(job, job.plan.world - 1, "cuda")
    assert 0.99 < run.account.total_bytes / run.peak.total_bytes < 1.01


@pytest.mark.long
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_account_is_the_peak(name: str, tmp_path: Path) -> None:
    """Kinds whose peaks are at other moments are added up, so the account may be more. So it is as on a GPU: over Gloo
    the largest buffers are needed when few activations are left. Where backwards are split it may be a little less:
    what waits for weight gradients is not free in a layer's turn, as the account has it."""
    model, plan = CASES[name]
    overrides = overrides_of(model, plan)
    if "fp8" in name:
        overrides |= {f"precision.{field}": value for field, value in FLOAT8.items()}
        overrides |= {"precision.float8_dispatch": model is DEEPSEEK, "cluster.devices_per_node": 8}
        overrides["cluster.nodes"] = max(1, plan["dp"] * plan.get("pp", 1) // 8)
    job = job_of(tmp_path, overrides)
    for rank in {0, job.plan.world - 1}:
        run = dry_run(job, rank, "cuda")
        ratio = run.account.total_bytes / run.peak.total_bytes
        least = 0.96 if "zb" in name else 0.97
        assert least < ratio < 1.04, f"{ratio:.3f} rank {rank}: account {run.account}, at the peak {run.peak}"
