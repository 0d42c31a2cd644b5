"""The memory that a rank keeps from step to step besides its state: weights cast to fp8, and errors of compression.

An element of a cast takes one byte, or two if a scale is for one direction of the matrix, so that each product has its
own cast; a scale takes 4 (precision/float8_linear.py). Errors are float32, for the elements that a method compresses
(parallel/compress/).
"""

from collections.abc import Mapping

from shardwright.config.compression_facts import COMPRESSIONS
from shardwright.config.float8_facts import FLOAT8_RECIPES
from shardwright.config.job import JobSpec
from shardwright.config.units import FLOAT32_BYTES
from shardwright.memory.rank_state import StageState, UnitState
from shardwright.sharding.compression import compressed
from shardwright.sharding.parameter_shard import ParameterShard

# The layers that have fp8 products.
_LINEAR = {f"attention.{name}" for name in ("qkv", "q_up", "kv_up", "out")} | {
    f"{name}.{matrix}" for name in ("mlp", "moe.shared", "moe.experts") for matrix in ("up", "down")
}


def kept_bytes(job: JobSpec, stages: Mapping[int, StageState]) -> int:
    """Bytes of casts and errors at their peak, on a rank that holds these stages."""
    units = (unit for stage in stages.values() for unit in stage.units)
    return cast_bytes(job, stages) + sum(error_bytes(job, unit) for unit in units)


def cast_bytes(job: JobSpec, stages: Mapping[int, StageState]) -> int:
    """Bytes of the weights of the blocks' linear layers in fp8, at their peak."""
    return staying_cast_bytes(job, stages) + _gathered_cast_bytes(job, stages)


def staying_cast_bytes(job: JobSpec, stages: Mapping[int, StageState]) -> int:
    """Bytes of casts of weights that are not gathered. Experts may be among them while the rest of a layer is
    gathered."""
    return sum(sum(layers) for layers in _casts_by_layer(job, stages, are_gathered=False))


def _gathered_cast_bytes(job: JobSpec, stages: Mapping[int, StageState]) -> int:
    """Bytes of casts that live as long as gathered values: of one layer at a time, or of one stage in a pipeline."""
    by_stage = _casts_by_layer(job, stages, are_gathered=True)
    return max((sum(layers) if job.plan.gathers_stages else max(layers, default=0) for layers in by_stage), default=0)


def _casts_by_layer(job: JobSpec, stages: Mapping[int, StageState], are_gathered: bool) -> list[list[int]]:
    """Bytes in fp8 of each stage's layers: of weights that are gathered for a pass, or of the others."""
    if job.precision.float8 == "none":
        return []
    return [
        [
            sum(
                _cast_bytes(place, job.precision.float8)
                for place in places
                if (stage.units[stage.unit_of[place.name][1]].replicas.zero == 3) == are_gathered
            )
            for places in stage.layers()
        ]
        for stage in stages.values()
    ]


def _cast_bytes(place: ParameterShard, recipe: str) -> int:
    if place.name.removesuffix(".weight").split(".", 2)[-1] not in _LINEAR:
        return 0
    num_matrices = place.shape[0] if place.is_expert else 1
    columns = place.shape[-1]
    rows = place.num_elements // (num_matrices * columns)
    facts = FLOAT8_RECIPES[recipe]
    num_scales: int = num_matrices * facts.weight_scales(rows, columns)
    return facts.num_weight_casts * place.num_elements + FLOAT32_BYTES * num_scales


def error_bytes(job: JobSpec, unit: UnitState) -> int:
    """Bytes that a method of compression keeps for a bucket: errors, and for PowerSGD the start of the next step."""
    plan, ranks = job.plan, unit.replicas.num_ranks
    if ranks == 1:
        return 0
    places = compressed(plan, unit.places)
    num_elements = sum(place.num_elements for place in places)
    kept_elements = COMPRESSIONS[plan.compress].kept_elements
    if not places or kept_elements is None:
        return 0
    columns, shard_size = sum(place.shape[-1] for place in places), unit.layout.shard_size if unit.replicas.zero else 0
    return FLOAT32_BYTES * kept_elements(plan, num_elements, columns, ranks, shard_size)
