"""Jobs whose steps can be predicted, drawn over models, devices, number types and plans."""

from typing import Any

from hypothesis import strategies as st

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.schedule.job_program import plan_faults

DENSE = {"layers": 8, "hidden": 1024, "heads": 16, "kv_heads": 8, "ffn": 4096, "vocab": 32000, "sequence": 2048}
_MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "tied": DENSE | {"tied_embeddings": True, "gated_mlp": False, "activation": "gelu", "norm": "layernorm"},
    "experts": DENSE | {"moe": {"experts": 16, "top_k": 2, "ffn": 1024, "shared_experts": 1, "first_dense": 2}},
    "further": DENSE | {"mtp_layers": 1},
    "wide": DENSE | {"hidden": 8192, "heads": 64, "ffn": 28672, "vocab": 128256, "sequence": 8192},
}
# A device for each kind of links, and for each set of number types.
DEVICES = ("h100-sxm", "a100-sxm-80g", "b200-sxm", "mi300x", "gaudi2", "tpu-v5p", "l40s", "rtx-4090", "v100-sxm-32g")
_NUMBERS: dict[str, dict[str, Any]] = {"bf16": {}, "fp16": {}, "fp8": {"float8": "rowwise"}}
SCHEDULES: dict[str, dict[str, Any]] = {
    name: {"virtual_stages": 2} if name in ("interleaved-1f1b", "looped-bfs") else {}
    for name in SCHEDULES.names
    if name != "auto"
}
_PLANS = st.fixed_dictionaries(
    {
        "dp": st.sampled_from([1, 2, 4]), "tp": st.sampled_from([1, 2, 8]), "cp": st.sampled_from([1, 1, 2]),
        "ep": st.sampled_from([1, 2, 4]), "zero": st.integers(0, 3), "sequence_parallel": st.booleans(),
        "recompute": st.sampled_from(["none", "full", "selective", "matmul", "activation+norm"]),
        "microbatch_size": st.sampled_from([1, 2]), "dispatch": st.sampled_from(["direct", "direct", "node-aware"]),
    }
)  # fmt: skip


def _job(model: str, device: str, number: str, schedule: str, pp: int, plan: dict[str, Any]) -> JobSpec | None:
    plan = plan | {"schedule": schedule, "pp": 1 if schedule == "sequential" else pp} | SCHEDULES[schedule]
    if "moe" not in _MODELS[model]:
        plan |= {"ep": 1, "dispatch": "direct"}
    plan["sequence_parallel"] &= plan["tp"] > 1
    world = plan["dp"] * plan["tp"] * plan["cp"] * plan["pp"]
    node = min(8, world)
    fields = {
        "name": "drawn", "model": _MODELS[model], "plan": plan,
        "cluster": {"device": device, "devices_per_node": node, "nodes": world // node},
        "batch": {"global_batch_size": 16 * plan["dp"]},
        "precision": {"compute": "fp16" if number == "fp16" else "bf16"} | _NUMBERS[number],
        "optimizer": {"clip_grad_norm": 0.0},
    }  # fmt: skip
    try:
        job = make_job(fields)
    except PlanError:
        return None
    return None if plan_faults(job) else job


def predicted_jobs(schedules: tuple[str, ...] = tuple(SCHEDULES)) -> st.SearchStrategy[JobSpec]:
    """Legal jobs on devices of the catalog, under these schedules."""
    drawn = st.builds(
        _job, st.sampled_from(sorted(_MODELS)), st.sampled_from(DEVICES), st.sampled_from(sorted(_NUMBERS)),
        st.sampled_from(schedules), st.sampled_from([2, 4]), _PLANS,
    )  # fmt: skip
    return drawn.filter(lambda job: job is not None)
