"""Small jobs whose whole space of plans can be priced."""

from typing import Any

from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.plan_block import PlanBlock
from shardwright.planner.search.space import degrees, variants_of, with_offload, with_sharing, with_variant

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"layers": 6, "hidden": 4096, "heads": 32, "kv_heads": 4, "ffn": 11008, "vocab": 32000, "sequence": 4096},
    "experts": {
        "layers": 4, "hidden": 2048, "heads": 16, "kv_heads": 4, "ffn": 5632, "vocab": 32000, "sequence": 4096,
        "moe": {"experts": 8, "ffn": 1408},
    },
}  # fmt: skip


def small_job(model: str, width: int = 1) -> JobSpec:
    """On two nodes of four devices; a model so many times wider fills more of them."""
    fields = MODELS[model] | {name: width * MODELS[model][name] for name in ("hidden", "heads", "ffn")}
    links = {"intra_node": {"bandwidth_gb_per_s": 300.0}, "inter_node": {"bandwidth_gb_per_s": 25.0}}
    cluster = {"name": "small", "device": "a100-sxm-40g", "devices_per_node": 4, "nodes": 2} | links
    return make_job(
        {
            "model": fields, "cluster": cluster, "plan": {"dp": 8}, "batch": {"global_batch_size": 8},
            "precision": {"compute": "bf16"},
        }
    )  # fmt: skip


def all_plans(job: JobSpec, constraints: Constraints) -> list[PlanBlock]:
    """The whole space, two blocks for each combination of words. For small spaces: it may be 10^8 plans."""
    columns = degrees(job, constraints)
    results = []
    for variant in variants_of(job, constraints, columns):
        block = with_variant(job, constraints, columns, variant)
        if len(block):
            sharded = with_sharing(job, constraints, block)
            results += [part for part in (sharded, with_offload(constraints, sharded)) if len(part)]
    return results
