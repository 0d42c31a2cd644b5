"""The state of a run in a checkpoint: the boxes that this rank writes, and those that it needs.

    weights.NAME                           float32, by parameter: what the optimizer updates
    exp_avg.NAME, momentum_buffer.NAME ... in the numbers that it keeps them in: what it remembers of a parameter, by
                                           element (sharding/optimizer_state.py)
    exp_avg_sq_row.NAME, exp_avg_sq_col.NAME   float32: Adafactor's, by row and by column of each matrix
    router.LAYER.bias_E, ...               what a layer's router remembers
    float8.NAME.x, .weight, .dy            past amaxes of a layer with fp8 products: the largest, then each
    float8.NAME.EXPERT.x, ...              those of an expert, by its number
    compression.KIND.NAME                  what compressed gradients lost (compression_state.py)

Every element is written by one rank. Replicas hold the same, so each writes its part of the rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.config.units import MIB
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.optimizers.adafactor import Adafactor
from shardwright.parallel.tensor.parameter import PlacedParameter
from shardwright.parallel.zero.flat_unit import FlatUnit
from shardwright.parallel.zero.sharded_stage import ShardedStage
from shardwright.precision.float8_linear import Float8Linear
from shardwright.sharding.factored_sums import FactorBox
from shardwright.sharding.flat_buffer import rows_of
from shardwright.sharding.optimizer_state import FACTORS, states_of
from shardwright.sharding.row_boxes import cut_rows, shape_of_box
from shardwright.sharding.stage_parameters import model_parameters
from shardwright.train.checkpoint.boxes import HeldBox, WantedBox, copy_on_host
from shardwright.train.checkpoint.compression_state import held_compression, wanted_compression
from shardwright.train.checkpoint.holds_state import HoldsState
from shardwright.train.checkpoint.manifest import BrokenCheckpointError
from shardwright.train.gradient_norm import is_first_of_line

# Elements of a box that is read at once.
_MOST_ELEMENTS = 8 * MIB
_WEIGHTS = "weights"


@dataclass(frozen=True)
class _HeldRows:
    """Rows [first, end) of a parameter, which lie in this rank's shard of a unit from element `start` on."""

    unit: FlatUnit
    parameter: PlacedParameter
    first: int
    end: int
    start: int

    @property
    def name(self) -> str:
        """The parameter's."""
        return self.parameter.place.name

    @property
    def row_size(self) -> int:
        """Elements of a row."""
        return rows_of(self.parameter.shape)[1]


class ComingBoxes:
    """Copies, in host memory, of what a rank writes. On CUDA they are there once the stream has come so far: nobody
    gets them before."""

    def __init__(self, boxes: list[HeldBox], mesh: Mesh) -> None:
        """`boxes` are what the current stream of the device was told to copy."""
        self._boxes, self._device = boxes, mesh.device
        self._copied = None if mesh.streams is None else mesh.streams.current().record_event()

    def wait(self) -> list[HeldBox]:
        """The boxes, once they are there. From any thread."""
        if self._copied is not None:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # of this thread: else it would wake the first one
            self._copied.synchronize()
        return self._boxes


def held_boxes(replica: HoldsState, mesh: Mesh) -> list[HeldBox]:
    """Copies, in host memory, of what this rank writes."""
    return coming_boxes(replica, mesh).wait()


def coming_boxes(replica: HoldsState, mesh: Mesh) -> ComingBoxes:
    """Begin to copy what this rank writes to host memory. What changes the state from now on is not in it."""
    boxes = [box for held in _written_rows(replica, mesh) for box in _boxes_of(held)]
    boxes += _written_factors(replica, mesh)
    for stage, shards in replica.shards.items():
        named = _histories(shards, mesh)
        if _speaks_for(shards, mesh):
            named |= _routers(replica, stage)
        boxes += [_whole_box(name, values, mesh) for name, values in named.items()]
    return ComingBoxes(boxes + list(held_compression(replica, mesh)), mesh)


def _whole_box(name: str, values: Tensor, mesh: Mesh) -> HeldBox:
    kept = copy_on_host(values, mesh)
    return HeldBox(name, tuple(kept.shape), tuple((0, size) for size in kept.shape), kept)


def _boxes_of(held: _HeldRows) -> Iterator[HeldBox]:
    """The parameter's rows in each of the optimizer's tensors."""
    place, size = held.parameter.place, held.row_size
    for state in held.unit.masters.state_names():
        start = held.start
        values = held.unit.masters.copy_out(state, start, start + (held.end - held.first) * size)
        for rows in cut_rows(place.box, held.first, held.end, 2**62):
            mine = values[(rows.first - held.first) * size : (rows.end - held.first) * size]
            yield HeldBox(f"{state}.{held.name}", place.full_shape, rows.box, mine.view(rows.shape))


def wanted_boxes(
    replica: HoldsState, shapes: Mapping[str, tuple[int, ...]], weights_alone: bool, scaled_by: float = 1.0,
    optimizer_anew: bool = False,
) -> list[WantedBox]:  # fmt: skip
    """The boxes that this rank needs of a checkpoint with tensors of these shapes, and functions that put them in
    place.

    Of the weights alone, or of all that the checkpoint has; but for the optimizer's, if it begins `optimizer_anew`.
    `scaled_by` is the scale of the loss, as a multiple of what it was. BrokenCheckpointError names what it lacks.
    """
    with_moments = not (weights_alone or optimizer_anew)
    boxes = [
        box
        for held in _rows_here(replica)
        for state in (_WEIGHTS, *(held.unit.masters.moment_names() if with_moments else ()))
        for box in _wanted_rows(held, state)
    ]
    if with_moments:
        boxes += [_wanted_factor(adafactor, unit, of) for unit, adafactor, of in _factors(replica)]
    if not weights_alone:
        for stage, shards in replica.shards.items():
            boxes += _wanted_small(replica, stage, shards, shapes)
        boxes += wanted_compression(replica, shapes, scaled_by)
    if missing := [box.name for box in boxes if box.name not in shapes]:
        raise BrokenCheckpointError(f"it has no {missing[0]}, nor {len(missing) - 1} more tensors of this model")
    return boxes


def has_optimizer(job: JobSpec, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """True if a checkpoint that has tensors of these shapes has all that the job's optimizer remembers."""
    return all(
        f"{state}.{place.name}" in shapes
        for place in model_parameters(job.model)
        for state in states_of(job.optimizer, place.name, place.full_shape)
    )


def take_up(replica: HoldsState, optimizer_steps: int) -> None:
    """All that was wanted of a checkpoint is there: go on with it. Moves all-gathers of the values in ZeRO 1 and 2."""
    for shards in replica.shards.values():
        for unit in shards.units:
            unit.masters.set_num_steps(optimizer_steps)
            unit.take_up()
    for state in replica.float8_states:
        state.weight_changed()


def optimizer_steps(replica: HoldsState) -> int:
    """Steps that the optimizer has done: the same for all parameters between two steps of a run."""
    return max(unit.masters.num_steps() for shards in replica.shards.values() for unit in shards.units)


def _rows_here(replica: HoldsState) -> Iterator[_HeldRows]:
    """All rows of parameters that lie in this rank's shards."""
    for shards in replica.shards.values():
        for unit in shards.units:
            for parameter in unit.parameters:
                first, end, start = unit.rows_held(parameter)
                if first < end:
                    yield _HeldRows(unit, parameter, first, end, start)


def _written_rows(replica: HoldsState, mesh: Mesh) -> Iterator[_HeldRows]:
    """The rows that this rank writes: its part of those that it and its replicas hold alike."""
    for held in _rows_here(replica):
        sharding, parameter = held.unit.sharding, held.parameter
        # The head of a tied embedding on another rank than its table is a copy of that.
        if parameter is replica.tied.last or not is_first_of_line(parameter, mesh):
            continue
        number, index = sharding.copies.size, sharding.copies.index
        if not sharding.zero:
            number, index = number * sharding.shards.size, index * sharding.shards.size + sharding.shards.index
        rows = held.end - held.first
        low, high = rows * index // number, rows * (index + 1) // number
        if low < high:
            yield _HeldRows(
                held.unit, parameter, held.first + low, held.first + high, start=held.start + low * held.row_size
            )


def _wanted_rows(held: _HeldRows, state: str) -> Iterator[WantedBox]:
    place, size, masters = held.parameter.place, held.row_size, held.unit.masters

    def take(start: int, values: Tensor) -> None:
        masters.copy_in(state, start, values.view(-1))

    for rows in cut_rows(place.box, held.first, held.end, _MOST_ELEMENTS):
        start = held.start + (rows.first - held.first) * size
        yield WantedBox(f"{state}.{held.name}", place.full_shape, rows.box, partial(take, start))


# Adafactor's factors, whole on every rank that shares a unit.


def _factors(replica: HoldsState) -> Iterator[tuple[FlatUnit, Adafactor, FactorBox]]:
    for shards in replica.shards.values():
        for unit in shards.units:
            if isinstance(unit.masters.steps, Adafactor):
                for of in unit.masters.steps.sums.factors():
                    yield unit, unit.masters.steps, of


def _factor_values(adafactor: Adafactor, unit: FlatUnit, of: FactorBox) -> Tensor:
    by_row, by_column = adafactor.factors(unit.parameters[0].device)
    values = by_row if of.state == FACTORS[0] else by_column
    return values[slice(*of.within)].view(shape_of_box(of.box))


def _written_factors(replica: HoldsState, mesh: Mesh) -> Iterator[HeldBox]:
    """The factors that this rank writes: it is the first of those that hold them."""
    for unit, adafactor, of in _factors(replica):
        sharding, cut = unit.sharding, mesh.expert_tp if of.place.is_expert else mesh.tp
        is_first = sharding.shards.index == sharding.copies.index == 0 and (of.is_cut or cut.index == 0)
        is_copy = replica.tied.last is not None and of.place is replica.tied.last.place
        if is_first and not is_copy and unit.masters.num_steps():
            values = copy_on_host(_factor_values(adafactor, unit, of), mesh)
            yield HeldBox(f"{of.state}.{of.place.name}", of.full_shape, of.box, values)


def _wanted_factor(adafactor: Adafactor, unit: FlatUnit, of: FactorBox) -> WantedBox:
    values = _factor_values(adafactor, unit, of)
    return WantedBox(f"{of.state}.{of.place.name}", of.full_shape, of.box, partial(_set, values))


# What is small, and whole on every rank of a stage.


def _speaks_for(shards: ShardedStage, mesh: Mesh) -> bool:
    """True if this rank is the first of those that hold a stage."""
    sharding = next(unit.sharding for unit in shards.units if not unit.parameters[0].place.is_expert)
    return sharding.shards.index == sharding.copies.index == mesh.tp.index == 0


def _routers(replica: HoldsState, stage: int) -> dict[str, Tensor]:
    return {
        f"router.{layer}.{name}": values
        for layer, state in replica.routers(stage).items()
        for name, values in state.state_dict().items()
        if values.numel()
    }


def _float8(parameter: PlacedParameter) -> dict[str, Float8Linear]:
    """The layers with fp8 products that remember something of a weight's, by its name, and that of its experts."""
    state, place = parameter.float8, parameter.place
    if state is None or not state.recipe.delayed:
        return {}
    if isinstance(state, Float8Linear):
        return {place.name: state}
    first, _ = place.box[0]
    return {f"{place.name}.{first + number}": of for number, of in enumerate(state.experts)}


def _histories(shards: ShardedStage, mesh: Mesh) -> dict[str, Tensor]:
    """The fp8 histories that this rank writes: it is the first of those that hold the layer."""
    found = {}
    for unit in shards.units:
        axes = unit.sharding.shards, unit.sharding.copies
        cut = mesh.expert_tp if unit.parameters[0].place.is_expert else mesh.tp
        for parameter in unit.parameters if not any(axis.index for axis in (*axes, cut)) else ():
            for name, state in _float8(parameter).items():
                for of, history in state.state_dict().items():
                    numbers = [history["largest"], *history["past"]]
                    found[f"float8.{name}.{of}"] = torch.tensor(numbers, dtype=torch.float32)
    return found


def _set(into: Tensor, values: Tensor) -> None:
    into.copy_(values)


def _wanted_small(
    replica: HoldsState, stage: int, shards: ShardedStage, shapes: Mapping[str, tuple[int, ...]]
) -> list[WantedBox]:
    boxes = [
        WantedBox(name, tuple(values.shape), tuple((0, size) for size in values.shape), partial(_set, values))
        for name, values in _routers(replica, stage).items()
        if name in shapes  # else it begins anew: another gate remembers other things
    ]
    parameters = [parameter for unit in shards.units for parameter in unit.parameters]
    for name, state in (item for parameter in parameters for item in _float8(parameter).items()):
        names = {of: f"float8.{name}.{of}" for of in state.state_dict()}
        if not all(full in shapes for full in names.values()):
            continue
        read: dict[str, Any] = {}

        def take(of: str, values: Tensor, read: dict[str, Any], state: Float8Linear, names: dict[str, str]) -> None:
            largest, *past = values.tolist()
            read[of] = {"largest": largest, "past": past}
            if len(read) == len(names):
                state.load_state_dict(read)

        for of, full in names.items():
            given = partial(take, of, read=read, state=state, names=names)
            boxes.append(WantedBox(full, shapes[full], ((0, shapes[full][0]),), given))
    return boxes
