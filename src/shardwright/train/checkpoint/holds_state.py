"""The interface of an owner of a model's state on a rank: a job's replica, or a module of the user's own."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from shardwright.model.router_state import RouterState
from shardwright.parallel.zero.sharded_stage import ShardedStage
from shardwright.parallel.zero.tied_embedding import TiedEmbedding
from shardwright.precision.float8_linear import Float8Linear


class HoldsState(Protocol):
    """An owner of a model's state on one rank: a job's replica, or a module of the user's own."""

    @property
    def shards(self) -> dict[int, ShardedStage]: ...
    @property
    def tied(self) -> TiedEmbedding: ...
    @property
    def float8_states(self) -> Sequence[Float8Linear]: ...
    def routers(self, stage: int) -> Mapping[int, RouterState]: ...
