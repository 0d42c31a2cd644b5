"""The compressor that a plan asks for."""

from collections.abc import Callable, Sequence
from pkgutil import resolve_name

from shardwright.config.compression_facts import COMPRESSIONS
from shardwright.config.plan import PlanSpec
from shardwright.parallel.compress.compressor import Compressor, Method
from shardwright.sharding.compression import is_compressed
from shardwright.sharding.parameter_shard import ParameterShard

# Makes the compressor of a bucket of tensors with these places.
MakeCompressor = Callable[[Sequence[ParameterShard]], Compressor]


def make_compressor(plan: PlanSpec) -> MakeCompressor | None:
    """A function that makes the compressor of a bucket; None if gradients are not compressed."""
    facts = COMPRESSIONS[plan.compress]
    if not facts.method:
        return None
    method: Callable[[PlanSpec], Method] = resolve_name(facts.method)

    def make(places: Sequence[ParameterShard]) -> Compressor:
        return Compressor(method(plan), [number for number, place in enumerate(places) if is_compressed(plan, place)])

    return make
