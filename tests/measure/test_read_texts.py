"""Software, months and facts that texts of a row state: benchmarks/truth/read_software.py and read_facts.py."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

TRUTH = Path(__file__).parents[2] / "benchmarks" / "truth"
sys.path.append(str(TRUTH))
from fill_columns import COLUMNS, filled  # noqa: E402
from read_facts import says  # noqa: E402
from read_software import month_of, newest_release  # noqa: E402


@pytest.mark.parametrize(
    ("source", "notes", "software"),
    [
        # Programs over transformers: who shards the model decides, and whose kernels it has.
        ("InternLM/xtuner @4d2758e docs", "ZeRO-3; batch 1", "deepspeed"),
        ("hiyouga/LLaMA-Factory README", "DeepSpeed 0.14.2, PyTorch 2.2.0", "deepspeed@2024-04"),
        ("axolotl-ai-cloud/axolotl examples", "FSDP; 12 March 2025", "transformers@2025-03"),
        ("axolotl-ai-cloud/axolotl examples", "Liger kernels, FSDP", "liger"),
        ("axolotl-ai-cloud/axolotl examples", "no Liger kernels, DeepSpeed", "deepspeed"),
        ("huggingface/trl pull request 6845, 21 August 2026", "FSDP 2", "transformers@2026-08"),
        ("yandex/YaFSDP README", "FSDP beside YaFSDP", "transformers"),
        ("modelscope/ms-swift examples/megatron/long_text.sh", "", "megatron-core"),
        # Megatron-LM is Megatron Core with Transformer Engine in fp8, on Blackwell and since July 2024.
        ("NVIDIA/Megatron-LM issue 5, 3 May 2023", "", "megatron-lm@2023-05"),
        ("NVIDIA/Megatron-LM pull request 29, 13 February 2025", "", "megatron-core@2025-02"),
        ("NVIDIA/Megatron-LM issue, 2 March 2025", "local transformer impl", "megatron-lm@2025-03"),
        ("someone's log", "Megatron-LM; container nvcr.io/nvidia/pytorch:23.10-py3", "megatron-lm@2023-10"),
        ("someone's log", "Megatron-LM core_v0.12.1", "megatron-core@2025-05"),
        # Containers, rounds and releases.
        ("docs.nvidia.com performance summary", "NeMo 25.02, fp8 by tensor", "nemo@2025-02"),
        ("mlcommons/training_results_v3.1 @1 NVIDIA/results", "", "nemo@2023-11"),
        ("training_results_v6.0 @eabf (a copy) HPE/results/gpt_oss_20b", "", "megatron-bridge@2026-05"),
        ("pytorch/torchtitan @1 docs", "torch 2.6 nightly", "torchtitan@2025-01"),
        ("public log", "torch.compile and torch.autocast on one GPU, PyTorch 2.8.0", "torch@2025-08"),
        ("karpathy/nanoGPT issue", "", "nanogpt"),
        ("NVIDIA-NeMo/Automodel docs/performance-summary.mdx", "", "automodel"),
        ("foundation-model-stack/fms-fsdp README", "", "fsdp"),
    ],
)
def test_software_by_names_of_programs(source: str, notes: str, software: str) -> None:
    assert filled({"source": source, "notes": notes})["software"] == software


def test_products_in_fp8_and_blackwell_need_megatron_core() -> None:
    row = {"source": "NVIDIA/Megatron-LM examples/llama"}
    assert filled(row)["software"] == "megatron-lm"
    assert (
        filled(row | {"precision": "fp8"})["software"] == filled(row | {"gpu": "GB200"})["software"] == "megatron-core"
    )
    assert filled(row | {"gpu": "H200"})["software"] == "megatron-lm"


def test_shards_of_state_alone_are_deepspeeds() -> None:
    """Stage 3 without a word may be either's: FSDP has the kernels of transformers alone."""
    row = {"source": "hiyouga/LLaMA-Factory README"}
    software = [filled(row | {"zero_stage": stage})["software"] for stage in ("0", "1", "2", "3")]
    assert software == ["transformers", "deepspeed", "deepspeed", "transformers"]
    assert filled(row | {"zero_stage": "2", "notes": "FSDP"})["software"] == "transformers"
    assert filled(row | {"zero_stage": "3", "notes": "ZeRO-3"})["software"] == "deepspeed"


@pytest.mark.parametrize(
    ("texts", "month"),
    [
        ("PyTorch 2.2.0, DeepSpeed 0.14.2", "2024-04"), ("torch 1.13", "2022-10"), ("NGC's PyTorch 20.12", "2020-12"),
        ("flash_attn 2.3.4; torch 2.1", "2023-10"), ("transformers 4.37.2", "2023-12"), ("TE 1.11", "2024-08"),
        ("PyTorch 0.4", ""), ("version 7.5 of nothing", ""), ("rocm/megatron-lm:v25.5_py310", "2025-05"),
    ],
)  # fmt: skip
def test_the_newest_release_that_is_named(texts: str, month: str) -> None:
    assert newest_release(texts) == month


def test_no_run_is_older_than_its_model() -> None:
    assert month_of("PyTorch 1.13, Llama 2 7B", "a page") == "2023-07"
    assert month_of("PyTorch 2.8, Llama 2 7B", "a page") == "2025-08"
    assert month_of("Llama 2 7B", "issue 100, 7 August 2023") == "2023-08"
    assert month_of("Llama 2 7B", "a page") == ""  # how much later it ran is not known


CLAUSES = {
    "weights, gradients and moments in bf16 without a copy": {"grads": "bf16", "moments": "bf16", "masters": "none"},
    "gradients reduced in float32": {"grads": "fp32"},
    "gradients reduced in 16 bits": {"grads": "bf16"},
    "HYBRID_SHARD": {"shard_group": "4"},
    "Leonardo, HDR100": {"network": "infiniband"},
    "p5.48xlarge": {"network": "efa"},
    "--overlap-grad-reduce": {"overlap": "dp"},
    "tp_comm_overlap off": {"overlap": "no-tp"},
    "moe_router_force_load_balancing": {"routing": "forced"},
    "hybrid-ep": {"dispatcher": "hybridep"},
    "all-to-all dispatcher": {"dispatcher": "all-to-all"},
    "FULL_CUDA_GRAPH=1": {"graphs": "step"},
    "CUDA graphs by layer": {"graphs": "parts"},
    "without CUDA graphs": {"graphs": "none"},
    "FSDP's CPUOffload": {"offload": "optimizer parameters"},
    "ZeRO-Offload": {"offload": "optimizer"},
    "activations offloaded": {"offload": "activations"},
    "max_memory_allocated": {"memory_kind": "allocator"},
    "GiB reserved": {"memory_kind": "reserved"},
    "MiB of nvidia-smi": {"memory_kind": "driver"},
    "compiled": {"compiled": "1"},
    "not compiled": {"compiled": "0"},
    "compile = false": {"compiled": "0"},
    "updated by Adafactor": {"optimizer": "adafactor"},
    "the loss is computed in eight parts": {"loss_by_parts": "1"},
    "no dropout": {"dropout": "0"},
    "no_sync over accumulation": {"no_sync": "1"},
    "FlashAttention 4": {"attention": "cudnn"},
}
FILLER = ("seconds of the log", "batch 16", "a node of 8", "mean of 20 steps", "tied embeddings")


@pytest.mark.parametrize("clause", CLAUSES)
def test_facts_in_words(clause: str) -> None:
    row = filled({"notes": clause, "gpus_per_node": "4", "peak_mem_gb": "7"})
    facts = {name: row[name] for name in COLUMNS if row[name] and name not in ("software", "date")}
    assert facts == CLAUSES[clause]


@given(st.sampled_from(sorted(CLAUSES)), st.permutations(FILLER), st.integers(0, len(FILLER)))
def test_a_fact_stays_wherever_it_stands(clause: str, others: list[str], place: int) -> None:
    """Other words before and behind it change no fact, and add none."""
    notes = "; ".join([*others[:place], clause, *others[place:]])
    alone, among = (filled({"notes": text, "gpus_per_node": "4", "peak_mem_gb": "7"}) for text in (clause, notes))
    assert {name: alone[name] for name in COLUMNS} == {name: among[name] for name in COLUMNS}


@pytest.mark.parametrize(
    ("notes", "said"),
    [
        ("with dropout", "1"), ("no dropout", "0"), ("without attention dropout", "0"), ("dropout = 0.0", "0"),
        ("dropout: off", "0"), ("dropout in attention, no dropout in MLPs", ""), ("batch 8", ""),
    ],
)  # fmt: skip
def test_denials(notes: str, said: str) -> None:
    assert says(notes, r"\bdropout\b") == said


@pytest.mark.parametrize(
    ("model", "hidden", "heads", "facts"),
    [
        ("GPT-OSS 120B", 2880, 64, {"head_dim": "64", "window": "128", "window_every": "2", "bias": "1"}),
        ("Qwen3-30B-A3B", 2048, 32, {"head_dim": "128", "window": ""}),
        ("Gemma 3 12B", 3840, 16, {"head_dim": "256", "window": "1024", "window_every": "6"}),
        ("DeepSeek-V3, 4 layers of 61", 7168, 128, {"q_rank": "1536", "kv_rank": "512"}),
        ("Llama 3 8B", 4096, 32, {"head_dim": "", "window": ""}),
        ("a model of our own", 2880, 64, {"head_dim": "", "window": ""}),
        ("Qwen3 of our own width", 1000, 20, {"head_dim": ""}),
    ],
)
def test_facts_of_models_of_the_catalog(model: str, hidden: int, heads: int, facts: dict[str, str]) -> None:
    row = filled({"model": model, "hidden": str(hidden), "heads": str(heads)})
    assert {name: row[name] for name in facts} == facts
    assert filled({"model": model, "hidden": str(hidden), "heads": str(heads), "head_dim": "7"})["head_dim"] == "7"
