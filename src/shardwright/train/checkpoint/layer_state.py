"""The small state of layers in a checkpoint: of routers, complete on every rank of a stage, and of fp8 products."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.parameter import PlacedParameter
from shardwright.parallel.zero.sharded_stage import ShardedStage
from shardwright.precision.float8_linear import Float8Linear
from shardwright.train.checkpoint.boxes import HeldBox, WantedBox
from shardwright.train.checkpoint.state_part import (
    Shapes,
    StateOwner,
    StatePart,
    StoredState,
    whole_held_box,
    whole_wanted_box,
)


class LayerState(StatePart):
    """The state of routers and the fp8 histories of layers, of each that a checkpoint has."""

    def held(self) -> Iterator[HeldBox]:
        for stage, shards in self.owner.shards.items():
            tensors = _histories(shards, self.mesh)
            if _writes_routers(shards, self.mesh):
                tensors |= _routers(self.owner, stage)
            for name, values in tensors.items():
                yield whole_held_box(name, values, self.mesh)

    def wanted(self, stored: StoredState) -> Iterator[WantedBox]:
        for stage, shards in self.owner.shards.items() if not stored.weights_alone else ():
            for name, values in _routers(self.owner, stage).items():
                if name in stored.shapes:  # else the router starts anew: another kind of gate has other state
                    yield whole_wanted_box(name, values)
            for parameter in (parameter for unit in shards.units for parameter in unit.parameters):
                for name, state in _float8(parameter).items():
                    yield from _wanted_history(name, state, stored.shapes)

    def take_up(self, stored: StoredState) -> None:
        """Tell the fp8 products that their weights are others."""
        for state in self.owner.float8_states:
            state.weight_changed()


def _writes_routers(shards: ShardedStage, mesh: Mesh) -> bool:
    """True if this rank is the first rank that holds a stage."""
    sharding = next(unit.sharding for unit in shards.units if not unit.parameters[0].place.is_expert)
    return sharding.shards.index == sharding.copies.index == mesh.tp.index == 0


def _routers(owner: StateOwner, stage: int) -> dict[str, Tensor]:
    return {
        f"router.{layer}.{name}": values
        for layer, state in owner.routers(stage).items()
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


def _wanted_history(name: str, state: Float8Linear, shapes: Shapes) -> Iterator[WantedBox]:
    """The boxes of the history of one product, if the checkpoint has all of them."""
    names = {operand: f"float8.{name}.{operand}" for operand in state.state_dict()}
    if not all(full_name in shapes for full_name in names.values()):
        return
    histories: dict[str, Any] = {}

    def take(operand: str, values: Tensor) -> None:
        largest, *past = values.tolist()
        histories[operand] = {"largest": largest, "past": past}
        if len(histories) == len(names):
            state.load_state_dict(histories)

    for operand, full_name in names.items():
        yield WantedBox(full_name, shapes[full_name], ((0, shapes[full_name][0]),), partial(take, operand))
