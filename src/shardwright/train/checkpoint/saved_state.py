"""The state of a model on one rank, as checkpoints hold it: the boxes that the rank writes and those that it reads.

    weights.NAME                           a parameter's weights that the optimizer updates: float32, or bf16 if there
                                           are no master weights
    exp_avg.NAME, momentum_buffer.NAME ... optimizer state of a parameter, one value per element, in the optimizer's
                                           own dtype (sharding/optimizer_state.py)
    exp_avg_sq_row.NAME, exp_avg_sq_col.NAME   float32: Adafactor's factors, by row and by column of each matrix
    router.LAYER.bias_E, ...               state of a layer's router
    float8.NAME.x, .weight, .dy            past amaxes of a layer with fp8 products: the largest, then each of them
    float8.NAME.EXPERT.x, ...              the same for one expert, by its number
    compression.KIND.NAME                  errors of compressed gradients (compression_state.py)
    buffer.NAME, frozen.NAME, trained_after.NAME   of a user's own module alone (module_state.py)

A run and a user's own module have the same parts, and a module has one more. The scale of the loss is no tensor, and
travels in the manifest.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwright.config.phrase import say
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.device_streams import wait_on_host
from shardwright.train.checkpoint.boxes import HeldBox, WantedBox, load_boxes
from shardwright.train.checkpoint.compression_state import CompressionState
from shardwright.train.checkpoint.layer_state import LayerState
from shardwright.train.checkpoint.manifest import BrokenCheckpointError, FileIndex
from shardwright.train.checkpoint.state_part import StateOwner, StatePart, StoredState
from shardwright.train.checkpoint.storage import Storage
from shardwright.train.checkpoint.weights_state import WeightsState


class ComingBoxes:
    """Copies, in host memory, of the boxes that a rank writes. On CUDA the copies are asynchronous: `wait` returns them
    when the stream has finished them."""

    def __init__(self, boxes: list[HeldBox], mesh: Mesh) -> None:
        """`boxes` are the copies that are queued on the device's current stream."""
        self._boxes, self._device, self._streams = boxes, mesh.device, mesh.streams
        self._copied = None if mesh.streams is None else mesh.streams.current().record_event()

    def wait(self) -> list[HeldBox]:
        """Wait until the copies are complete, and return the boxes. Any thread may call it."""
        if self._streams is not None and self._copied is not None:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # for this thread: else it would open a context on device 0
            wait_on_host(self._streams, self._copied)
        return self._boxes


class SavedState:
    """The state of a run's replica, or of a user's own module, on one rank."""

    def __init__(self, owner: StateOwner, mesh: Mesh, further_parts: Sequence[StatePart] = ()) -> None:
        self._owner, self._mesh = owner, mesh
        kinds = (WeightsState, LayerState, CompressionState)
        self._parts = [*(kind(owner, mesh) for kind in kinds), *further_parts]

    def copy(self) -> ComingBoxes:
        """Begin to copy the boxes that this rank writes to host memory. Later changes of the state do not reach
        them."""
        return ComingBoxes([box for part in self._parts for box in part.held()], self._mesh)

    def held(self) -> list[HeldBox]:
        """Copies, in host memory, of the boxes that this rank writes."""
        return self.copy().wait()

    def wanted(self, stored: StoredState) -> list[WantedBox]:
        """The boxes that this rank reads from a checkpoint, with functions that store them. Raises
        BrokenCheckpointError, which names the tensors that the checkpoint lacks."""
        boxes = list[WantedBox]()
        for part in self._parts:
            part_boxes = list(part.wanted(stored))
            if missing := [box.name for box in part_boxes if box.name not in stored.shapes]:
                raise BrokenCheckpointError(
                    say(
                        "it has no {name}, nor {more} more tensors of this model",
                        name=missing[0],
                        more=len(missing) - 1,
                    )
                )
            boxes += part_boxes
        return boxes

    def numbers(self) -> dict[str, Any]:
        """The state that is no tensor, for the manifest."""
        scale = self._owner.loss_scale
        return {} if scale is None else {"loss_scale": scale.state_dict()}

    def take_numbers(self, numbers: Mapping[str, Any]) -> float:
        """Load the state that is no tensor. Returns the scale of the loss divided by the checkpoint's."""
        scale, stored = self._owner.loss_scale, numbers.get("loss_scale")
        if scale is not None and stored is not None:
            scale.load_state_dict(stored)
        return (1.0 if scale is None else scale.value) / (1.0 if stored is None else float(stored["value"]))

    def load(self, stored: StoredState, storage: Storage, folder: str, indices: list[FileIndex]) -> None:
        """Read the boxes of this rank from a checkpoint's files; `take_up` must follow. Raises BrokenCheckpointError,
        OSError."""
        load_boxes(self.wanted(stored), storage, folder, indices)

    def take_up(self, stored: StoredState) -> None:
        """Go on from the state that was loaded. All-gathers the weights in ZeRO 1 and 2."""
        for part in self._parts:
            part.take_up(stored)
