"""A measured run as llm-analysis's configurations, and its answer.

llm-analysis: Cheng Li, https://github.com/cli99/llm-analysis. README.md says how to get it.

python benchmarks/planners/to_llm_analysis.py --llm-analysis PATH > llm_analysis.csv
"""

import importlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

from answer import Answer, limits_of_all, refuse, write_answers

from shardwright.config.software import software_of
from shardwright.layers.query import Run

# The GPU files that it ships, by our name of the device.
GPUS = {
    "v100-sxm-16g": "v100-sxm-16gb", "v100-sxm-32g": "v100-sxm-32gb", "a100-sxm-40g": "a100-sxm-40gb",
    "a100-sxm-80g": "a100-sxm-80gb", "h100-sxm": "h100-sxm-80gb",
}  # fmt: skip
# The advice of its README where nothing was measured: 0.5 of the peak for training, 0.9 of the memory's bandwidth.
FLOPS_EFFICIENCY, MEMORY_EFFICIENCY = 0.5, 0.9
UNTOLD = ("sequential", "1f1b", "interleaved-1f1b")  # it has no schedule, so no bubble


def faults_of(run: Run) -> list[str]:
    """All that its input can't say about a run."""
    shape, grid = run.shape, run.grid
    known = {
        f"no GPU file for {run.device}": run.device in GPUS,
        "no mixture of experts: FLOPs are those of one dense MLP": shape.experts is None,
        "only heads that together are as wide as the hidden state": shape.head_dim * shape.heads == shape.hidden,
        f"no {grid.schedule} schedule": grid.schedule in UNTOLD,
        "no latent attention": shape.latent is None,
        "no context parallelism": grid.cp == 1,
    } | limits_of_all(run)
    return [fault for fault, can_say in known.items() if not can_say]


def model_of(run: Run) -> dict[str, Any]:
    """Fields of its ModelConfig. Its MLP has two matrices: one of three is told as one 1.5 times as wide."""
    shape = run.shape
    ffn = shape.ffn * 3 // 2 if shape.gated else shape.ffn
    return {
        "name": "row", "num_layers": shape.layers, "n_head": shape.heads, "hidden_dim": shape.hidden,
        "vocab_size": shape.vocab, "max_seq_len": shape.sequence, "num_key_value_heads": shape.kv_heads,
        "ffn_embed_dim": ffn, "expansion_ratio": ffn / shape.hidden,
    }  # fmt: skip


def parallelism_of(run: Run) -> dict[str, int]:
    """Fields of its ParallelismConfig."""
    grid = run.grid
    return {
        "tp_size": grid.tp, "pp_size": grid.pp, "dp_size": grid.dp, "sp_size": grid.tp if grid.sequence_parallel else 1,
    }  # fmt: skip


def training_of(run: Run) -> dict[str, Any]:
    """Arguments of its training(), but for the two enumerations."""
    software = software_of(run.software)
    writes_scores = software.attention in ("torch", "softmax")
    return {
        "batch_size_per_gpu": run.grid.microbatch, "global_batch_size": run.grid.global_batch,
        "seq_len": run.shape.sequence, "flash_attn": not writes_scores,
        "softmax_dropout": writes_scores and software.dropout,
    }  # fmt: skip


class LLMAnalysis:
    """llm-analysis in a folder, with the GPU files that it ships."""

    def __init__(self, folder: Path) -> None:
        sys.path.insert(0, str(folder))
        self._analysis = importlib.import_module("llm_analysis.analysis")
        self._config = importlib.import_module("llm_analysis.config")
        # It reports every step of its reckoning; what is asked for is in what it returns.
        importlib.import_module("llm_analysis.logger").logger.setLevel(logging.CRITICAL)
        gpus = folder / "llm_analysis" / "gpu_configs"
        self._gpus = {
            device: self._config.GPUConfig(**json.loads((gpus / f"{file}.json").read_text(encoding="utf-8")))
            for device, file in GPUS.items()
        }

    def answer(self, run: Run) -> Answer:
        """Step and memory of the first pipeline rank; ValueError with what it can't express."""
        refuse(faults_of(run))
        analysis = self._analysis.LLMAnalysis(
            self._config.ModelConfig(**model_of(run)), self._gpus[run.device], self._config.DtypeConfig(),
            self._config.ParallelismConfig(**parallelism_of(run)), flops_efficiency=FLOPS_EFFICIENCY,
            hbm_memory_efficiency=MEMORY_EFFICIENCY,
        )  # fmt: skip
        recompute = self._analysis.ActivationRecomputation[run.grid.recompute.upper()]
        zero = self._analysis.DSZeRO(run.grid.zero)
        try:
            result = analysis.training(activation_recomputation=recompute, ds_zero=zero, **training_of(run))
        except AssertionError as error:
            raise ValueError(f"llm-analysis refuses it: {error}") from error
        return Answer(result["latency_per_iter"], result["(weight+op_state+grad+act)_memory_per_gpu"] / 1e9)


if __name__ == "__main__":
    write_answers(LLMAnalysis, "--llm-analysis")
