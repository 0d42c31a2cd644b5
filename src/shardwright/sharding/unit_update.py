"""The update of units whose update looks at whole matrices: the units updated together, their traffic and memory."""

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
    """The common work of ranks that share units, in the update of these."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes of memory that it needs while it runs."""
        ...

    def sent_bytes(self, shard: int, index: int) -> Iterator[tuple[str, int]]:
        """Its collectives along "shards" or "tp", with their bytes as the ledger counts them, on the rank with this
        shard and this index on the tp line."""
        ...


@dataclass(frozen=True)
class UpdateGroup:
    """Units that are updated together, by their numbers in the stage; with the ranks' common work, or None if each
    element is updated by itself."""

    units: tuple[int, ...]
    update: UnitUpdate | None = None

    @property
    def scratch_bytes(self) -> int:
        """Bytes of memory that the update needs while it runs."""
        return self.update.scratch_bytes if self.update is not None else 0

    @property
    def state_bytes(self) -> int:
        """The bytes of its state, without the state of each element."""
        return self.update.state_bytes if isinstance(self.update, FactoredSums) else 0


@dataclass(frozen=True)
class Updates:
    """The way a job updates parameters, unit by unit."""

    job: JobSpec

    def is_by_matrix(self, place: ParameterShard) -> bool:
        """True if the update of a parameter looks at whole matrices."""
        return not place.is_frozen and is_by_matrix(self.job.optimizer, place.name, place.full_shape)

    def groups(self, units: Sequence[PlacedUnit]) -> list[UpdateGroup]:
        """Groups of a stage's units that are updated together; each unit is given as its parameters and their layout in
        a buffer. Frozen units are in no group."""
        trained = [number for number, (places, _) in enumerate(units) if not places[0].is_frozen]
        if self.job.optimizer.facts.matrix_update == "factored":
            return [UpdateGroup((number,), self._factored(units[number])) for number in trained]
        update_groups = [group for is_expert in (False, True) for group in self._exchanged(units, is_expert)]
        in_groups = {number for group in update_groups for number in group.units}
        update_groups += [UpdateGroup((number,)) for number in trained if number not in in_groups]
        return sorted(update_groups, key=lambda group: group.units)

    def _exchanged(self, units: Sequence[PlacedUnit], is_expert: bool) -> Iterator[UpdateGroup]:
        """The groups of units of matrices: of experts if `is_expert`, else of all other parameters."""
        shape, tp_size = shape_of(self.job.model), self._tp_size(is_expert)
        first_places = [places[0] for places, _ in units]
        kind_numbers = [
            n for n, place in enumerate(first_places) if self.is_by_matrix(place) and place.is_expert == is_expert
        ]
        num_matrices = [
            sum(len(update_matrices(shape, place)) for place in units[number][0]) for number in kind_numbers
        ]
        num_shards = units[kind_numbers[0]][1].num_shards if kind_numbers else 1
        for group in exchanged_together(num_matrices, num_shards * tp_size):
            numbers = tuple(kind_numbers[i] for i in group)
            group_units = [units[number] for number in numbers]
            yield UpdateGroup(
                numbers, MatrixExchange.of(shape, group_units, tp_size, exchanged_bytes(self.job.precision))
            )

    def _factored(self, unit: PlacedUnit) -> FactoredSums:
        places, layout = unit
        tp_size = self._tp_size(places[0].is_expert)
        return FactoredSums.of(shape_of(self.job.model), places, layout, tp_size, self.is_by_matrix(places[0]))

    def _tp_size(self, is_expert: bool) -> int:
        return self.job.plan.expert_tp_size if is_expert else self.job.plan.tp


def exchanged_bytes(precision: PrecisionSpec) -> int:
    """Bytes per element of a matrix that Muon makes orthogonal: the computation's dtype, but bf16 instead of fp16,
    which has no small enough numbers."""
    return precision.compute_bytes
