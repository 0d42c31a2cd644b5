"""The state of a user's module in a checkpoint, besides its trained parameters.

    buffer.NAME           a buffer; every rank has its own, and those of rank 0 are saved
    frozen.NAME           a parameter that is not trained
    trained_after.NAME    int64 [1]: the steps that the optimizer had done when a parameter was first trained; not there
                          for parameters that were trained from the first step on

Parameters may be frozen and trained by turns. A thawed one, which was frozen when the checkpoint was written, begins
with an optimizer state of zeros, and counts its steps from there.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwright.config.phrase import say
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.checkpoint.boxes import HeldBox, WantedBox
from shardwright.train.checkpoint.manifest import BrokenCheckpointError
from shardwright.train.checkpoint.state_part import (
    FROZEN,
    WEIGHTS,
    Shapes,
    StatePart,
    StoredState,
    units_of,
    whole_held_box,
    whole_wanted_box,
)
from shardwright.train.checkpoint.weights_state import held_rows

if TYPE_CHECKING:
    from shardwright.train.own_module.sharded_module import ModuleReplica

_BUFFER, _AFTER = "buffer", "trained_after"


class ModuleState(StatePart):
    """Buffers, frozen parameters, and the steps before parameters were first trained."""

    def __init__(self, replica: "ModuleReplica", mesh: Mesh) -> None:
        super().__init__(replica, mesh)
        self._replica = replica
        self._trained_after: dict[str, int] = {}  # as the checkpoint has it, once its boxes are read

    def held(self) -> Iterator[HeldBox]:
        if self.mesh.rank == 0:
            tensors = {f"{_BUFFER}.{name}": values for name, values in self._replica.buffers.items()}
            tensors |= {f"{FROZEN}.{name}": values for name, values in self._replica.frozen.items()}
            tensors |= {f"{_AFTER}.{name}": torch.tensor([n]) for name, n in self._replica.trained_after.items()}
            for name, values in tensors.items():
                yield whole_held_box(name, values, self.mesh)

    def wanted(self, stored: StoredState) -> Iterator[WantedBox]:
        for name, values in self._replica.buffers.items():
            yield _wanted("buffer", name, values, (_BUFFER,), stored.shapes)
        for name, values in self._replica.frozen.items():
            yield _wanted(say("frozen parameter"), name, values, (FROZEN, WEIGHTS), stored.shapes)
        parameters = [parameter for unit in units_of(self.owner) for parameter in unit.parameters]
        for name in [parameter.place.name for parameter in parameters] if stored.optimizer_steps else ():
            if name in stored.thawed:
                self._trained_after[name] = stored.optimizer_steps
            elif f"{_AFTER}.{name}" in stored.shapes:
                yield self._wanted_count(name, stored.optimizer_steps)

    def _wanted_count(self, name: str, optimizer_steps: int) -> WantedBox:
        def take(values: Tensor) -> None:
            number = int(values.long())
            if not 0 < number <= optimizer_steps:
                raise BrokenCheckpointError(
                    say(
                        "{after}.{name} is {number}, and its optimizer has done {optimizer_steps} steps",
                        after=_AFTER,
                        name=name,
                        number=number,
                        optimizer_steps=optimizer_steps,
                    )
                )
            self._trained_after[name] = number

        return WantedBox(f"{_AFTER}.{name}", (1,), ((0, 1),), take)

    def take_up(self, stored: StoredState) -> None:
        """Let the optimizer count the steps of each parameter from its first one. The optimizer's state of thawed
        parameters is set to 0."""
        self._replica.trained_after.clear()
        self._replica.trained_after.update(self._trained_after)
        for rows in held_rows(self.owner):
            masters = rows.unit.masters
            if rows.name in self._trained_after:
                masters.count_after(rows.start, rows.stop, self._trained_after[rows.name])
                for state in masters.moment_names() if rows.name in stored.thawed else ():
                    masters.copy_in(state, rows.start, torch.zeros(rows.stop - rows.start))


def thawed_parameters(shapes: Shapes) -> frozenset[str]:
    """The names of parameters that were frozen when a checkpoint with tensors of these shapes was written."""
    prefix = f"{FROZEN}."
    names = (name.removeprefix(prefix) for name in shapes if name.startswith(prefix))
    return frozenset(name for name in names if f"{WEIGHTS}.{name}" not in shapes)


def _wanted(subject: str, name: str, target: Tensor, kinds: tuple[str, ...], shapes: Shapes) -> WantedBox:
    """The box of a full tensor, of the first of these kinds that the checkpoint has; it is called `subject` if it has
    none."""
    stored_name = next((f"{kind}.{name}" for kind in kinds if f"{kind}.{name}" in shapes), None)
    if stored_name is None:
        raise BrokenCheckpointError(say("it has no {subject} {name}", subject=subject, name=name))
    return whole_wanted_box(stored_name, target)
