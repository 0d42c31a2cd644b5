"""How a unit's parameters are updated where the update looks at whole matrices: what that moves and takes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.precision import PrecisionSpec
from shardwright.sharding.factored_sums import FactoredSums
from shardwright.sharding.flat_buffer import FlatLayout
from shardwright.sharding.matrix_exchange import MatrixExchange
from shardwright.sharding.optimizer_state import is_by_matrix
from shardwright.sharding.parameter_shard import ParameterShard

# The collectives of an update by optimizer, as the ledger names them.
COLLECTIVES = {"muon": "all_to_all_v", "adafactor": "all_reduce"}


class UnitUpdate(Protocol):
    """What ranks that share a unit do together in its update."""

    @property
    def scratch_bytes(self) -> int:
        """Memory that it needs while it goes on."""
        ...

    def sent_bytes(self, shard: int, index: int) -> Iterator[tuple[str, int]]:
        """Its collectives along "shards" or "tp", and their bytes as the ledger counts them, on the rank at these
        places."""
        ...


@dataclass(frozen=True)
class Updates:
    """How a job updates parameters, by the unit."""

    job: JobSpec

    def is_by_matrix(self, place: ParameterShard) -> bool:
        """Whether the update of a parameter looks at whole matrices."""
        return is_by_matrix(self.job.optimizer, place.name, place.full_shape)

    def of_unit(self, places: Sequence[ParameterShard], layout: FlatLayout) -> UnitUpdate | None:
        """The update of parameters that lie in one buffer; None where each element is updated by itself."""
        job, by_matrix = self.job, self.is_by_matrix(places[0])
        num_cut = job.plan.expert_tp_size if places[0].is_expert else job.plan.tp
        if job.optimizer.name == "adafactor":
            return FactoredSums.of(shape_of(job.model), places, layout, num_cut, has_factors=by_matrix)
        if by_matrix:
            return MatrixExchange.of(shape_of(job.model), places, layout, num_cut, exchanged_bytes(job.precision))
        return None


def exchanged_bytes(precision: PrecisionSpec) -> int:
    """Bytes of an element of a matrix that Muon makes orthogonal: as in products, but bf16 where these are in fp16,
    which has no small enough numbers."""
    return 4 if precision.compute == "float32" else 2


OF_ADAMW = Updates(JobSpec())  # of each element by itself
