"""Published runs, row by row: from a line of a table to what is predicted, and to what was measured.

The format is that of benchmarks/truth/README.md. What a row does not say in a column but in its notes (who shares
ZeRO's shards, a head's width, low ranks of attention) is read from there. The software is the generation whose patterns
match the source and the notes.
"""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwright.cost.calibration import device_of, peak_flops
from shardwright.measure.software import software_of_row
from shardwright.measure.stated import stated_flops
from shardwright.spec.cluster import DeviceSpec
from shardwright.workload.blocks import Experts, Latent
from shardwright.workload.shape import Cut, Run, Shape

Row = Mapping[str, str]


@dataclass(frozen=True)
class Measured:
    """One row: what is predicted (None, and why), and what was measured (0 is not known)."""

    id: str
    family: str
    tier: str
    group: str
    is_latest: bool
    device: str
    run: Run | None
    reason: str
    step_s: float
    memory_gb: float
    sees_device: bool  # memory as the driver reports it, above the allocator's
    says_recompute: bool  # whether the row says what is recomputed
    knows_recompute: bool  # whether its source does, too: it may be inferred
    of_last_rank: bool  # memory of the last pipeline rank, not of the one that has most


def read_runs(path: Path) -> list[Measured]:
    """All rows of a file. ValueError if it is not a table of runs."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or "id" not in rows[0] or "layers" not in rows[0]:
        raise ValueError(f"{path} is not a table of measured runs: it needs a header with id, layers, hidden, gpu, ...")
    return [measured(row) for row in rows]


def measured(row: Row) -> Measured:
    """One row. What can't be predicted says why."""
    run, reason = None, ""
    try:
        run = run_of_row(row)
    except (ValueError, KeyError, ArithmeticError) as error:
        reason = str(error.args[0])
    step_s = _step_s(row, run)
    return Measured(
        id=row["id"], family=row["id"].split("-")[0], tier=row.get("tier") or "A",
        group=row.get("plan_group") or row["id"], is_latest=row.get("latest", "1") != "0", device=row["gpu"], run=run,
        reason=reason, step_s=step_s, memory_gb=_float(row, "peak_mem_gb"),
        says_recompute=bool(row.get("recompute")),
        knows_recompute=bool(row.get("recompute")) and "HEAD" not in row.get("notes", ""),
        sees_device="nvidia-smi" in row.get("notes", ""), of_last_rank="on the LAST rank" in row.get("notes", ""),
    )  # fmt: skip


def _int(row: Row, name: str, default: int = 0) -> int:
    return int(float(row[name])) if row.get(name) else default


def _float(row: Row, name: str) -> float:
    return float(row[name]) if row.get(name) else 0.0


def _needed(row: Row, name: str) -> int:
    if not row.get(name):
        raise ValueError(f"the row does not say {name}")
    return _int(row, name)


def run_of_row(row: Row) -> Run:
    """What a row is about. ValueError or KeyError say what is missing."""
    device = row["gpu"]
    if device == "H100" and "HBM2e" in row.get("notes", ""):
        device = "H100-96G"
    spec = device_of(device)
    shape, cut = shape_of_row(row), cut_of_row(row, spec)
    # Links of a rack or a pod reach beyond a host, and devices without links of their own share one.
    node = _int(row, "gpus_per_node") or (spec.link_domain if spec.link_domain > 1 else min(8, cut.world))
    node = max(node, spec.link_domain) if spec.link_domain > 8 else node
    return Run(
        shape, cut, spec.name, software_of_row(row, cut), node, _float(row, "intra_bw") * 1e9,
        _float(row, "inter_bw") * 1e9,
    )  # fmt: skip


def shape_of_row(row: Row) -> Shape:
    """The model."""
    notes = row.get("notes", "")
    hidden, layers = _needed(row, "hidden"), _needed(row, "layers")
    heads = _int(row, "heads") or max(1, hidden // 128)
    kv_heads = _int(row, "kv_heads") or heads
    found = re.search(r"head_dim (\d+)", notes)
    gated = _int(row, "gated_mlp") == 1
    experts = None
    if _int(row, "experts") > 1:
        width = _int(row, "expert_ffn") or _int(row, "ffn")
        experts = Experts(
            _int(row, "experts"), _int(row, "topk", 1), width, width * _int(row, "shared_experts"),
            _int(row, "dense_layers"),
        )  # fmt: skip
    latent = None
    if low := re.search(r"q_lora (\d+), kv_lora (\d+)", notes):
        latent = Latent(int(low[1]), int(low[2]))
    tied = not gated and kv_heads == heads
    return Shape(
        layers, hidden, heads, kv_heads, int(found[1]) if found else hidden // heads,
        _int(row, "ffn") or 4 * hidden, gated, _int(row, "vocab") or 51200, _needed(row, "seq"), tied, tied, experts,
        latent,
    )  # fmt: skip


# What tables call a schedule, where it is not plan.schedule's name.
_SCHEDULES = {
    "none": "sequential", "interleaved": "interleaved-1f1b", "1f1b-interleaved": "interleaved-1f1b", "zb-1p": "zb-h1",
    "zb-2p": "zb-h2", "zb1p": "zb-h1", "zb2p": "zb-h2", "pipedream-flush": "1f1b",
}  # fmt: skip


def _schedule(row: Row, pp: int) -> str:
    """The schedule in plan.schedule's words; 1F1B, interleaved where stages are, if the row says nothing."""
    said = re.sub(r"[\s_]+", "-", (row.get("schedule") or "").strip().lower())
    if not said:
        return "sequential" if pp == 1 else "interleaved-1f1b" if _int(row, "vp", 1) > 1 else "1f1b"
    return _SCHEDULES.get(said, said)


def _virtual(row: Row, schedule: str, pp: int) -> int:
    """Stages of a rank. An interleaved schedule that does not say has one for each of its layers, as large runs do."""
    if schedule == "interleaved-1f1b" and not row.get("vp"):
        return max(1, round(_needed(row, "layers") / pp))
    return _int(row, "vp", 1) or 1


def cut_of_row(row: Row, device: DeviceSpec) -> Cut:
    """The plan."""
    notes = row.get("notes", "")
    tp, pp, cp, ep = (_int(row, axis, 1) or 1 for axis in ("tp", "pp", "cp", "ep"))
    dp = _int(row, "dp") or max(1, _needed(row, "gpus") // (tp * pp * cp))
    microbatch = _int(row, "mbs", 1)
    recompute = row.get("recompute") or "none"
    some = re.search(r"only (\d+) of \d+ layers", notes)
    if (recompute == "selective" and "op-level" in notes) or "selective op" in notes:
        recompute = "matmul"
    schedule = _schedule(row, pp)
    policies = (recompute,) * int(some[1]) + ("none",) * (_needed(row, "layers") - int(some[1])) if some else ()
    return Cut(
        dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, expert_tp=1, virtual=_virtual(row, schedule, pp),
        schedule=schedule,
        sequence_parallel=row.get("sp") == "1" and tp > 1, zero=_int(row, "zero_stage"), zero_ranks=_shared(notes),
        microbatch=microbatch, global_batch=_int(row, "gbs") or dp * microbatch,
        recompute=recompute, policies=policies, precision=_precision(row.get("precision") or "", device),
    )  # fmt: skip


# Number types as tables write them; the first that is there counts.
_PRECISIONS = {
    "nvfp4": "nvfp4", "mxfp8": "mxfp8", "fp8": "fp8", "float8": "fp8", "fp32": "float32", "float32": "float32",
    "fp16": "fp16", "float16": "fp16", "half": "fp16",
}  # fmt: skip


def _precision(said: str, device: DeviceSpec) -> str:
    """The number type of the products: bf16 where a row does not say another, or fp16 where a device has no bf16."""
    plain = said.lower().replace("bfloat16", "bf16")
    found = next((name for word, name in _PRECISIONS.items() if word in plain), "bf16")
    return "fp16" if found == "bf16" and "bfloat16" not in device.peak_tflops else found


def _shared(notes: str) -> int:
    """Replicas that share one set of ZeRO's shards, where the notes say that not all do."""
    for pattern in (r"zero1=(\d+)", r"FSDP group (\d+), replicated across (?!1 )"):
        if found := re.search(pattern, notes):
            return int(found[1])
    return 0


def _step_s(row: Row, run: Run | None) -> float:
    """Seconds of a step as measured; 0 where the row gives no rate that can be converted."""
    if row.get("step_time_s"):
        return float(row["step_time_s"])
    if run is None:
        return 0.0
    tokens, gpus = float(run.cut.global_batch * run.shape.sequence), _int(row, "gpus") or int(run.cut.world)
    flops = tokens * stated_flops(row.get("flops_convention") or "", run, 1e9 * _float(row, "params_b"))
    if row.get("tokens_per_s_per_gpu"):
        return tokens / (float(row["tokens_per_s_per_gpu"]) * gpus)
    if row.get("tflops_per_gpu"):
        return flops / (float(row["tflops_per_gpu"]) * 1e12 * gpus)
    if row.get("mfu") and row.get("flops_convention"):
        return flops / (float(row["mfu"]) * peak_flops(run) * gpus)
    return 0.0
