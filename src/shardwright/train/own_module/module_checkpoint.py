"""Checkpoints of a module of the user's own, in the format of all others (train/checkpoint/manifest.py)."""

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

_BUFFER, _FROZEN, _TRAINED, _AFTER = "buffer.", "frozen.", "weights.", "trained_after."


def save_module(job: JobSpec, replica: "ModuleReplica", mesh: Mesh, folder: str, step: int) -> None:
    """Write this rank's boxes, and on rank 0 the manifest once all have. Buffers and what is frozen are rank 0's.
    Raises RunError, the same on every rank: also where weights that are trained are no numbers, for `load` takes the
    newest checkpoint."""
    from shardwright.train.checkpoint.box_writer import save_boxes  # it takes half a second, and not all save

    storage = _reached(folder, mesh)
    shards = [unit.value_shard for held in replica.shards.values() for unit in held.units]
    is_ruined = any(not bool(values.isfinite().all()) for values in shards)
    ruined = "its weights are not finite; what was saved before stays, and load() goes on from that"
    agree(ruined if is_ruined else "", mesh, f"the checkpoint of step {step} is not written")
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
    error, begun, shapes = "", dict[str, Tensor](), dict[str, tuple[int, ...]]()
    try:
        indices = indices_of(storage, manifest)
        shapes = dict(full_shapes(indices))
        boxes = _wanted_trained(replica, shapes, optimizer_anew=not manifest.optimizer_steps)
        boxes += [_wanted_whole("buffer", name, values, (_BUFFER,), shapes) for name, values in replica.buffers.items()]
        boxes += [
            _wanted_whole("frozen parameter", name, values, (_FROZEN, _TRAINED), shapes)
            for name, values in replica.frozen.items()
        ]
        begun = _begun_later(replica, shapes, manifest.optimizer_steps)
        unread = {name: values for name, values in begun.items() if not values}
        boxes += [_wanted_whole("count", name, values, (_AFTER,), shapes) for name, values in unread.items()]
        load_boxes(boxes, storage, folder_name(step), indices)
        _check_counts(begun, manifest.optimizer_steps)
    except (OSError, BrokenCheckpointError) as fault:
        error = f"{storage.root}/{folder_name(step)}: {fault}"
    meet(mesh.watch, mesh.rank, mesh.world.size, f"reading {folder_name(step)}")  # some ranks read more
    agree(error, mesh, f"the checkpoint of step {step} can't be taken up")
    take_up(replica, manifest.optimizer_steps)
    _count_after(replica, {name: int(number) for name, number in begun.items()}, _thawed(shapes))
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
    """The manifest of a step's checkpoint. RunError on every rank, naming those that lack it, where it is not on each
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
    """The boxes that this rank needs of the trained parameters. Of what was frozen until now there are values alone:
    what the optimizer remembers of it begins anew."""
    thawed = _thawed(shapes)
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


def _thawed(shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """The parameters that were frozen when a checkpoint with tensors of these shapes was written."""
    names = (name.removeprefix(_FROZEN) for name in shapes if name.startswith(_FROZEN))
    return {name for name in names if _TRAINED + name not in shapes}


def _begun_later(
    replica: "ModuleReplica", shapes: Mapping[str, tuple[int, ...]], optimizer_steps: int
) -> dict[str, Tensor]:
    """After how many steps each parameter here was first trained that was not from the first one on, [1]: those that
    were frozen until now after all of them. Of others the number is 0 until it is read."""
    if not optimizer_steps:
        return {}
    thawed, found = _thawed(shapes), dict[str, Tensor]()
    for unit in (unit for shards in replica.shards.values() for unit in shards.units):
        for name in (parameter.place.name for parameter in unit.parameters):
            if name in thawed or _AFTER + name in shapes:
                found[name] = torch.tensor([optimizer_steps if name in thawed else 0])
    return found


def _check_counts(begun: Mapping[str, Tensor], optimizer_steps: int) -> None:
    for name, number in begun.items():
        if not 0 < int(number) <= optimizer_steps:
            raise BrokenCheckpointError(
                f"{_AFTER}{name} is {int(number)}, and its optimizer has done {optimizer_steps} steps"
            )


def _count_after(replica: "ModuleReplica", begun: Mapping[str, int], thawed: Collection[str]) -> None:
    """Count the optimizer's steps with these parameters from behind so many of them; of those that were frozen until
    now it remembers nothing."""
    replica.trained_after.clear()
    replica.trained_after.update(begun)
    for unit in (unit for shards in replica.shards.values() for unit in shards.units):
        for parameter in (p for p in unit.parameters if p.place.name in begun):
            first, end, start = unit.rows_held(parameter)
            num_elements, name = (end - first) * rows_of(parameter.shape)[1], parameter.place.name
            if num_elements <= 0:
                continue
            unit.masters.count_after(start, start + num_elements, begun[name])
            for state in unit.masters.moment_names() if name in thawed else ():
                unit.masters.copy_in(state, start, torch.zeros(num_elements))


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
