"""A rank's share of a run's state in a checkpoint: the boxes that it writes, and the boxes that it reads.

    weights.NAME                           float32: a parameter's master weights, which the optimizer updates
    exp_avg.NAME, momentum_buffer.NAME ... optimizer state of a parameter, one value per element, in the optimizer's
                                           own dtype (sharding/optimizer_state.py)
    exp_avg_sq_row.NAME, exp_avg_sq_col.NAME   float32: Adafactor's factors, by row and by column of each matrix
    router.LAYER.bias_E, ...               state of a layer's router
    float8.NAME.x, .weight, .dy            past amaxes of a layer with fp8 products: the largest, then each of them
    float8.NAME.EXPERT.x, ...              the same for one expert, by its number
    compression.KIND.NAME                  errors of compressed gradients (compression_state.py)

One rank writes each element. Replicas hold the same rows, so each replica writes a part of them.
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

# The most elements of a box that is read at once.
_MOST_ELEMENTS = 8 * MIB
_WEIGHTS = "weights"


@dataclass(frozen=True)
class _HeldRows:
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


class ComingBoxes:
    """Copies, in host memory, of the boxes that a rank writes. On CUDA the copies are asynchronous: `wait` returns them
    when the stream has finished them."""

    def __init__(self, boxes: list[HeldBox], mesh: Mesh) -> None:
        """`boxes` are the copies that are queued on the device's current stream."""
        self._boxes, self._device = boxes, mesh.device
        self._copied = None if mesh.streams is None else mesh.streams.current().record_event()

    def wait(self) -> list[HeldBox]:
        """Wait until the copies are complete, and return the boxes. Any thread may call it."""
        if self._copied is not None:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # for this thread: else it would open a context on device 0
            self._copied.synchronize()
        return self._boxes


def held_boxes(replica: HoldsState, mesh: Mesh) -> list[HeldBox]:
    """Copies, in host memory, of the boxes that this rank writes."""
    return coming_boxes(replica, mesh).wait()


def coming_boxes(replica: HoldsState, mesh: Mesh) -> ComingBoxes:
    """Begin to copy the boxes that this rank writes to host memory. Later changes of the state do not reach them."""
    boxes = [box for rows in _written_rows(replica, mesh) for box in _boxes_of(rows)]
    boxes += _written_factors(replica, mesh)
    for stage, shards in replica.shards.items():
        tensors = _histories(shards, mesh)
        if _writes_routers(shards, mesh):
            tensors |= _routers(replica, stage)
        boxes += [_whole_box(name, values, mesh) for name, values in tensors.items()]
    return ComingBoxes(boxes + list(held_compression(replica, mesh)), mesh)


def _whole_box(name: str, values: Tensor, mesh: Mesh) -> HeldBox:
    copy = copy_on_host(values, mesh)
    return HeldBox(name, tuple(copy.shape), tuple((0, size) for size in copy.shape), copy)


def _boxes_of(rows: _HeldRows) -> Iterator[HeldBox]:
    """The boxes of a parameter's rows, in each tensor that the optimizer keeps."""
    place, size = rows.parameter.place, rows.row_size
    for state in rows.unit.masters.state_names():
        start = rows.start
        values = rows.unit.masters.copy_out(state, start, start + (rows.end - rows.first) * size)
        for part in cut_rows(place.box, rows.first, rows.end, 2**62):
            part_values = values[(part.first - rows.first) * size : (part.end - rows.first) * size]
            yield HeldBox(f"{state}.{rows.name}", place.full_shape, part.box, part_values.view(part.shape))


def wanted_boxes(
    replica: HoldsState,
    shapes: Mapping[str, tuple[int, ...]],
    weights_alone: bool,
    scaled_by: float = 1.0,
    optimizer_anew: bool = False,
) -> list[WantedBox]:
    """The boxes that this rank reads from a checkpoint with tensors of these `shapes`, with functions that store them.

    With `weights_alone` only weights are read; with `optimizer_anew` all but the optimizer's state. `scaled_by` is the
    new scale of the loss divided by the old one. BrokenCheckpointError names the tensors that the checkpoint lacks.
    """
    with_moments = not (weights_alone or optimizer_anew)
    boxes = [
        box
        for rows in _held_rows(replica)
        for state in (_WEIGHTS, *(rows.unit.masters.moment_names() if with_moments else ()))
        for box in _wanted_rows(rows, state)
    ]
    if with_moments:
        boxes += [_wanted_factor(adafactor, unit, factor) for unit, adafactor, factor in _factors(replica)]
    if not weights_alone:
        for stage, shards in replica.shards.items():
            boxes += _wanted_layer_state(replica, stage, shards, shapes)
        boxes += wanted_compression(replica, shapes, scaled_by)
    if missing := [box.name for box in boxes if box.name not in shapes]:
        raise BrokenCheckpointError(f"it has no {missing[0]}, nor {len(missing) - 1} more tensors of this model")
    return boxes


def has_optimizer(job: JobSpec, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """True if a checkpoint with tensors of these shapes has the complete state of the job's optimizer."""
    return all(
        f"{state}.{place.name}" in shapes
        for place in model_parameters(job.model)
        for state in states_of(job.optimizer, place.name, place.full_shape)
    )


def take_up(replica: HoldsState, optimizer_steps: int) -> None:
    """Go on from the state that was loaded, after all wanted boxes are filled. All-gathers the weights in ZeRO 1 and
    2."""
    for shards in replica.shards.values():
        for unit in shards.units:
            unit.masters.set_num_steps(optimizer_steps)
            unit.take_up()
    for state in replica.float8_states:
        state.weight_changed()


def optimizer_steps(replica: HoldsState) -> int:
    """The number of steps that the optimizer has done. Between two steps of a run it is equal for all parameters."""
    return max(unit.masters.num_steps() for shards in replica.shards.values() for unit in shards.units)


def _held_rows(replica: HoldsState) -> Iterator[_HeldRows]:
    """All rows of parameters in this rank's shards."""
    for shards in replica.shards.values():
        for unit in shards.units:
            for parameter in unit.parameters:
                first, end, start = unit.rows_held(parameter)
                if first < end:
                    yield _HeldRows(unit, parameter, first, end, start)


def _written_rows(replica: HoldsState, mesh: Mesh) -> Iterator[_HeldRows]:
    """The rows that this rank writes: its part of the rows that several replicas hold."""
    for rows in _held_rows(replica):
        sharding, parameter = rows.unit.sharding, rows.parameter
        # If the head of a tied embedding is not on the rank of the table, it is a copy of the table.
        if parameter is replica.tied.last or not is_first_of_line(parameter, mesh):
            continue
        num_copies, index = sharding.copies.size, sharding.copies.index
        if not sharding.zero:
            num_copies, index = num_copies * sharding.shards.size, index * sharding.shards.size + sharding.shards.index
        num_rows = rows.end - rows.first
        low, high = num_rows * index // num_copies, num_rows * (index + 1) // num_copies
        if low < high:
            yield _HeldRows(
                rows.unit, parameter, rows.first + low, rows.first + high, start=rows.start + low * rows.row_size
            )


def _wanted_rows(rows: _HeldRows, state: str) -> Iterator[WantedBox]:
    place, size, masters = rows.parameter.place, rows.row_size, rows.unit.masters

    def take(start: int, values: Tensor) -> None:
        masters.copy_in(state, start, values.view(-1))

    for part in cut_rows(place.box, rows.first, rows.end, _MOST_ELEMENTS):
        start = rows.start + (part.first - rows.first) * size
        yield WantedBox(f"{state}.{rows.name}", place.full_shape, part.box, partial(take, start))


# Adafactor's factors: every rank that shares a unit holds all of them.


def _factors(replica: HoldsState) -> Iterator[tuple[FlatUnit, Adafactor, FactorBox]]:
    for shards in replica.shards.values():
        for unit in shards.units:
            if isinstance(unit.masters.steps, Adafactor):
                for factor in unit.masters.steps.sums.factors():
                    yield unit, unit.masters.steps, factor


def _factor_values(adafactor: Adafactor, unit: FlatUnit, factor: FactorBox) -> Tensor:
    row_factors, column_factors = adafactor.factors(unit.parameters[0].device)
    values = row_factors if factor.state == FACTORS[0] else column_factors
    return values[slice(*factor.within)].view(shape_of_box(factor.box))


def _written_factors(replica: HoldsState, mesh: Mesh) -> Iterator[HeldBox]:
    """The factors that this rank writes: it is the first rank that holds them."""
    for unit, adafactor, factor in _factors(replica):
        sharding, tp = unit.sharding, mesh.expert_tp if factor.place.is_expert else mesh.tp
        is_first = sharding.shards.index == sharding.copies.index == 0 and (factor.is_cut or tp.index == 0)
        is_copy = replica.tied.last is not None and factor.place is replica.tied.last.place
        if is_first and not is_copy and unit.masters.num_steps():
            values = copy_on_host(_factor_values(adafactor, unit, factor), mesh)
            yield HeldBox(f"{factor.state}.{factor.place.name}", factor.full_shape, factor.box, values)


def _wanted_factor(adafactor: Adafactor, unit: FlatUnit, factor: FactorBox) -> WantedBox:
    values = _factor_values(adafactor, unit, factor)
    return WantedBox(f"{factor.state}.{factor.place.name}", factor.full_shape, factor.box, partial(_set, values))


# Small state of layers: of routers, complete on every rank of a stage, and of fp8 products.


def _writes_routers(shards: ShardedStage, mesh: Mesh) -> bool:
    """True if this rank is the first rank that holds a stage."""
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
    """The fp8 products of a weight that keep a history, by the weight's name, or by its name and the expert's
    number."""
    state, place = parameter.float8, parameter.place
    if state is None or not state.recipe.delayed:
        return {}
    if isinstance(state, Float8Linear):
        return {place.name: state}
    first, _ = place.box[0]
    return {f"{place.name}.{first + number}": expert for number, expert in enumerate(state.experts)}


def _histories(shards: ShardedStage, mesh: Mesh) -> dict[str, Tensor]:
    """The fp8 histories that this rank writes: it is the first rank that holds the layer."""
    histories = {}
    for unit in shards.units:
        axes = unit.sharding.shards, unit.sharding.copies
        tp = mesh.expert_tp if unit.parameters[0].place.is_expert else mesh.tp
        for parameter in unit.parameters if not any(axis.index for axis in (*axes, tp)) else ():
            for name, state in _float8(parameter).items():
                for operand, history in state.state_dict().items():
                    numbers = [history["largest"], *history["past"]]
                    histories[f"float8.{name}.{operand}"] = torch.tensor(numbers, dtype=torch.float32)
    return histories


def _set(target: Tensor, values: Tensor) -> None:
    target.copy_(values)


def _wanted_layer_state(
    replica: HoldsState, stage: int, shards: ShardedStage, shapes: Mapping[str, tuple[int, ...]]
) -> list[WantedBox]:
    """The boxes of routers and fp8 histories that the checkpoint has."""
    boxes = [
        WantedBox(name, tuple(values.shape), tuple((0, size) for size in values.shape), partial(_set, values))
        for name, values in _routers(replica, stage).items()
        if name in shapes  # else the router starts anew: another kind of gate has other state
    ]
    parameters = [parameter for unit in shards.units for parameter in unit.parameters]
    for name, state in (item for parameter in parameters for item in _float8(parameter).items()):
        names = {operand: f"float8.{name}.{operand}" for operand in state.state_dict()}
        if not all(full_name in shapes for full_name in names.values()):
            continue
        read: dict[str, Any] = {}

        def take(
            operand: str, values: Tensor, read: dict[str, Any], state: Float8Linear, names: dict[str, str]
        ) -> None:
            largest, *past = values.tolist()
            read[operand] = {"largest": largest, "past": past}
            if len(read) == len(names):
                state.load_state_dict(read)

        for operand, full_name in names.items():
            take_operand = partial(take, operand, read=read, state=state, names=names)
            boxes.append(WantedBox(full_name, shapes[full_name], ((0, shapes[full_name][0]),), take_operand))
    return boxes
