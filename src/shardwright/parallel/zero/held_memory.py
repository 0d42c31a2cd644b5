"""The memory that a rank actually holds, by kind: the storages of its tensors, each counted once."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from shardwright.parallel.zero.sharded_stage import ShardedStage
from shardwright.parallel.zero.tied_embedding import TiedEmbedding
from shardwright.parallel.zero.unit_setting import TensorPool
from shardwright.parallel.zero.weight_stash import WeightStash
from shardwright.sharding.memory_account import RankMemory


def storages_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of the storages of some tensors, each once, by the storage's id (valid while the storage lives)."""
    return {id(storage): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}


def held_storages(
    shards: Mapping[int, ShardedStage], tied: TiedEmbedding, versions: Iterable[Tensor] = ()
) -> dict[str, dict[int, int]]:
    """The storages that stay from step to step, by kind: "host", "parameters", "gradients", "optimizer", and "kept" for
    tensors besides the state. A storage of several kinds counts for the first one; `versions` are older values of
    parameters."""
    units = [unit for stage in shards.values() for unit in stage.units]
    tied_gradient = tied.last.gradient if tied.are_both_here and tied.last is not None else None
    in_host = [unit.value_shard for unit in units if unit.sharding.host_values]
    tensors = {
        "host": [*in_host, *(tensor for unit in units for tensor in unit.masters.memory(on_host=True))],
        "parameters": [*versions, *(tensor for unit in units for tensor in unit.parameter_memory())],
        "gradients": [
            *([] if tied_gradient is None else [tied_gradient]),
            *(t for unit in units for t in unit.gradient_memory()),
        ],
        "optimizer": [tensor for unit in units for tensor in unit.masters.memory(on_host=False)],
        "kept": [tensor for unit in units for tensor in unit.kept_memory()],
    }
    counted: set[int] = set()
    by_kind = {}
    for kind, kind_tensors in tensors.items():
        by_kind[kind] = {number: size for number, size in storages_of(kind_tensors).items() if number not in counted}
        counted.update(by_kind[kind])
    return by_kind


def measured_memory(
    shards: Mapping[int, ShardedStage], weight_stashes: Mapping[int, WeightStash], tied: TiedEmbedding, pool: TensorPool
) -> RankMemory:
    """The account of one rank, after its first update. It does not contain activations, which do not stay.

    Buffers are the pool's peak so far and the tensors kept besides the state. Older versions of the weights count as
    parameters.
    """
    kind_bytes = {kind: sum(sizes.values()) for kind, sizes in held_storages(shards, tied).items()}
    older = sum(weight_stash.most_older_bytes for weight_stash in weight_stashes.values())
    return RankMemory(
        parameters_bytes=kind_bytes["parameters"] + older,
        gradients_bytes=kind_bytes["gradients"],
        optimizer_bytes=kind_bytes["optimizer"],
        activations_bytes=0,
        buffers_bytes=pool.peak_bytes + kind_bytes["kept"],
        host_bytes=kind_bytes["host"],
    )
