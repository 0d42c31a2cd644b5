"""Published runs, row by row: from a line of a table to the run to predict, and to its measurements.

The format is that of benchmarks/truth/README.md. Facts come from columns; facts that only the notes state are moved
into columns first (row_facts.py). The software is that of its column, or the generation whose patterns match source and
notes.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from shardwright.config.base import PlanError
from shardwright.config.cluster import DeviceSpec
from shardwright.config.model_shape import ExpertShape, LatentShape, ModelShape
from shardwright.config.number_types import number_called
from shardwright.cost.calibration import device_of, peak_flops
from shardwright.layers.query import PlanGrid, Run
from shardwright.measure.measured_runs.flops_convention import stated_flops
from shardwright.measure.measured_runs.row_checks import dp_of, row_faults, whole
from shardwright.measure.measured_runs.row_facts import GRADS, Row, schedule_of, with_facts
from shardwright.measure.measured_runs.run_table import read_lines
from shardwright.measure.measured_runs.software_inference import software_of_row


@dataclass(frozen=True)
class Measured:
    """One row: the run to predict (or None, and the `reason`), and its measurements (0 is unknown). `family` is the
    collection of the row, `publication` its document; rows of one `group` have the same plan."""

    id: str
    family: str
    publication: str
    tier: str
    group: str
    is_latest: bool
    device: str
    run: Run | None
    reason: str
    step_s: float
    memory_gb: float
    sees_device: bool  # memory as the driver reports it, which is more than the allocator's
    says_recompute: bool  # True if the row states its recomputation
    knows_recompute: bool  # True if its source states it, too: the row's may be inferred
    of_last_rank: bool  # memory of the last pipeline rank, not of the rank with the most


def read_runs(path: Path) -> list[Measured]:
    """All rows of a file. PlanError with every faulty row and its line, or if the file is not a table of runs."""
    faults: list[str] = []
    lines = read_lines(path, faults)
    faults += [f"{line.where()}: {fault}" for line in lines for fault in row_faults(with_facts(line.row))]
    if faults:
        raise PlanError(f"file {path}", faults)
    return [measured(line.row) for line in lines]


def measured(row: Row) -> Measured:
    """One row that was checked. A row that can't be predicted has a reason."""
    row = with_facts(row)
    run, reason = None, ""
    try:
        run = run_of_row(row)
    except (ValueError, KeyError, ArithmeticError) as error:
        reason = str(error.args[0])
    step_s = _step_s(row, run)
    return Measured(
        id=row["id"],
        family=row["id"].split("-")[0],
        publication=_publication(row.get("source") or ""),
        tier=row.get("tier") or "A",
        group=row.get("plan_group") or row["id"],
        is_latest=row.get("latest", "1") != "0",
        device=row["gpu"],
        run=run,
        reason=reason,
        step_s=step_s,
        memory_gb=_float(row, "peak_mem_gb"),
        says_recompute=bool(row.get("recompute")),
        knows_recompute=bool(row.get("recompute")) and "HEAD" not in row.get("notes", ""),
        sees_device=row.get("memory_kind") == "driver" or "nvidia-smi" in row.get("notes", ""),
        of_last_rank=row.get("memory_kind") == "last-rank" or "on the LAST rank" in row.get("notes", ""),
    )


def _publication(source: str) -> str:
    """The document that a source names: up to its revision in a repository ("@", hexadecimal), or all of the source."""
    revision = re.search(r"@[0-9a-f]{7,40}\b", source)
    return source[: revision.end()] if revision else source


def _float(row: Row, name: str) -> float:
    return float(row[name]) if row.get(name) else 0.0


def _needed(row: Row, name: str) -> int:
    if not row.get(name):
        raise ValueError(f"the row does not say {name}")
    return whole(row, name)


def run_of_row(row: Row) -> Run:
    """The run that a row describes. ValueError or KeyError names what is missing."""
    device = row["gpu"]
    if device == "H100" and "HBM2e" in row.get("notes", ""):
        device = "H100-96G"
    spec = device_of(device)
    shape, grid = shape_of_row(row), grid_of_row(row, spec)
    # Links of a rack or a pod reach beyond a host; devices without links of their own share a host.
    node = whole(row, "gpus_per_node") or (spec.link_domain if spec.link_domain > 1 else min(8, grid.world))
    node = max(node, spec.link_domain) if spec.link_domain > 8 else node
    return Run(
        shape,
        grid,
        device=spec.name,
        software=software_of_row(row, grid),
        devices_per_node=node,
        node_bytes_per_s=_float(row, "intra_bw") * 1e9,
        network_bytes_per_s=_float(row, "inter_bw") * 1e9,
    )


def shape_of_row(row: Row) -> ModelShape:
    """The model that a row describes."""
    hidden, layers = _needed(row, "hidden"), _needed(row, "layers")
    heads = whole(row, "heads") or max(1, hidden // 128)
    kv_heads = whole(row, "kv_heads") or heads
    gated = whole(row, "gated_mlp") == 1
    experts = None
    if whole(row, "experts") > 1:
        width = whole(row, "expert_ffn") or whole(row, "ffn")
        experts = ExpertShape(
            num=whole(row, "experts"),
            topk=whole(row, "topk", 1),
            ffn=width,
            shared_ffn=width * whole(row, "shared_experts"),
            dense_layers=whole(row, "dense_layers"),
        )
    latent = None
    if row.get("kv_rank"):
        rotary = {"rotary": whole(row, "rope_dim")} if row.get("rope_dim") else {}
        latent = LatentShape(query_rank=whole(row, "q_rank"), key_rank=whole(row, "kv_rank"), **rotary)
    is_old = not gated and kv_heads == heads  # a model like GPT-3, with learned positions and tied embeddings
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=whole(row, "head_dim") or hidden // heads,
        ffn=whole(row, "ffn") or 4 * hidden,
        gated=gated,
        vocab=whole(row, "vocab") or 51200,
        sequence=_needed(row, "seq"),
        tied=is_old,
        learned_positions=is_old,
        experts=experts,
        latent=latent,
    )


def _schedule(row: Row, pp: int) -> str:
    """The schedule by plan.schedule's name; if the row has none, 1F1B, interleaved if a rank has several stages."""
    if schedule := schedule_of(row.get("schedule") or ""):
        return schedule
    return "sequential" if pp == 1 else "interleaved-1f1b" if whole(row, "vp", 1) > 1 else "1f1b"


def _virtual(row: Row, schedule: str, pp: int) -> int:
    """Stages of a rank. An interleaved schedule without a number has one for each of its layers, as large runs do."""
    if schedule == "interleaved-1f1b" and not row.get("vp"):
        return max(1, round(_needed(row, "layers") / pp))
    return whole(row, "vp", 1) or 1


def grid_of_row(row: Row, device: DeviceSpec) -> PlanGrid:
    """The plan that a row describes."""
    notes = row.get("notes", "")
    tp, pp, cp, ep = (whole(row, axis, 1) or 1 for axis in ("tp", "pp", "cp", "ep"))
    if not row.get("dp"):
        _needed(row, "gpus")
    dp, microbatch = dp_of(row), whole(row, "mbs", 1)
    recompute = row.get("recompute") or "none"
    if (recompute == "selective" and "op-level" in notes) or "selective op" in notes:
        recompute = "matmul"
    schedule = _schedule(row, pp)
    layers, num_recomputed = _needed(row, "layers"), whole(row, "layers_again")
    policies = (
        (recompute,) * num_recomputed + ("none",) * (layers - num_recomputed) if 0 < num_recomputed < layers else ()
    )
    gradient_bytes = GRADS.get(row.get("grads") or "", 0)
    return PlanGrid(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        expert_tp=whole(row, "expert_tp", 1),
        virtual=_virtual(row, schedule, pp),
        schedule=schedule,
        sequence_parallel=row.get("sp") == "1" and tp > 1,
        zero=whole(row, "zero_stage"),
        zero_ranks=whole(row, "shard_group"),
        microbatch=microbatch,
        global_batch=whole(row, "gbs") or dp * microbatch,
        recompute=recompute,
        policies=policies,
        precision=_precision(row.get("precision") or "", device),
        gradient_bytes=gradient_bytes,
        reduce_bytes=gradient_bytes,
    )


def _precision(stated: str, device: DeviceSpec) -> str:
    """The dtype of the products: bf16 if a row has none, or fp16 if a device has no bf16."""
    precision = number_called(stated) or "bf16"
    return "fp16" if precision == "bf16" and not device.peak_flops("bf16") else precision


def _step_s(row: Row, run: Run | None) -> float:
    """Measured seconds of a step; 0 if the row has no rate that can be converted."""
    if row.get("step_time_s"):
        return float(row["step_time_s"])
    if run is None:
        return 0.0
    tokens, gpus = float(run.grid.global_batch * run.shape.sequence), whole(row, "gpus") or int(run.grid.world)
    flops = tokens * stated_flops(row.get("flops_convention") or "", run, 1e9 * _float(row, "params_b"))
    if row.get("tokens_per_s_per_gpu"):
        return tokens / (float(row["tokens_per_s_per_gpu"]) * gpus)
    if row.get("tflops_per_gpu"):
        return flops / (float(row["tflops_per_gpu"]) * 1e12 * gpus)
    if row.get("mfu") and row.get("flops_convention"):
        return flops / (float(row["mfu"]) * peak_flops(run) * gpus)
    return 0.0
