"""A measured run as Calculon's three input files, and Calculon's answer.

Calculon: Isaev, McDonald, Dennison, Vuduc, "Calculon: a methodology and tool for high-level co-design of systems and
large language models", SC23. README.md says how to get it.

python benchmarks/planners/to_calculon.py --calculon PATH > calculon.csv
"""

import importlib
import json
import logging
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

from answer import Answer, limits_of_all, refuse, write_answers

from shardwright.config.software import software_of
from shardwright.layers.query import Run

# The system files that it ships, by our name of the device.
SYSTEMS = {"a100-sxm-80g": "a100_80g.json", "h100-sxm": "h100_80g_nvl8.json"}
SCHEDULES = ("sequential", "1f1b", "interleaved-1f1b")
NODE, NETWORK = 0, 1  # the two networks of a system file
# Its capacity check would end a prediction; its authors lift it in the same way in systems/a100_80e.json.
NO_LIMIT_GIB = 80_000_000_000


def faults_of(run: Run) -> list[str]:
    """All that Calculon's input can't say about a run."""
    shape, grid, software = run.shape, run.grid, software_of(run.software)
    known = {
        f"no system file for {run.device}": run.device in SYSTEMS,
        "no mixture of experts": shape.experts is None,
        "no grouped-query attention": shape.kv_heads == shape.heads,
        "no gated MLP": not shape.gated,
        f"no {software.attention} kernel: attention's scores are always kept in memory": software.attention
        in ("torch", "softmax"),
        f"no ZeRO-{grid.zero}": grid.zero <= 1,
        f"no {grid.schedule} schedule": grid.schedule in SCHEDULES,
        "no latent attention": shape.latent is None,
        "no context parallelism": grid.cp == 1,
    } | limits_of_all(run)
    return [fault for fault, can_say in known.items() if not can_say]


def application_of(run: Run) -> dict[str, int]:
    """The model. Embedding and head are not part of Calculon's."""
    shape = run.shape
    return {
        "hidden": shape.hidden, "feedforward": shape.ffn, "seq_size": shape.sequence, "attn_heads": shape.heads,
        "attn_size": shape.head_dim, "num_blocks": shape.layers,
    }  # fmt: skip


def execution_of(run: Run) -> dict[str, Any]:
    """The plan. Fields that a file of theirs for a published run fixes are fixed here too (validation/seqsel/tab5)."""
    grid, domain = run.grid, run.devices_per_node
    with_replicas = grid.tp * grid.dp  # ranks are counted along tp, then dp, then pp
    recompute = {"none": "none", "selective": "attn_only", "full": "full"}[grid.recompute]
    return {
        "num_procs": grid.world, "tensor_par": grid.tp, "pipeline_par": grid.pp, "data_par": grid.dp,
        "tensor_par_net": NODE if grid.tp <= domain else NETWORK,
        "pipeline_par_net": NODE if grid.world <= domain else NETWORK,
        "data_par_net": NODE if with_replicas <= domain else NETWORK,
        "batch_size": grid.global_batch, "microbatch_size": grid.microbatch, "datatype": "float16",
        "fused_activation": False, "attention_type": "multihead", "activation_recompute": recompute,
        "pipeline_interleaving": grid.virtual, "optimizer_sharding": grid.zero == 1 and grid.dp > 1,
        "tensor_par_comm_type": "rs_ag" if grid.sequence_parallel else "ar", "tensor_par_overlap": "none",
        "seq_par_ag_redo": grid.sequence_parallel and recompute != "full",
        "data_par_overlap": software_of(run.software).reduce_overlap and grid.dp > 1,
        "weight_offload": False, "activations_offload": False, "optimizer_offload": False, "training": True,
    }  # fmt: skip


def system_of(run: Run, shipped: dict[str, Any]) -> dict[str, Any]:
    """The shipped system with the run's own bandwidths and no limit of memory; efficiencies are as shipped."""
    system = deepcopy(shipped)
    system["mem1"]["GiB"] = NO_LIMIT_GIB
    system["networks"][NODE]["size"] = run.devices_per_node
    for network, bytes_per_s in ((NODE, run.node_bytes_per_s), (NETWORK, run.network_bytes_per_s)):
        if bytes_per_s:
            system["networks"][network]["bandwidth"] = bytes_per_s / 1e9
    return system


class Calculon:
    """Calculon in a folder, with the system files beside it."""

    def __init__(self, folder: Path) -> None:
        sys.path.insert(0, str(folder))
        self._system = importlib.import_module("calculon.system").System
        self._model = importlib.import_module("calculon.llm.llm").Llm
        self._log = logging.Logger("calculon", logging.CRITICAL)
        self._systems = {
            device: json.loads((folder / "systems" / file).read_text(encoding="utf-8"))
            for device, file in SYSTEMS.items()
        }

    def machine(self, run: Run) -> Any:
        """Its System for a run, which any run on the same devices can use again."""
        return self._system(system_of(run, self._systems[run.device]))

    def evaluate(self, run: Run, machine: Any) -> Answer:
        """The seconds and bytes of one plan, computed as its own search does. ValueError says why it refuses it."""
        model = self._model(self._model.Application(application_of(run)), self._log)
        try:
            model.compile(machine, self._model.Execution.from_json(execution_of(run)))
            model.run(machine)
        except (AssertionError, self._model.Error) as error:
            raise ValueError(f"Calculon refuses it: {error}") from error
        return Answer(model.get_total_time(), model.get_mem_tier1_cap_req() / 1e9)

    def answer(self, run: Run) -> Answer:
        """Step and memory of the first pipeline rank, the fullest one; ValueError with what it can't express."""
        refuse(faults_of(run))
        return self.evaluate(run, self.machine(run))


if __name__ == "__main__":
    write_answers(Calculon, "--calculon")
