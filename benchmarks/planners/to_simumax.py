"""A measured run as SimuMax's three configurations, and SimuMax's answer.

SimuMax: Moore Threads, https://github.com/MooreThreads/SimuMax, version 1.2. README.md says how to get it.

python benchmarks/planners/to_simumax.py --simumax PATH > simumax.csv
"""

import contextlib
import importlib
import io
import json
import sys
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

from answer import Answer, limits_of_all, refuse, write_answers

from shardwright.config.elementwise_kernels import activation_traffic, loss_traffic, norm_traffic
from shardwright.config.software import software_of
from shardwright.layers.query import Run

# The system files that it ships, by our name of the device, and the one whose links in a node it measured on NVLink.
SYSTEMS = {"a100-sxm-80g": "a100_bf16.json", "b200-sxm": "b200_bf16_ceperm.json"}
NVLINK = "b200_bf16_ceperm.json"
ANY_DEVICE = "b200_bf16_ceperm.json"  # for memory, which depends on no device
SCHEDULES = ("sequential", "1f1b", "interleaved-1f1b")
RECOMPUTE = {"none": None, "selective": "sdp_only", "full": "full_block"}
# Bytes by element in the forward pass from which on an operation is not one kernel.
UNFUSED_NORM_BYTES, UNFUSED_ACTIVATION_BYTES, UNFUSED_LOSS_BYTES = 16, 8, 16
# Its authors' version of TransformerEngine for the B200 runs; the others have none that keeps gradients of weights.
TRANSFORMER_ENGINE = {"megatron-core": "2.11.0"}
SECONDS = {"ms": 1e-3, "s": 1.0}


def faults_of(run: Run) -> list[str]:
    """All that its input can't say about a run, or that is not translated here."""
    return device_faults(run) + plan_faults(run)


def device_faults(run: Run) -> list[str]:
    """The reason why it has no time of any plan on a run's device."""
    return [] if run.device in SYSTEMS else [f"no system file for {run.device}"]


def plan_faults(run: Run) -> list[str]:
    """All that its input can't say about a run's model and plan, or that is not translated here."""
    shape, grid = run.shape, run.grid
    known = {
        f"no ZeRO-{grid.zero}: it warns and prices ZeRO-1": grid.zero <= 1,
        f"no {grid.schedule} schedule": grid.schedule in SCHEDULES,
        f"no context parallelism by {grid.cp_method}": grid.cp == 1,
        "a mixture of experts, not translated here": shape.experts is None,
        "latent attention, not translated here": shape.latent is None,
    } | limits_of_all(run)
    return [fault for fault, can_say in known.items() if not can_say]


def model_of(run: Run) -> dict[str, Any]:
    """Fields of its ModelConfig. Embedding and head are never tied; norms are RMSNorm."""
    shape = run.shape
    return {
        "hidden_size": shape.hidden, "head_num": shape.heads, "kv_head_num": shape.kv_heads,
        "head_size": shape.head_dim, "intermediate_size": shape.ffn, "layer_num": shape.layers,
        "vocab_size": shape.vocab, "use_swiglu": shape.gated,
    }  # fmt: skip


def strategy_of(run: Run) -> dict[str, Any]:
    """Fields of its StrategyConfig. Dropout and overlap are left out: it prices neither."""
    grid, software = run.grid, software_of(run.software)
    writes_scores = software.attention in ("torch", "softmax")
    return {
        "seq_len": run.shape.sequence, "micro_batch_size": grid.microbatch,
        "micro_batch_num": grid.global_batch // (grid.dp * grid.microbatch), "dtype": grid.precision,
        "world_size": grid.world, "tp_size": grid.tp, "pp_size": grid.pp, "interleaving_size": grid.virtual,
        "enable_sequence_parallel": bool(grid.sequence_parallel), "zero_state": grid.zero,
        # Its model of time has no other messages than those that block.
        "pp_comm_async": False,
        "enable_recompute": grid.recompute != "none", "recompute_granularity": RECOMPUTE[grid.recompute],
        "recompute_layer_num": 0 if grid.recompute == "none" else run.shape.layers,
        "use_flash_sdp": not writes_scores, "use_math_sdp": writes_scores,
        "use_fused_norm": norm_traffic(software.norm).rms[0] < UNFUSED_NORM_BYTES,
        "use_fused_swiglu": activation_traffic(software.activation).gated[0] < UNFUSED_ACTIVATION_BYTES,
        "cross_entropy_loss_fusion": loss_traffic(software.loss)[0] < UNFUSED_LOSS_BYTES,
        "grad_reduce_in_bf16": software.gradient_bytes == 2,
        "te_version": TRANSFORMER_ENGINE.get(run.software),
    }  # fmt: skip


def system_of(run: Run, shipped: dict[str, Any], nvlink: dict[str, Any]) -> dict[str, Any]:
    """The shipped system with the links in a node as measured on NVLink, and the run's own bandwidths.

    Its bandwidth between nodes is that of a whole node.
    """
    system = deepcopy(shipped)
    memory = system["accelerator"]["bandwidth"]
    if "gbps" in memory:  # a file of version 1.0: one efficiency for all that is bound by memory
        system["accelerator"]["bandwidth"] = {"default": memory}
    system["num_per_node"] = run.devices_per_node
    networks = system["networks"]
    for node in ("low_intra_node", "high_intra_node"):
        networks[node] = deepcopy(nvlink["networks"][node])
        if run.node_bytes_per_s:
            networks[node]["bandwidth"]["gbps"] = run.node_bytes_per_s / 1e9
    if run.network_bytes_per_s:
        networks["inter_node"]["bandwidth"]["gbps"] = run.devices_per_node * run.network_bytes_per_s / 1e9
    return system


class SimuMax:
    """SimuMax in a folder: its package and its configs/system."""

    def __init__(self, folder: Path) -> None:
        sys.path.insert(0, str(folder))
        self._perf = importlib.import_module("simumax.core.perf_llm").PerfLLM
        self._config = importlib.import_module("simumax.core.config")
        systems = folder / "configs" / "system"
        read = {file: json.loads((systems / file).read_text(encoding="utf-8")) for file in {*SYSTEMS.values(), NVLINK}}
        self._systems = {device: read[file] for device, file in SYSTEMS.items()}
        self._nvlink, self._any_device = read[NVLINK], read[ANY_DEVICE]

    def answer(self, run: Run) -> Answer:
        """Step and memory of the fullest stage, memory alone for a device without a system file; ValueError with what
        it can't express."""
        if plan_faults(run):
            refuse(faults_of(run))
        without_time = "; ".join(device_faults(run))
        # It warns of what it leaves out with every plan, and prints the padding of the vocabulary.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            try:
                perf = self._estimated(run)
                step_s = 0.0 if without_time else step_seconds(perf)
                stages = perf.get_pp_stage_peak_mem(perf.analysis_mem(), "peak_mem")
            except (AssertionError, RuntimeError) as error:
                # A semicolon would part one reason into two.
                raise ValueError(f"SimuMax refuses it: {error}".replace("; ", ", ")) from error
        return Answer(step_s, max(stages.values()) / 1e9, without_time)

    def _estimated(self, run: Run) -> Any:
        """Its PerfLLM of a run, after its estimate of all operators."""
        config, perf = self._config, self._perf()
        system = self._systems.get(run.device, self._any_device)
        perf.configure(
            config.StrategyConfig.init_from_dict(strategy_of(run)),
            config.ModelConfig.init_from_dict(model_of(run)),
            config.SystemConfig.init_from_dict(system_of(run, system, self._nvlink)),
        )
        perf.run_estimate()
        return perf


def step_seconds(perf: Any) -> float:
    """Seconds of a step, which it prints in a unit of its choice."""
    value, unit = perf.analysis_cost().get("duration_time_per_iter").split()
    return float(value) * SECONDS[unit]


if __name__ == "__main__":
    write_answers(SimuMax, "--simumax")
