"""The parts of which a model's state on one rank is made, each with the boxes that a checkpoint has of it."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from shardwright.config.units import MIB
from shardwright.model.router_state import RouterState
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.zero.flat_unit import FlatUnit
from shardwright.parallel.zero.sharded_stage import ShardedStage
from shardwright.parallel.zero.tied_embedding import TiedEmbedding
from shardwright.precision.float8_linear import Float8Linear
from shardwright.precision.loss_scale import LossScale
from shardwright.train.checkpoint.boxes import HeldBox, WantedBox, copy_on_host

Shapes = Mapping[str, tuple[int, ...]]  # full shapes of the tensors in a checkpoint, by name
# The values of parameters are named KIND.NAME: of trained ones, and of those that a user's module did not train.
WEIGHTS, FROZEN = "weights", "frozen"
MOST_ELEMENTS = 8 * MIB  # of a box that is read at once, unless one row has more


class StateOwner(Protocol):
    """An owner of a model's state on one rank: a job's replica, or a module of the user's own."""

    @property
    def shards(self) -> dict[int, ShardedStage]: ...
    @property
    def tied(self) -> TiedEmbedding: ...
    @property
    def float8_states(self) -> Sequence[Float8Linear]: ...
    @property
    def loss_scale(self) -> LossScale | None: ...
    def routers(self, stage: int) -> Mapping[int, RouterState]: ...


def units_of(owner: StateOwner) -> Iterator[FlatUnit]:
    """The flat units of all stages that are trained."""
    for shards in owner.shards.values():
        yield from (unit for unit in shards.units if not unit.is_frozen)


def optimizer_steps(owner: StateOwner) -> int:
    """The number of steps that the optimizer has done. Between two steps of a run it is equal for all parameters."""
    return max(unit.masters.num_steps() for unit in units_of(owner))


@dataclass(frozen=True)
class StoredState:
    """The state in a checkpoint, and which of it is loaded.

    With `weights_alone` only weights are loaded; with `optimizer_anew` all but the optimizer's state. `scaled_by` is
    the new scale of the loss divided by the old one. A `thawed` parameter was frozen when the checkpoint was written:
    the checkpoint has its values alone.
    """

    shapes: Shapes
    optimizer_steps: int
    weights_alone: bool = False
    optimizer_anew: bool = False
    scaled_by: float = 1.0
    thawed: frozenset[str] = frozenset()

    @property
    def has_moments(self) -> bool:
        """True if the optimizer's state is loaded."""
        return not (self.weights_alone or self.optimizer_anew)


class StatePart(ABC):
    """A part of the state of a rank. One rank writes each element; every rank reads what it holds."""

    def __init__(self, owner: StateOwner, mesh: Mesh) -> None:
        self.owner, self.mesh = owner, mesh

    @abstractmethod
    def held(self) -> Iterable[HeldBox]:
        """Copies, in host memory, of the boxes that this rank writes. On CUDA they are queued on the current stream."""

    @abstractmethod
    def wanted(self, stored: StoredState) -> Iterable[WantedBox]:
        """The boxes that this rank reads, with functions that store their values. Raises BrokenCheckpointError."""

    @abstractmethod
    def take_up(self, stored: StoredState) -> None:
        """Go on from the values that were read."""


def whole_held_box(name: str, values: Tensor, mesh: Mesh) -> HeldBox:
    """A copy of a tensor that one rank writes as a whole."""
    copy = copy_on_host(values, mesh)
    return HeldBox(name, tuple(copy.shape), tuple((0, size) for size in copy.shape), copy)


def whole_wanted_box(name: str, target: Tensor) -> WantedBox:
    """A box that fills a tensor as a whole."""
    shape = tuple(target.shape)
    return WantedBox(name, shape, tuple((0, size) for size in shape), partial(store, target))


def store(target: Tensor, values: Tensor) -> None:
    """Copy values that were read to their place."""
    target.copy_(values)
