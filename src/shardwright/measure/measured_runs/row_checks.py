"""The check that the plan of a measured run could have run: the checks of a job, as far as a row's columns allow.

A row becomes the job that it describes, and missing values are filled so that nothing follows from them. The checks are
those of config/checks/check.py and of the schedules. Other software can do more than our runtime, and rows may say so:

- it holds a key/value head on several tp ranks if tp is more than the number of heads (Megatron-core's
  num_query_groups < tensor_model_parallel_size; GSPMD), as long as one divides the other;
- its first and its last stage may be without a layer, or have one less (Llama 3, arXiv 2407.21783, section 3.3.2; Zero
  Bubble, arXiv 2401.10241, table 3), which plan.layout says in a job;
- experts may be cut over any degree, not only 1 or tp (Megatron-core's expert_tensor_parallel_size).
"""

import math
import re
from dataclasses import dataclass
from typing import Any

from shardwright.config.checks.check import job_faults
from shardwright.config.load import validate_fields
from shardwright.config.phrase import say
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.software import software_of
from shardwright.layers.query import Run
from shardwright.measure.measured_runs.row_facts import Row, adapter_of, schedule_of, value_faults, whole
from shardwright.schedule.job_program import plan_faults

# The column for each field of a job in messages.
_COLUMNS = {
    "model.layers": "layers",
    "model.hidden": "hidden",
    "model.heads": "heads",
    "model.kv_heads": "kv_heads",
    "model.head_dim": "head_dim",
    "model.ffn": "ffn",
    "model.vocab": "vocab",
    "model.sequence": "seq",
    "model.moe.experts": "experts",
    "model.moe.top_k": "topk",
    "model.moe.ffn": "expert_ffn",
    "model.moe.shared_experts": "shared_experts",
    "model.moe.first_dense": "dense_layers",
    "model.latent.q_rank": "q_rank",
    "model.latent.kv_rank": "kv_rank",
    "plan.microbatch_size": "mbs",
    "plan.virtual_stages": "vp",
    "plan.zero_ranks": "shard_group",
    "plan.offload_optimizer": "offload",
    "plan.offload_parameters": "offload",
    "plan.zero": "zero_stage",
    "plan.sequence_parallel": "sp",
    "batch.global_batch_size": "gbs",
}


@dataclass(frozen=True)
class RowCheck:
    """The faults of a row. `is_readable` if its values can be read, although they may be too few or contradict each
    other: then the run that it describes has a prediction."""

    faults: list[str]
    is_readable: bool = True


def check_row(row: Row) -> RowCheck:
    """All faults of a row. None if it could have run as it says."""
    if faults := value_faults(row):
        return RowCheck(faults, is_readable=False)
    rank_faults = _rank_faults(row)
    faults = [*_missing(row), *rank_faults]
    has_shape = all(row.get(name) for name in ("layers", "hidden", "seq"))
    if not has_shape or not (row.get("dp") or row.get("gpus")):
        return RowCheck(faults)  # the prediction reports these missing columns
    job, limits = validate_fields(_job_fields(row))
    if limits:
        return RowCheck([_in_columns(fault) for fault in limits], is_readable=False)
    if not rank_faults:
        faults += [_in_columns(fault) for fault in (*_expert_rank_faults(row), *(job_faults(job) or plan_faults(job)))]
    stages = whole(row, "pp", 1) * whole(row, "vp", 1)
    return RowCheck(faults, is_readable=stages <= whole(row, "layers") + 2)  # one may be without layers at either end


def stage_faults(run: Run) -> tuple[str, ...]:
    """The fault of layers that do not divide into stages, if the run's software has only stages of equal layers. The
    first and the last stage may have one less."""
    stages, layers = int(run.grid.pp * run.grid.virtual), run.shape.layers
    if software_of(run.software).uneven_stages is not False or any((layers + less) % stages == 0 for less in (0, 1, 2)):
        return ()
    software, _, _ = run.software.partition("+")
    return (
        say(
            "layers {layers} do not divide into pp {pp} x vp {virtual} = {stages} stages ({layers} / {stages} = "
            "{quotient:.2f}), and {software} has only stages of equal layers; use layers that divide",
            layers=layers,
            pp=run.grid.pp,
            virtual=run.grid.virtual,
            stages=stages,
            quotient=layers / stages,
            software=software,
        ),
    )


def _missing(row: Row) -> list[str]:
    """Fields of a plan that a row leaves out, each with the value that its prediction assumes."""
    assumed = {"tp": "tp 1", "pp": "pp 1", "mbs": "mbs 1"}
    assumed["gbs"] = say("one microbatch a replica, gbs {gbs}", gbs=dp_of(row) * whole(row, "mbs", 1))
    return [
        say("it does not say {name}, and {value} is assumed; fill the column in", name=name, value=value)
        for name, value in assumed.items()
        if not row.get(name)
    ]


def dp_of(row: Row) -> int:
    """The data-parallel degree: its column, or the devices that the other degrees leave over."""
    other_degrees = whole(row, "tp", 1) * whole(row, "pp", 1) * whole(row, "cp", 1)
    return whole(row, "dp") or max(1, whole(row, "gpus", other_degrees) // other_degrees)


def _rank_faults(row: Row) -> list[str]:
    """Degrees whose product is not the number of devices."""
    axes = [axis for axis in ("dp", "tp", "pp", "cp") if row.get(axis)]
    gpus, product = whole(row, "gpus"), math.prod(whole(row, axis) for axis in axes)
    if not gpus or (product == gpus if "dp" in axes else gpus % product == 0):
        return []
    degrees = " x ".join(f"{axis} {whole(row, axis)}" for axis in axes)
    way_out = (
        say("use degrees whose product is gpus") if "dp" in axes else say("use degrees whose product divides gpus")
    )
    return [
        say(
            "{degrees} = {product:,} ranks, and gpus is {gpus:,}; {way_out}",
            degrees=degrees,
            product=product,
            gpus=gpus,
            way_out=way_out,
        )
    ]


def _expert_rank_faults(row: Row) -> list[str]:
    """Faults of experts cut over more ranks than there are. The check of the job covers degrees that it may have."""
    ep, etp = whole(row, "ep", 1), whole(row, "expert_tp", 1)
    ranks = dp_of(row) * whole(row, "cp", 1) * whole(row, "tp", 1)
    if etp in (1, whole(row, "tp", 1)) or ranks % (ep * etp) == 0:
        return []
    return [
        say(
            "ep {ep} x expert_tp {etp} = {product} does not divide dp x cp x tp = {ranks}, the ranks of a stage; use "
            "degrees whose product does",
            ep=ep,
            etp=etp,
            product=ep * etp,
            ranks=ranks,
        )
    ]


def _job_fields(row: Row) -> dict[str, Any]:
    """The job that a row describes, as nested fields."""
    batch = whole(row, "gbs") or dp_of(row) * whole(row, "mbs", 1)
    optimizer = {"clip_grad_norm": 0.0}  # our asynchronous schedules have no norm to clip
    fields = {"model": _model_fields(row), "plan": _plan_fields(row)}
    return fields | {"batch": {"global_batch_size": batch}, "optimizer": optimizer}


def _model_fields(row: Row) -> dict[str, Any]:
    tp, heads, kv_heads = whole(row, "tp", 1), whole(row, "heads"), whole(row, "kv_heads")
    fields: dict[str, Any] = {
        "layers": whole(row, "layers"),
        "hidden": whole(row, "hidden"),
        "sequence": whole(row, "seq"),
        "positions": "learned",
        "vocab": whole(row, "vocab") or max(2, tp),
        "ffn": whole(row, "ffn") or tp,
    }
    fields["heads"] = heads or math.lcm(tp, kv_heads or 1)
    fields["head_dim"] = whole(row, "head_dim") or (0 if heads else 1)
    is_repeated = kv_heads and tp > kv_heads and tp % kv_heads == 0 and fields["heads"] % tp == 0
    fields["kv_heads"] = tp if is_repeated else kv_heads
    if whole(row, "experts") > 1:
        fields["moe"] = {
            "experts": whole(row, "experts"),
            "top_k": whole(row, "topk", 1),
            "ffn": whole(row, "expert_ffn") or fields["ffn"],
            "shared_experts": whole(row, "shared_experts"),
            "first_dense": whole(row, "dense_layers"),
        }
    if row.get("adapter_rank"):
        fields["adapter"] = adapter_of(row).model_dump()
    if row.get("kv_rank"):
        fields |= {"latent": {"q_rank": whole(row, "q_rank"), "kv_rank": whole(row, "kv_rank")}}
        fields |= {"positions": "rotary", "head_dim": 0, "kv_heads": 0}
    return fields


def _plan_fields(row: Row) -> dict[str, Any]:
    tp, pp, layers = whole(row, "tp", 1), whole(row, "pp", 1), whole(row, "layers")
    schedule = schedule_of(row.get("schedule") or "") or ("sequential" if pp == 1 else "1f1b")
    virtual = whole(row, "vp", 1)
    if virtual > 1 and schedule in ("1f1b", "sequential") and pp > 1:
        schedule = "interleaved-1f1b"
    if SCHEDULES[schedule].stages_per_rank:
        virtual = 1
    elif not row.get("vp"):
        virtual = max(1, layers // pp)
    with_experts, hosted = whole(row, "experts") > 1, (row.get("offload") or "").split()
    etp = whole(row, "expert_tp", 1)
    fields: dict[str, Any] = {
        "dp": dp_of(row),
        "tp": tp,
        "pp": pp,
        "cp": whole(row, "cp", 1),
        "cp_method": row.get("cp_method") or "ring",
        "ep": whole(row, "ep", 1),
        "expert_tp": (etp if etp in (1, tp) else tp) if with_experts else 0,
        "microbatch_size": whole(row, "mbs", 1),
        "schedule": schedule,
        "virtual_stages": virtual,
        "zero": whole(row, "zero_stage", int(bool(row.get("shard_group")))),
        "zero_ranks": whole(row, "shard_group"),
        "offload_optimizer": float("optimizer" in hosted),
        "offload_parameters": "parameters" in hosted,
        # Either value is possible if the row does not say.
        "sequence_parallel": tp > 1 and (row.get("sp") == "1" or (not row.get("sp") and with_experts)),
    }
    stages = pp * (SCHEDULES[schedule].stages_per_rank or virtual)
    if layers < stages <= layers + 2:
        fields["layout"] = [0] * (stages - layers - 1) + [1] * layers + [0]
    return fields


def _in_columns(fault: str) -> str:
    """A fault of a job, with the names of the table's columns."""
    for field, column in _COLUMNS.items():
        fault = re.sub(rf"\b{re.escape(field)}\b(?!\.)", column, fault)
    return re.sub(r"\b(?:plan|model|batch)\.", "", fault)
