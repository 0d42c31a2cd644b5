"""The compressor that a plan asks for."""

from collections.abc import Callable, Sequence

import torch

from shardwright.config.plan import PlanSpec
from shardwright.parallel.compress.cast import Cast
from shardwright.parallel.compress.compressor import Compressor, Method
from shardwright.parallel.compress.int8 import Int8
from shardwright.parallel.compress.powersgd import PowerSGD
from shardwright.parallel.compress.topk import TopK
from shardwright.sharding.compression import is_compressed
from shardwright.sharding.parameter_shard import ParameterShard

# Makes the compressor of a bucket of such tensors.
MakeCompressor = Callable[[Sequence[ParameterShard]], Compressor]


def make_compressor(plan: PlanSpec) -> MakeCompressor | None:
    """What makes one compressor for each bucket; None if gradients travel as they are."""
    if plan.compress == "none":
        return None
    methods: dict[str, Callable[[], Method]] = {
        "bf16": lambda: Cast(torch.bfloat16),
        "fp16": lambda: Cast(torch.float16),
        "int8": Int8,
        "powersgd": lambda: PowerSGD(plan.compress_rank),
        "topk": lambda: TopK(plan.compress_share),
    }
    method = methods[plan.compress]

    def make(places: Sequence[ParameterShard]) -> Compressor:
        return Compressor(method(), [number for number, place in enumerate(places) if is_compressed(plan, place)])

    return make
