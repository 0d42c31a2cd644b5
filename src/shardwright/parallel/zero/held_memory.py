"""What a rank truly holds, by kind: the storages of its tensors, each once."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from shardwright.parallel.zero.flat_unit import TensorPool
from shardwright.parallel.zero.sharded_stage import ShardedStage
from shardwright.parallel.zero.tied_embedding import TiedEmbedding
from shardwright.parallel.zero.weight_stash import WeightStash
from shardwright.sharding.memory_account import RankMemory


def measured_memory(
    shards: Mapping[int, ShardedStage], weight_stashes: Mapping[int, WeightStash], tied: TiedEmbedding, pool: TensorPool
) -> RankMemory:
    """The account of one rank, after its first update. Activations come and go and are not in it.

    Buffers are the pool's, at their peak so far, and what stays beside the state. Older versions of the weights count
    as parameters.
    """
    units = [unit for held in shards.values() for unit in held.units]
    counted: set[int] = set()

    def new_bytes(tensors: Iterable[Tensor]) -> int:
        """Bytes of the storages that were not counted yet."""
        storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        fresh = [storage for number, storage in storages.items() if number not in counted]
        counted.update(storages)
        return sum(storage.nbytes() for storage in fresh)

    own = (
        [tied.head.gradient] if tied.are_both_here and tied.head is not None and tied.head.gradient is not None else []
    )
    in_host = [unit.value_shard for unit in units if unit.sharding.host_values]
    hosted = new_bytes([*in_host, *(tensor for unit in units for tensor in unit.masters.memory(on_host=True))])
    parameters = new_bytes(tensor for unit in units for tensor in unit.parameter_memory())
    older = sum(weight_stash.most_older_bytes for weight_stash in weight_stashes.values())
    gradients = new_bytes([*own, *(tensor for unit in units for tensor in unit.gradient_memory())])
    optimizer = new_bytes(tensor for unit in units for tensor in unit.masters.memory(on_host=False))
    kept = new_bytes(tensor for unit in units for tensor in unit.kept_memory())
    return RankMemory(
        parameters + older, gradients, optimizer, 0, buffers_bytes=pool.peak_bytes + kept, host_bytes=hosted
    )
