"""How units are updated where the update looks at whole matrices: which together, what that moves and takes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.precision import PrecisionSpec
from shardwright.sharding.factored_sums import FactoredSums
from shardwright.sharding.matrix_exchange import MatrixExchange, PlacedUnit, exchanged_together
from shardwright.sharding.optimizer_state import is_by_matrix
from shardwright.sharding.parameter_shard import ParameterShard
from shardwright.sharding.update_matrices import update_matrices

# The collectives of an update of matrices, as the ledger names them.
COLLECTIVES = {"orthogonal": "all_to_all_v", "factored": "all_reduce"}


class UnitUpdate(Protocol):
    """The common work of ranks that share units, in their update."""

    @property
    def scratch_bytes(self) -> int:
        """Memory that it needs while it goes on."""
        ...

    def sent_bytes(self, shard: int, index: int) -> Iterator[tuple[str, int]]:
        """Its collectives along "shards" or "tp", and their bytes as the ledger counts them, on the rank at these
        places."""
        ...


@dataclass(frozen=True)
class UpdateGroup:
    """Units that are updated together, by their numbers in the stage; with what their ranks do together in that, if
    each element is not updated by itself."""

    units: tuple[int, ...]
    update: UnitUpdate | None = None

    @property
    def scratch_bytes(self) -> int:
        """Memory that it needs while it goes on."""
        return self.update.scratch_bytes if self.update is not None else 0

    @property
    def state_bytes(self) -> int:
        """The bytes of its state besides the state of each element."""
        return self.update.state_bytes if isinstance(self.update, FactoredSums) else 0


@dataclass(frozen=True)
class Updates:
    """How a job updates parameters, by the unit."""

    job: JobSpec

    def is_by_matrix(self, place: ParameterShard) -> bool:
        """True if the update of a parameter looks at whole matrices."""
        return is_by_matrix(self.job.optimizer, place.name, place.full_shape)

    def groups(self, units: Sequence[PlacedUnit]) -> list[UpdateGroup]:
        """Groups of a stage's units that are updated together; units are given by their parameters and how these lie in
        a buffer."""
        if self.job.optimizer.facts.matrix_update == "factored":
            return [UpdateGroup((number,), self._factored(unit)) for number, unit in enumerate(units)]
        update_groups = [group for is_expert in (False, True) for group in self._exchanged(units, is_expert)]
        together = {number for group in update_groups for number in group.units}
        update_groups += [UpdateGroup((number,)) for number in range(len(units)) if number not in together]
        return sorted(update_groups, key=lambda group: group.units)

    def _exchanged(self, units: Sequence[PlacedUnit], is_expert: bool) -> Iterator[UpdateGroup]:
        """The groups of units of matrices, of experts or of all else."""
        shape, num_cut = shape_of(self.job.model), self._num_cut(is_expert)
        firsts = [places[0] for places, _ in units]
        mine = [n for n, place in enumerate(firsts) if self.is_by_matrix(place) and place.is_expert == is_expert]
        num_matrices = [sum(len(update_matrices(shape, place)) for place in units[number][0]) for number in mine]
        num_shards = units[mine[0]][1].num_shards if mine else 1
        for group in exchanged_together(num_matrices, num_shards * num_cut):
            numbers = tuple(mine[i] for i in group)
            together = [units[number] for number in numbers]
            yield UpdateGroup(numbers, MatrixExchange.of(shape, together, num_cut, exchanged_bytes(self.job.precision)))

    def _factored(self, unit: PlacedUnit) -> FactoredSums:
        places, layout = unit
        num_cut = self._num_cut(places[0].is_expert)
        return FactoredSums.of(shape_of(self.job.model), places, layout, num_cut, self.is_by_matrix(places[0]))

    def _num_cut(self, is_expert: bool) -> int:
        return self.job.plan.expert_tp_size if is_expert else self.job.plan.tp


def exchanged_bytes(precision: PrecisionSpec) -> int:
    """Bytes of an element of a matrix that Muon makes orthogonal: as in products, but bf16 where these are in fp16,
    which has no small enough numbers."""
    return 4 if precision.compute == "float32" else 2


OF_ADAMW = Updates(JobSpec())  # of each element by itself
