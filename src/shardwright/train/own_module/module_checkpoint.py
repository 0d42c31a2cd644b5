"""Checkpoints of a module of the user's own, in the format of all others (train/checkpoint/manifest.py)."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.parallel.comm.collectives import broadcast
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.checkpoint.boxes import HeldBox, WantedBox, full_shapes
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

_BUFFER, _FROZEN, _TRAINED = "buffer.", "frozen.", "weights."


def save_module(job: JobSpec, replica: "ModuleReplica", mesh: Mesh, folder: str, step: int) -> None:
    """Write this rank's boxes, and on rank 0 the manifest once all have. Buffers and what is frozen are rank 0's.
    Raises RunError, the same on every rank."""
    from shardwright.train.checkpoint.box_writer import save_boxes  # it takes half a second, and not all save

    storage = _reached(folder, mesh)
    boxes, error = held_boxes(replica, mesh), ""
    if mesh.rank == 0:
        boxes += [_whole_box(f"{_BUFFER}{name}", values) for name, values in replica.buffers.items()]
        boxes += [_whole_box(f"{_FROZEN}{name}", values) for name, values in replica.frozen.items()]
    try:
        save_boxes(boxes, storage, folder_name(step), mesh.rank)
    except OSError as fault:
        error = str(fault)
    agree(error, mesh, f"the checkpoint of step {step} could not be written")
    if mesh.rank == 0:
        manifest = Manifest(
            step=step, samples=0, optimizer_steps=optimizer_steps(replica), job=job.model_dump(mode="json"), state={},
            files=(),
        )  # fmt: skip
        try:
            make_whole(storage, manifest, [index_file(rank) for rank in range(mesh.world.size)])
        except (OSError, BrokenCheckpointError) as fault:
            error = str(fault)
    agree(error, mesh, f"the checkpoint of step {step} could not be made whole")


def load_module(job: JobSpec, replica: "ModuleReplica", mesh: Mesh, folder: str) -> int:
    """Take up the newest whole checkpoint of a folder, as rank 0 sees it. Returns its step. Raises PlanError where rank
    0 sees none and RunError where a rank can't take up this very one: the same on every rank."""
    from shardwright.train.checkpoint.box_reader import load_boxes  # it takes half a second, and few load

    storage = _reached(folder, mesh)
    step = _chosen_step(storage, mesh)
    if step < 0:
        first = told_by_all(folder, mesh)[0]  # which may be called otherwise here
        raise PlanError("load", [f"{first} has no checkpoint; name the folder that save() was given"])
    manifest = _same_manifest(storage, step, mesh)
    error = ""
    try:
        indices = indices_of(storage, manifest)
        shapes = dict(full_shapes(indices))
        boxes = _wanted_trained(replica, shapes, optimizer_anew=not manifest.optimizer_steps)
        boxes += [_wanted_whole("buffer", name, values, (_BUFFER,), shapes) for name, values in replica.buffers.items()]
        boxes += [
            _wanted_whole("frozen parameter", name, values, (_FROZEN, _TRAINED), shapes)
            for name, values in replica.frozen.items()
        ]
        load_boxes(boxes, storage, folder_name(step), indices)
    except (OSError, BrokenCheckpointError) as fault:
        error = f"{storage.root}/{folder_name(step)}: {fault}"
    agree(error, mesh, f"the checkpoint of step {step} can't be taken up")
    take_up(replica, manifest.optimizer_steps)
    return step


def _reached(folder: str, mesh: Mesh) -> Storage:
    """Where a checkpoint lies. RunError on every rank where one can't reach it."""
    storage, error = None, ""
    try:
        storage = open_storage(folder)
    except PlanError as fault:
        error = "; ".join(fault.faults)
    agree(error, mesh, "checkpoints can't be reached")
    assert storage is not None
    return storage


def _chosen_step(storage: Storage, mesh: Mesh) -> int:
    """The newest healthy step that rank 0 has, -1 for none. Other ranks may see another folder under the same name, or
    an older state of it, and each by itself would take its own."""
    newest, error = -1, ""
    if mesh.rank == 0:
        try:
            newest = next(iter(in_order_to_load(storage, steps_kept(storage))), -1)
        except OSError as fault:
            error = f"{storage.root}: {fault}"
    agree(error, mesh, "checkpoints can't be looked for")
    return int(broadcast(torch.tensor([newest], dtype=torch.int64, device=mesh.device), mesh.world, 0).item())


def _same_manifest(storage: Storage, step: int, mesh: Mesh) -> Manifest:
    """What the checkpoint of a step is of. RunError on every rank, naming those that lack it, where it is not on each
    the one that rank 0 has."""
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
    first = told_by_all(digest, mesh)[0]
    if first and digest and digest != first:
        error = f"{place} is another checkpoint than that of rank 0"
    way_out = "" if mesh.world.size == 1 else "; all ranks must see the one folder that save() was given"
    agree(error and error + way_out, mesh, f"the checkpoint of step {step} can't be taken up")
    assert manifest is not None
    return manifest


def _wanted_trained(
    replica: "ModuleReplica", shapes: Mapping[str, tuple[int, ...]], optimizer_anew: bool
) -> list[WantedBox]:
    """What this rank needs for what is trained. Of what was frozen until now there are values alone: what the optimizer
    remembers of it begins at 0."""
    names = (name.removeprefix(_FROZEN) for name in shapes if name.startswith(_FROZEN))
    thawed = {name for name in names if _TRAINED + name not in shapes}
    units = [unit for shards in replica.shards.values() for unit in shards.units]
    states = {_TRAINED[:-1], *(state for unit in units for state in unit.masters.moment_names())}
    known = {f"{state}.{name}": shapes[_FROZEN + name] for state in states for name in thawed} | dict(shapes)
    found = []
    for box in wanted_boxes(replica, known, weights_alone=False, optimizer_anew=optimizer_anew):
        state, _, name = box.name.partition(".")
        if name not in thawed:
            found.append(box)
        elif state == _TRAINED[:-1]:
            found.append(replace(box, name=_FROZEN + name))
    return found


def _whole_box(name: str, values: Tensor) -> HeldBox:
    kept = values.detach().cpu().clone().contiguous()
    return HeldBox(name, tuple(kept.shape), tuple((0, size) for size in kept.shape), kept)


def _wanted_whole(
    kind: str, name: str, values: Tensor, prefixes: tuple[str, ...], shapes: Mapping[str, tuple[int, ...]]
) -> WantedBox:
    """All of a tensor, under the first of these prefixes that the checkpoint has it by."""
    found = next((prefix + name for prefix in prefixes if prefix + name in shapes), None)
    if found is None:
        raise BrokenCheckpointError(f"it has no {kind} {name}")
    return WantedBox(found, tuple(values.shape), tuple((0, size) for size in values.shape), partial(_set, values))


def _set(into: Tensor, values: Tensor) -> None:
    into.copy_(values)
