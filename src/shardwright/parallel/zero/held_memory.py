"""The memory that a rank truly holds, by kind: the storages of its tensors, each once."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from shardwright.parallel.zero.sharded_stage import ShardedStage
from shardwright.parallel.zero.tensor_pool import TensorPool
from shardwright.parallel.zero.tied_embedding import TiedEmbedding
from shardwright.parallel.zero.weight_stash import WeightStash
from shardwright.sharding.memory_account import RankMemory


def storages_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of the storages of some tensors, each once, by a number that stands for it while it lives."""
    return {id(storage): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}


def held_storages(
    shards: Mapping[int, ShardedStage], tied: TiedEmbedding, versions: Iterable[Tensor] = ()
) -> dict[str, dict[int, int]]:
    """The storages that stay from step to step, by kind: "host", "parameters", "gradients", "optimizer", and what is
    "kept" beside the state. Each is of the first kind that it serves; `versions` are older values of parameters."""
    units = [unit for held in shards.values() for unit in held.units]
    own = tied.last.gradient if tied.are_both_here and tied.last is not None else None
    in_host = [unit.value_shard for unit in units if unit.sharding.host_values]
    tensors = {
        "host": [*in_host, *(tensor for unit in units for tensor in unit.masters.memory(on_host=True))],
        "parameters": [*versions, *(tensor for unit in units for tensor in unit.parameter_memory())],
        "gradients": [*([] if own is None else [own]), *(t for unit in units for t in unit.gradient_memory())],
        "optimizer": [tensor for unit in units for tensor in unit.masters.memory(on_host=False)],
        "kept": [tensor for unit in units for tensor in unit.kept_memory()],
    }
    counted: set[int] = set()
    by_kind = {}
    for kind, held in tensors.items():
        by_kind[kind] = {number: size for number, size in storages_of(held).items() if number not in counted}
        counted.update(by_kind[kind])
    return by_kind


def measured_memory(
    shards: Mapping[int, ShardedStage], weight_stashes: Mapping[int, WeightStash], tied: TiedEmbedding, pool: TensorPool
) -> RankMemory:
    """The account of one rank, after its first update. Activations come and go and are not in it.

    Buffers are the pool's, at their peak so far, and what stays beside the state. Older versions of the weights count
    as parameters.
    """
    held = {kind: sum(sizes.values()) for kind, sizes in held_storages(shards, tied).items()}
    older = sum(weight_stash.most_older_bytes for weight_stash in weight_stashes.values())
    return RankMemory(
        parameters_bytes=held["parameters"] + older,
        gradients_bytes=held["gradients"],
        optimizer_bytes=held["optimizer"],
        activations_bytes=0,
        buffers_bytes=pool.peak_bytes + held["kept"],
        host_bytes=held["host"],
    )
