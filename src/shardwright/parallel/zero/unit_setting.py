"""The common setting of the units of a rank: how replicas share them, and where memory and values come from."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.config.number_types import NUMBER_TYPES
from shardwright.parallel.comm.collectives import Axis
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.compress.compressor import Compressor, make_compressor
from shardwright.parallel.device_streams import DeviceStreams
from shardwright.parallel.optimizers.elementwise import make_optimizer
from shardwright.parallel.tensor.initial_values import Initial
from shardwright.parallel.zero.host_link import HostLink
from shardwright.parallel.zero.master_weights import MakeOptimizer
from shardwright.sharding.buffer_pool import BufferPool, Loan
from shardwright.sharding.groups import zero_stage
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.sharding.unit_update import Updates
from shardwright.sharding.zero_events import Reductions


def dtype_of(number: str) -> torch.dtype:
    """The dtype of a number type of weights and activations (config/number_types.py)."""
    dtype: torch.dtype = getattr(torch, NUMBER_TYPES[number].torch_dtype)
    return dtype


TensorPool = BufferPool[Tensor]


def tensor_pool(device: torch.device, streams: DeviceStreams | None = None) -> TensorPool:
    """A pool whose memory is tensors of bytes. A buffer may be made on one of the device's `streams` and returned on
    another: if the pool then frees it, its memory is not reused before the last of these streams is done with it."""

    def returned(memory: Tensor) -> None:
        if streams is not None:
            streams.lend(memory, streams.current())

    return BufferPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device=device), returned)


def lent(buffer: Loan[Tensor], size: int, dtype: torch.dtype) -> Tensor:
    """A flat, uninitialised tensor of `size` elements in borrowed memory."""
    return buffer.memory[: size * dtype.itemsize].view(dtype)


@dataclass(frozen=True)
class Sharding:
    """The division of a stage's state over its replicas.

    `zero` is the stage of ZeRO. State is sharded over the ranks of `shards`; the ranks of `copies`, an axis of size 1
    unless sharding is hybrid, hold the same shard. `tp` sums gradients of which each of its ranks sees a part.
    """

    zero: int
    shards: Axis
    copies: Axis
    tp: Axis
    compute: torch.dtype = torch.float32
    gradients: torch.dtype = torch.float32  # number type in which they are accumulated
    reduce: torch.dtype = torch.float32  # number type in which they are reduced
    master: torch.dtype = torch.float32  # number type of the weights that the optimizer updates
    host_share: float = 0.0  # share of optimizer state and float32 weights in host memory
    host_values: bool = False  # True if the shards of the values are in host memory (stage 3)
    link: HostLink | None = None  # to host memory, if the device has memory of its own

    @property
    def num_shards(self) -> int:
        """The number of shards of the optimizer state: 1 if every replica holds all of it."""
        return self.shards.size if self.zero else 1

    @classmethod
    def of(cls, job: JobSpec, mesh: Mesh, stage: int, is_expert: bool, link: HostLink | None) -> "Sharding":
        """The division of a stage's state over its replicas: of its experts if `is_expert`, else of its dense
        parameters."""
        plan, precision = job.plan, job.precision
        replicas = mesh.expert_replicas if is_expert else mesh.replicas
        return cls(
            zero_stage(plan, is_expert),
            *replicas.sharing(stage, plan.num_stages),
            mesh.tp,
            compute=dtype_of(precision.compute),
            gradients=dtype_of(precision.gradient_number),
            reduce=dtype_of(precision.reduce_number),
            master=dtype_of(precision.master_number),
            host_share=plan.offload_optimizer,
            host_values=plan.offload_parameters,
            link=link,
        )


@dataclass(frozen=True)
class StageSharding:
    """The divisions of a stage's experts, and of all its other parameters, over its replicas."""

    dense: Sharding
    experts: Sharding

    def of_parameter(self, place: ParameterShard) -> Sharding:
        """The division of a parameter."""
        sharding = self.experts if place.is_expert else self.dense
        if place.is_frozen:  # values alone, which are shared if they are gathered layer by layer
            zero = sharding.zero if sharding.zero == 3 else 0
            stored = torch.int32 if place.row_format else sharding.compute
            return replace(sharding, zero=zero, compute=stored, master=stored, host_share=0.0)
        return replace(sharding, compute=torch.float32, master=torch.float32) if place.is_exact else sharding


@dataclass(frozen=True)
class UnitSetting:
    """The common setting of all units of a rank: the job, the pool that lends them memory, the initial values of their
    parameters, and the rank's reductions under way."""

    job: JobSpec
    pool: TensorPool
    initial: Initial
    reductions: Reductions = field(default_factory=Reductions)

    @property
    def updates(self) -> Updates:
        """The way parameters are updated."""
        return Updates(self.job)

    @property
    def make_optimizer(self) -> MakeOptimizer:
        """Makes the optimizer of a unit."""
        return partial(make_optimizer, self.job.optimizer, moments=dtype_of(self.job.precision.moments))

    def compressor(self, places: Sequence[ParameterShard]) -> Compressor | None:
        """The compressor of the gradients of a unit; None if they are not compressed."""
        make = make_compressor(self.job.plan)
        return None if make is None else make(places)
