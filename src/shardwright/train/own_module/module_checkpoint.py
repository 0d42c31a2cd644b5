"""Checkpoints of a user's module, in the format of all checkpoints (train/checkpoint/manifest.py)."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.parallel.comm.collectives import broadcast
from shardwright.parallel.comm.hang_watch import meet
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.sharding.flat_buffer import rows_of
from shardwright.train.checkpoint.boxes import HeldBox, WantedBox, full_shapes, load_boxes, save_boxes
from shardwright.train.checkpoint.kept import in_order_to_load, indices_of, make_whole, manifest_of, steps_kept
from shardwright.train.checkpoint.manifest import (
    MANIFEST,
    BrokenCheckpointError,
    Manifest,
    digest_of,
    folder_name,
    index_file,
    to_bytes,
)
from shardwright.train.checkpoint.replica_state import held_boxes, optimizer_steps, take_up, wanted_boxes
from shardwright.train.checkpoint.storage import Storage, open_storage
from shardwright.train.own_module.agreement import agree, told_by_all

if TYPE_CHECKING:
    from shardwright.train.own_module.sharded_module import ModuleReplica

_BUFFER, _FROZEN, _TRAINED, _AFTER = "buffer.", "frozen.", "weights.", "trained_after."


def save_module(job: JobSpec, replica: "ModuleReplica", mesh: Mesh, folder: str, step: int) -> None:
    """Write this rank's boxes, and then on rank 0 the manifest. Rank 0 also writes buffers and frozen parameters.
    Raises RunError, the same on every rank, if a rank can't write; also if trained weights are not finite, because
    `load` takes the newest checkpoint."""
    storage = _open_folder(folder, mesh)
    shards = [unit.value_shard for stage in replica.shards.values() for unit in stage.units]
    is_ruined = any(not bool(values.isfinite().all()) for values in shards)
    ruin_fault = "its weights are not finite; what was saved before stays, and load() goes on from that"
    agree(ruin_fault if is_ruined else "", mesh, f"the checkpoint of step {step} is not written")
    boxes, error = held_boxes(replica, mesh), ""
    if mesh.rank == 0:
        boxes += [_whole_box(f"{_BUFFER}{name}", values) for name, values in replica.buffers.items()]
        boxes += [_whole_box(f"{_FROZEN}{name}", values) for name, values in replica.frozen.items()]
        boxes += [_whole_box(f"{_AFTER}{name}", torch.tensor([n])) for name, n in replica.trained_after.items()]
    try:
        save_boxes(boxes, storage, folder_name(step), mesh.rank)
    except OSError as fault:
        error = str(fault)
    agree(error, mesh, f"the checkpoint of step {step} could not be written")
    if mesh.rank == 0:
        fields = job.model_dump(mode="json")
        manifest = Manifest(
            step=step, samples=0, optimizer_steps=optimizer_steps(replica), job=fields, state={}, files=()
        )
        try:
            make_whole(storage, manifest, [index_file(rank) for rank in range(mesh.world.size)])
        except (OSError, BrokenCheckpointError) as fault:
            error = str(fault)
    agree(error, mesh, f"the checkpoint of step {step} could not be made whole")


def load_module(job: JobSpec, replica: "ModuleReplica", mesh: Mesh, folder: str) -> int:
    """Load the newest whole checkpoint that rank 0 sees in a folder. Returns its step. Raises, the same on every rank,
    PlanError if rank 0 sees no checkpoint, and RunError if a rank can't load that one."""
    storage = _open_folder(folder, mesh)
    step = _chosen_step(storage, mesh)
    if step < 0:
        folder_of_rank_0 = told_by_all(folder, mesh)[0]  # its name may differ from this rank's
        raise PlanError("load", [f"{folder_of_rank_0} has no checkpoint; name the folder that save() was given"])
    manifest = _same_manifest(storage, step, mesh)
    error, trained_after, shapes = "", dict[str, Tensor](), dict[str, tuple[int, ...]]()
    try:
        indices = indices_of(storage, manifest)
        shapes = dict(full_shapes(indices))
        boxes = _wanted_trained(replica, shapes, optimizer_anew=not manifest.optimizer_steps)
        boxes += [_wanted_whole("buffer", name, values, (_BUFFER,), shapes) for name, values in replica.buffers.items()]
        boxes += [
            _wanted_whole("frozen parameter", name, values, (_FROZEN, _TRAINED), shapes)
            for name, values in replica.frozen.items()
        ]
        trained_after = _trained_after(replica, shapes, manifest.optimizer_steps)
        unread = {name: number for name, number in trained_after.items() if not number}
        boxes += [_wanted_whole("count", name, values, (_AFTER,), shapes) for name, values in unread.items()]
        load_boxes(boxes, storage, folder_name(step), indices)
        _check_counts(trained_after, manifest.optimizer_steps)
    except (OSError, BrokenCheckpointError) as fault:
        error = f"{storage.root}/{folder_name(step)}: {fault}"
    meet(mesh.watch, mesh.rank, mesh.world.size, f"reading {folder_name(step)}")  # some ranks read more than others
    agree(error, mesh, f"the checkpoint of step {step} can't be taken up")
    take_up(replica, manifest.optimizer_steps)
    _count_after(replica, {name: int(number) for name, number in trained_after.items()}, _thawed(shapes))
    return step


def _open_folder(folder: str, mesh: Mesh) -> Storage:
    """The storage of checkpoints in `folder`. Raises RunError on every rank if one can't reach it."""
    storage, error = None, ""
    try:
        storage = open_storage(folder)
    except PlanError as fault:
        error = "; ".join(fault.faults)
    agree(error, mesh, "checkpoints can't be reached")
    assert storage is not None
    return storage


def _chosen_step(storage: Storage, mesh: Mesh) -> int:
    """The newest healthy step that rank 0 sees, broadcast to all ranks; -1 if there is none. Other ranks may see
    another folder under the same name, or an older state of it."""
    newest, error = -1, ""
    if mesh.rank == 0:
        try:
            newest = next(iter(in_order_to_load(storage, steps_kept(storage))), -1)
        except OSError as fault:
            error = f"{storage.root}: {fault}"
    agree(error, mesh, "checkpoints can't be looked for")
    return int(broadcast(torch.tensor([newest], dtype=torch.int64, device=mesh.device), mesh.world, 0).item())


def _same_manifest(storage: Storage, step: int, mesh: Mesh) -> Manifest:
    """The manifest of a step's checkpoint. Raises RunError on every rank, naming the ranks at fault, if a rank has no
    manifest or another one than rank 0."""
    place = f"{storage.root}/{folder_name(step)}"
    manifest, error, digest = None, "", ""
    try:
        if MANIFEST in storage.names(folder_name(step)):
            manifest = manifest_of(storage, step)
            digest = digest_of(to_bytes(manifest))
        else:
            error = f"there is no {place}"
    except (OSError, BrokenCheckpointError) as fault:
        error = f"{place}: {fault}"
    digest_of_rank_0 = told_by_all(digest, mesh)[0]
    if digest_of_rank_0 and digest and digest != digest_of_rank_0:
        error = f"{place} is another checkpoint than that of rank 0"
    way_out = "" if mesh.world.size == 1 else "; all ranks must see the one folder that save() was given"
    agree(error and error + way_out, mesh, f"the checkpoint of step {step} can't be taken up")
    assert manifest is not None
    return manifest


def _wanted_trained(
    replica: "ModuleReplica", shapes: Mapping[str, tuple[int, ...]], optimizer_anew: bool
) -> list[WantedBox]:
    """The boxes of trained parameters that this rank needs. A parameter that was frozen when the checkpoint was written
    has values alone, and its optimizer state begins anew."""
    thawed = _thawed(shapes)
    units = [unit for shards in replica.shards.values() for unit in shards.units]
    states = {_TRAINED[:-1], *(state for unit in units for state in unit.masters.moment_names())}
    # Shapes as if thawed parameters had been trained.
    trained_shapes = {f"{state}.{name}": shapes[_FROZEN + name] for state in states for name in thawed} | dict(shapes)
    boxes = []
    for box in wanted_boxes(replica, trained_shapes, weights_alone=False, optimizer_anew=optimizer_anew):
        state, _, name = box.name.partition(".")
        if name not in thawed:
            boxes.append(box)
        elif state == _TRAINED[:-1]:
            boxes.append(replace(box, name=_FROZEN + name))
    return boxes


def _thawed(shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """The names of parameters that were frozen when a checkpoint with tensors of these shapes was written."""
    names = (name.removeprefix(_FROZEN) for name in shapes if name.startswith(_FROZEN))
    return {name for name in names if _TRAINED + name not in shapes}


def _trained_after(
    replica: "ModuleReplica", shapes: Mapping[str, tuple[int, ...]], optimizer_steps: int
) -> dict[str, Tensor]:
    """The number of steps before each parameter was first trained, [1], for parameters of this rank that were not
    trained from the first step on: `optimizer_steps` for those frozen in the checkpoint, and 0 for the others, whose
    number is read into the tensor later."""
    if not optimizer_steps:
        return {}
    thawed, numbers = _thawed(shapes), dict[str, Tensor]()
    for unit in (unit for shards in replica.shards.values() for unit in shards.units):
        for name in (parameter.place.name for parameter in unit.parameters):
            if name in thawed or _AFTER + name in shapes:
                numbers[name] = torch.tensor([optimizer_steps if name in thawed else 0])
    return numbers


def _check_counts(trained_after: Mapping[str, Tensor], optimizer_steps: int) -> None:
    for name, number in trained_after.items():
        if not 0 < int(number) <= optimizer_steps:
            raise BrokenCheckpointError(
                f"{_AFTER}{name} is {int(number)}, and its optimizer has done {optimizer_steps} steps"
            )


def _count_after(replica: "ModuleReplica", trained_after: Mapping[str, int], thawed: Collection[str]) -> None:
    """Let the optimizer count the steps of each of these parameters from its number in `trained_after`. The optimizer
    state of thawed parameters is set to 0."""
    replica.trained_after.clear()
    replica.trained_after.update(trained_after)
    for unit in (unit for shards in replica.shards.values() for unit in shards.units):
        for parameter in (p for p in unit.parameters if p.place.name in trained_after):
            first_row, end_row, start = unit.rows_held(parameter)
            num_elements, name = (end_row - first_row) * rows_of(parameter.shape)[1], parameter.place.name
            if num_elements <= 0:
                continue
            unit.masters.count_after(start, start + num_elements, trained_after[name])
            for state in unit.masters.moment_names() if name in thawed else ():
                unit.masters.copy_in(state, start, torch.zeros(num_elements))


def _whole_box(name: str, values: Tensor) -> HeldBox:
    copy = values.detach().cpu().clone().contiguous()
    return HeldBox(name, tuple(copy.shape), tuple((0, size) for size in copy.shape), copy)


def _wanted_whole(
    kind: str, name: str, values: Tensor, prefixes: tuple[str, ...], shapes: Mapping[str, tuple[int, ...]]
) -> WantedBox:
    """The box of a full tensor, under the first of `prefixes` with which the checkpoint has it."""
    stored_name = next((prefix + name for prefix in prefixes if prefix + name in shapes), None)
    if stored_name is None:
        raise BrokenCheckpointError(f"it has no {kind} {name}")
    return WantedBox(stored_name, tuple(values.shape), tuple((0, size) for size in values.shape), partial(_set, values))


def _set(target: Tensor, values: Tensor) -> None:
    target.copy_(values)
