"""Columns that are filled from the texts of older tables: benchmarks/truth/fill_columns.py."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.measure.measured_runs.runs import read_runs
from support.ranks import PATIENCE_S

TRUTH = Path(__file__).parents[2] / "benchmarks" / "truth"
sys.path.append(str(TRUTH))
from fill_columns import COLUMNS, filled, flops_counted, mentioned_attention, with_earlier_facts  # noqa: E402


@pytest.mark.parametrize(
    ("prose", "kernel"),
    [
        ("no flash attention", "none"), ("without FlashAttention-2", "none"),
        ("did not yet use flash_attention", "none"),
        ("FlashAttention not used", "none"), ("flash attention: off", "none"), ("non-flash-attention", "none"),
        ("w/o FlashAttention", "none"), ("FlashAttention = False", "none"), ("flash attention disabled; tp 2", "none"),
        ("FlashAttention", "flash1"), ("flash_attention2", "flash2"), ("FlashAttention v3", "flash3"),
        ("FlashAttention; no sequence parallel", "flash1"), ("no dropout with FlashAttention", "flash1"),
        ("FlashAttention-2, arXiv 2307.08691: no FlashAttention", "none"), ("not sharded; flash attention 2", "flash2"),
        ("fused softmax", ""),
    ],
)  # fmt: skip
def test_attention_in_prose(prose: str, kernel: str) -> None:
    assert mentioned_attention(prose) == kernel


@pytest.mark.parametrize(
    ("source", "software", "attention", "date"),
    [
        ("someone, arXiv 2104.00001", "", "", "2021-04"),
        ("someone, 2022", "", "", "2022-06"),
        ("The Llama 3 herd of models, arXiv 2407.21783", "llama3@2024-07", "", ""),
        ("NVIDIA NeMo", "nemo", "", ""),
        ("DeepSeek-V2, arXiv 2405.04434", "hai-llm@2024-05", "", ""),
        ("Megatron-DeepSpeed with FlashAttention-2, 2023", "megatron-deepspeed@2023-06", "flash2", ""),
        ("arXiv 2104.04473 without FlashAttention", "megatron-lm@2021-04", "", ""),
        ("arXiv 2407.00001, flash attention 3", "", "flash3", "2024-07"),
        ("arXiv 2407.00001, no flash attention", "", "fused-softmax", "2024-07"),
        ("nanotron 2025-02", "nanotron@2025-02", "", ""),
        ("Megatron-Bridge @067f987, its recipe: fp8 attention", "megatron-bridge", "cudnn-fp8", ""),
        ("JAX on GPUs", "jax", "", ""),
        ("arXiv 2104.04473, table 2, DeepSpeed ZeRO-3", "deepspeed@2021-04", "", ""),
    ],
)
def test_software_in_prose(source: str, software: str, attention: str, date: str) -> None:
    row = filled({"source": source})
    assert (row["software"], row["attention"], row["date"]) == (software, attention, date)


@pytest.mark.parametrize(
    ("prose", "counted"),
    [
        ("", ""),
        ("source reports tokens/s only", ""),
        ("model FLOPs, full attention, no recompute", "model"),
        ("MFU: 72*B*L*s*h^2*(1+s/6h+V/12hL), full attention; HFU adds selective attention recompute", "model"),
        ("full (non-causal) attention in model FLOPs", "model"),
        ("hardware FLOPs incl. recompute forward: 96*B*s*l*h^2*(1+s/6h+V/16lh)", "hardware"),
        ("SC21 Megatron formula (counts recompute when checkpointing on)", "hardware"),
        ("Model TFLOP/s: causal attention halved, no recompute", "model-causal"),
        ("6N, no attention", "model-6n"),
        ("6ND", "model-6n"),
        ("per token 6*N_params + 12*L*d*s (full attention); HFU=4/3 with checkpointing", "model"),
        ("HFU, without attention", "hardware-6n"),
    ],
)
def test_a_convention_in_prose(prose: str, counted: str) -> None:
    assert flops_counted(prose) == counted


def test_filled_columns_stay() -> None:
    notes = "head_dim 64; MLA q_lora 96, kv_lora 32; etp 2; zero1=4; BF16 Adam moments; EP overlap; nvidia-smi"
    row = filled({"notes": notes, "head_dim": "256", "expert_tp": "1", "peak_mem_gb": "7", "software": "mine"})
    names = (
        "head_dim",
        "q_rank",
        "kv_rank",
        "expert_tp",
        "shard_group",
        "moments",
        "overlap",
        "memory_kind",
        "software",
    )
    assert [row[name] for name in names] == ["256", "96", "32", "1", "4", "bf16", "a2a", "driver", "mine"]


@pytest.mark.parametrize(
    ("model", "notes", "routing"),
    [
        ("Qwen3-30B-A3B", "mock data, forced balance", "forced"),
        ("DeepSeek-V3", "mock data, forced expert balance", "forced"),
        ("Qwen3-30B-A3B", "natural routing, real data", "balanced"),
        ("GPT-OSS 20B", "natural routing (not forced), real data", "free"),
        ("GPT-OSS 20B", "real data", ""),
    ],
)
def test_routing_in_prose(model: str, notes: str, routing: str) -> None:
    assert filled({"model": model, "notes": notes})["routing"] == routing


def test_overlap_dispatchers_and_graphs_in_prose() -> None:
    row = filled({"notes": "DP overlap; no EP overlap, without TP overlap; all-to-all dispatcher, no CUDA graphs"})
    assert (row["overlap"], row["dispatcher"], row["graphs"]) == ("dp no-a2a no-tp", "all-to-all", "none")
    row = filled({"notes": "HybridEP with EP overlap, full-iteration CUDA graphs"})
    assert (row["overlap"], row["dispatcher"], row["graphs"]) == ("a2a", "hybridep", "step")
    assert filled({"notes": "TE CUDA graphs"})["graphs"] == "parts"


@pytest.mark.parametrize(
    ("notes", "measured", "oom"),
    [
        ("Jean Zay; pp partition type:transformer|embedding; OOM", "", "yes"),
        ("CUDA out of memory", "", "yes"),
        ("microbatches of 8 are OOM", "", ""),
        ("ZeRO-1; OOM", "1.5", ""),  # a part of the table ran out, and this row was measured
    ],
)
def test_what_ran_out_of_memory(notes: str, measured: str, oom: str) -> None:
    assert filled({"notes": notes, "step_time_s": measured}).get("oom", "") == oom


@pytest.mark.parametrize(
    ("notes", "layers"),
    [
        ("only 8 of 32 layers", "8"),
        ("1 layer recomputed fully in each virtual stage (32 of 61); DeepEP", "32"),
        ("tuned layout and full recompute of 9 of 61 layers: 0,1,2", "9"),
        ("full recompute; mean of steps 5 of 20", ""),
    ],
)
def test_layers_that_are_recomputed(notes: str, layers: str) -> None:
    assert filled({"notes": notes, "recompute": "full"})["recompute_layers"] == layers


@pytest.mark.parametrize(
    ("source", "software"),
    [
        ("PrimeIntellect-ai/prime-rl benchmarks/baselines", "fsdp"),
        ("prime-rl configs/benchmark; torchtitan 9e159aed7", "torchtitan"),
        ("own trainer on transformers 4.49", "transformers"),
        ("karpathy/nanochat @92d63d4e", "nanogpt"),
        ("own PyTorch script", "torch"),
    ],
)
def test_programs_of_peoples_own(source: str, software: str) -> None:
    assert filled({"source": source})["software"].partition("@")[0] == software


def test_a_table_of_plans_that_ran_out_is_judged(tmp_path: Path) -> None:
    """In the old format, where notes alone say so."""
    table, result = tmp_path / "old.csv", tmp_path / "filled.csv"
    with (TRUTH / "oom.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, [name for name in rows[0] if name not in (*COLUMNS, "oom")], extrasaction="ignore"
        )
        writer.writeheader()
        writer.writerows(rows)
    fill = [sys.executable, str(TRUTH / "fill_columns.py"), str(table), str(result)]
    subprocess.run(fill, check=True, timeout=PATIENCE_S)
    assert {row.ran_out for row in read_runs(result)} == {True}


def test_a_repeat_has_the_facts_of_the_row_before_it() -> None:
    first, again, other = (
        {"model": "GPT-OSS 20B", "plan_group": group, "notes": notes}
        for group, notes in (
            ("a", "natural routing; head_dim 64"), ("a", "resumed: a repeat"), ("b", "resumed: a repeat"),
        )
    )  # fmt: skip
    rows = with_earlier_facts([filled(row) for row in (first, again, other)])
    assert [(row["routing"], row["head_dim"]) for row in rows] == [("free", "64"), ("free", "64"), ("", "")]


TABLES = ["runs.csv", "oom.csv", "others.csv", "playbook.csv", "playbook-memory.csv", "runs-2026.csv", "unseen.csv"]
TABLES += ["unseen-2.csv", "unseen-3.csv", "offload.csv"]


def test_what_maxtext_recomputes() -> None:
    row = filled({"recompute": "selective", "notes": "MaxText FSDP; layer inputs and q, k, v offloaded"})
    assert row["recompute"] == "activation+attention+norm+up"


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_have_the_columns_that_their_texts_fill(tmp_path: Path, name: str) -> None:
    command = [sys.executable, str(TRUTH / "fill_columns.py"), str(TRUTH / name), str(tmp_path / name)]
    subprocess.run(command, check=True)
    assert (tmp_path / name).read_text() == (TRUTH / name).read_text()
    with (TRUTH / name).open(newline="") as file:
        assert set(COLUMNS) <= set(next(csv.reader(file)))
