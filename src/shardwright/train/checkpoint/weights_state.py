"""The weights and the optimizer's state of a rank in a checkpoint.

Replicas hold the same rows of a parameter, so each replica writes a part of them. Adafactor's factors are small: every
rank that shares a unit holds all of them, and the first one writes them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.optimizers.adafactor import Adafactor
from shardwright.parallel.tensor.parameter import PlacedParameter
from shardwright.parallel.zero.flat_unit import FlatUnit
from shardwright.sharding.factored_sums import FactorBox
from shardwright.sharding.flat_buffer import rows_of
from shardwright.sharding.optimizer_state import FACTORS, states_of
from shardwright.sharding.row_boxes import cut_rows, shape_of_box
from shardwright.sharding.stage_parameters import model_parameters
from shardwright.train.checkpoint.boxes import HeldBox, WantedBox, copy_on_host
from shardwright.train.checkpoint.state_part import (
    FROZEN,
    MOST_ELEMENTS,
    WEIGHTS,
    Shapes,
    StateOwner,
    StatePart,
    StoredState,
    store,
    units_of,
)
from shardwright.train.gradient_norm import is_first_of_line


class WeightsState(StatePart):
    """Master weights and the optimizer's state of this rank's shards."""

    def held(self) -> Iterator[HeldBox]:
        for rows in _written_rows(self.owner, self.mesh):
            yield from _held_boxes(rows)
        yield from _written_factors(self.owner, self.mesh)

    def wanted(self, stored: StoredState) -> Iterator[WantedBox]:
        for rows in held_rows(self.owner):
            if rows.name in stored.thawed:
                yield from _wanted_boxes(rows, WEIGHTS, f"{FROZEN}.{rows.name}")
                continue
            moments = rows.unit.masters.moment_names() if stored.has_moments else ()
            for state in (WEIGHTS, *moments):
                yield from _wanted_boxes(rows, state, f"{state}.{rows.name}")
        if stored.has_moments:
            for adafactor, unit, factor in _factors(self.owner):
                values = _factor_values(adafactor, unit, factor)
                yield WantedBox(_name(factor), factor.full_shape, factor.box, partial(store, values))

    def take_up(self, stored: StoredState) -> None:
        """Set the optimizer's steps. All-gathers the weights in ZeRO 1 and 2."""
        for unit in units_of(self.owner):
            unit.masters.set_num_steps(stored.optimizer_steps if stored.has_moments else 0)
            unit.take_up()


def has_optimizer(job: JobSpec, shapes: Shapes) -> bool:
    """True if a checkpoint with tensors of these shapes has the complete state of the job's optimizer."""
    return all(
        f"{state}.{place.name}" in shapes
        for place in model_parameters(job.model)
        if not place.is_frozen
        for state in states_of(job.optimizer, place.name, place.full_shape)
    )


@dataclass(frozen=True)
class HeldRows:
    """Rows [first, end) of a parameter, which begin at element `start` of this rank's shard of a unit."""

    unit: FlatUnit
    parameter: PlacedParameter
    first: int
    end: int
    start: int

    @property
    def name(self) -> str:
        """Name of the parameter."""
        return self.parameter.place.name

    @property
    def row_size(self) -> int:
        """Elements of a row."""
        return rows_of(self.parameter.shape)[1]

    @property
    def stop(self) -> int:
        """The first element of the shard behind the rows."""
        return self.start + (self.end - self.first) * self.row_size


def held_rows(owner: StateOwner) -> Iterator[HeldRows]:
    """All rows of parameters in this rank's shards."""
    for unit in units_of(owner):
        for parameter in unit.parameters:
            first, end, start = unit.rows_held(parameter)
            if first < end:
                yield HeldRows(unit, parameter, first, end, start)


def _written_rows(owner: StateOwner, mesh: Mesh) -> Iterator[HeldRows]:
    """The rows that this rank writes: its part of the rows that several replicas hold."""
    for rows in held_rows(owner):
        sharding, parameter = rows.unit.sharding, rows.parameter
        # If the head of a tied embedding is not on the rank of the table, it is a copy of the table.
        if parameter is owner.tied.last or not is_first_of_line(parameter, mesh):
            continue
        num_copies, index = sharding.copies.size, sharding.copies.index
        if not sharding.zero:
            num_copies, index = num_copies * sharding.shards.size, index * sharding.shards.size + sharding.shards.index
        num_rows = rows.end - rows.first
        low, high = num_rows * index // num_copies, num_rows * (index + 1) // num_copies
        if low < high:
            start = rows.start + low * rows.row_size
            yield HeldRows(rows.unit, parameter, rows.first + low, rows.first + high, start)


def _held_boxes(rows: HeldRows) -> Iterator[HeldBox]:
    """The boxes of a parameter's rows, in each tensor that the optimizer keeps."""
    place, size = rows.parameter.place, rows.row_size
    for state in rows.unit.masters.state_names():
        values = rows.unit.masters.copy_out(state, rows.start, rows.stop)
        for part in cut_rows(place.box, rows.first, rows.end, 2**62):
            part_values = values[(part.first - rows.first) * size : (part.end - rows.first) * size]
            yield HeldBox(f"{state}.{rows.name}", place.full_shape, part.box, part_values.view(part.shape))


def _wanted_boxes(rows: HeldRows, state: str, stored_name: str) -> Iterator[WantedBox]:
    """The boxes that fill a parameter's rows of one tensor that the optimizer keeps."""
    place, masters = rows.parameter.place, rows.unit.masters

    def take(start: int, values: Tensor) -> None:
        masters.copy_in(state, start, values.view(-1))

    for part in cut_rows(place.box, rows.first, rows.end, MOST_ELEMENTS):
        start = rows.start + (part.first - rows.first) * rows.row_size
        yield WantedBox(stored_name, place.full_shape, part.box, partial(take, start))


def _factors(owner: StateOwner) -> Iterable[tuple[Adafactor, FlatUnit, FactorBox]]:
    for unit in units_of(owner):
        if isinstance(unit.masters.steps, Adafactor):
            for factor in unit.masters.steps.sums.factors():
                yield unit.masters.steps, unit, factor


def _name(factor: FactorBox) -> str:
    return f"{factor.state}.{factor.place.name}"


def _factor_values(adafactor: Adafactor, unit: FlatUnit, factor: FactorBox) -> Tensor:
    row_factors, column_factors = adafactor.factors(unit.parameters[0].device)
    values = row_factors if factor.state == FACTORS[0] else column_factors
    return values[slice(*factor.within)].view(shape_of_box(factor.box))


def _written_factors(owner: StateOwner, mesh: Mesh) -> Iterator[HeldBox]:
    """The factors that this rank writes: it is the first rank that holds them."""
    for adafactor, unit, factor in _factors(owner):
        sharding, tp = unit.sharding, mesh.expert_tp if factor.place.is_expert else mesh.tp
        is_first = sharding.shards.index == sharding.copies.index == 0 and (factor.is_cut or tp.index == 0)
        is_copy = owner.tied.last is not None and factor.place is owner.tied.last.place
        if is_first and not is_copy and unit.masters.num_steps():
            values = copy_on_host(_factor_values(adafactor, unit, factor), mesh)
            yield HeldBox(_name(factor), factor.full_shape, factor.box, values)
