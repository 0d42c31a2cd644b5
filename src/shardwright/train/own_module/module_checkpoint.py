"""Checkpoints of a user's module, in the format of all checkpoints (train/checkpoint/manifest.py)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from shardwright.config.base import PlanError, RunError, error_text
from shardwright.config.job import JobSpec
from shardwright.config.phrase import each, say
from shardwright.parallel.comm.collectives import all_gather, broadcast
from shardwright.parallel.comm.hang_watch import meet
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.checkpoint.boxes import full_shapes, save_boxes
from shardwright.train.checkpoint.kept import in_order_to_load, indices_of, make_whole, manifest_of, steps_kept
from shardwright.train.checkpoint.manifest import (
    MANIFEST,
    BrokenCheckpointError,
    Manifest,
    digest_of,
    folder_name,
    to_bytes,
)
from shardwright.train.checkpoint.saved_state import SavedState
from shardwright.train.checkpoint.state_part import StoredState, optimizer_steps, units_of
from shardwright.train.checkpoint.storage import Storage, open_storage
from shardwright.train.health.first_not_finite import all_finite
from shardwright.train.own_module.module_state import ModuleState, thawed_parameters


def save_module(job: JobSpec, replica: "ModuleReplica", mesh: Mesh, folder: str, step: int) -> None:
    """Write this rank's boxes, and then on rank 0 the manifest. Raises RunError, the same on every rank, if a rank
    can't write; also if trained weights are not finite, because `load` takes the newest checkpoint."""
    storage = _open_folder(folder, mesh)
    is_ruined = not mesh.to_host(all_finite([unit.value_shard for unit in units_of(replica)], mesh))
    ruin_fault = say("its weights are not finite; what was saved before stays, and load() goes on from that")
    agree(ruin_fault if is_ruined else "", mesh, say("the checkpoint of step {step} is not written", step=step))
    error = ""
    try:
        save_boxes(_saved_state(replica, mesh).held(), storage, folder_name(step), mesh.rank)
    except OSError as fault:
        error = str(fault)
    agree(error, mesh, say("the checkpoint of step {step} could not be written", step=step))
    if mesh.rank == 0:
        manifest = Manifest(
            step=step,
            samples=0,
            optimizer_steps=optimizer_steps(replica),
            job=job.model_dump(mode="json"),
            state={},
            files=(),
        )
        try:
            make_whole(storage, manifest, mesh.world.size)
        except (OSError, BrokenCheckpointError) as fault:
            error = str(fault)
    agree(error, mesh, say("the checkpoint of step {step} could not be made whole", step=step))


def load_module(job: JobSpec, replica: "ModuleReplica", mesh: Mesh, folder: str) -> int:
    """Load the newest whole checkpoint that rank 0 sees in a folder. Returns its step. Raises, the same on every rank,
    PlanError if rank 0 sees no checkpoint, and RunError if a rank can't load that one."""
    storage = _open_folder(folder, mesh)
    step = _chosen_step(storage, mesh)
    if step < 0:
        folder_of_rank_0 = told_by_all(folder, mesh)[0]  # its name may differ from this rank's
        raise PlanError(
            "load",
            [
                say(
                    "{folder_of_rank_0} has no checkpoint; name the folder that save() was given",
                    folder_of_rank_0=folder_of_rank_0,
                )
            ],
        )
    manifest = _same_manifest(storage, step, mesh)
    state, stored, error = _saved_state(replica, mesh), None, ""
    try:
        indices = indices_of(storage, manifest)
        shapes, num_steps = full_shapes(indices), manifest.optimizer_steps
        stored = StoredState(shapes, num_steps, optimizer_anew=not num_steps, thawed=thawed_parameters(shapes))
        state.load(stored, storage, folder_name(step), indices)
    except (OSError, BrokenCheckpointError) as fault:
        error = say("{place}: {fault}", place=f"{storage.root}/{folder_name(step)}", fault=error_text(fault))
    # Some ranks read more than others.
    meet(mesh.watch, mesh.rank, mesh.world.size, say("reading {folder}", folder=folder_name(step)))
    agree(error, mesh, say("the checkpoint of step {step} can't be taken up", step=step))
    assert stored is not None
    state.take_up(stored)
    return step


def _saved_state(replica: "ModuleReplica", mesh: Mesh) -> SavedState:
    return SavedState(replica, mesh, [ModuleState(replica, mesh)])


def _open_folder(folder: str, mesh: Mesh) -> Storage:
    """The storage of checkpoints in `folder`. Raises RunError on every rank if one can't reach it."""
    storage, error = None, ""
    try:
        storage = open_storage(folder)
    except PlanError as fault:
        error = each(fault.faults)
    agree(error, mesh, say("checkpoints can't be reached"))
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
            error = say("{place}: {fault}", place=storage.root, fault=error_text(fault))
    agree(error, mesh, say("checkpoints can't be looked for"))
    newest_1 = broadcast(torch.tensor([newest], dtype=torch.int64, device=mesh.device), mesh.world, 0)
    return int(mesh.numbers(newest_1)[0])


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
            error = say("there is no {place}", place=place)
    except (OSError, BrokenCheckpointError) as fault:
        error = say("{place}: {fault}", place=place, fault=error_text(fault))
    digest_of_rank_0 = told_by_all(digest, mesh)[0]
    if digest_of_rank_0 and digest and digest != digest_of_rank_0:
        error = say("{place} is another checkpoint than that of rank 0", place=place)
    if error and mesh.world.size > 1:
        error = say("{fault}; all ranks must see the one folder that save() was given", fault=error)
    agree(error, mesh, say("the checkpoint of step {step} can't be taken up", step=step))
    assert manifest is not None
    return manifest


# Agreement on faults: ranks exchange them, so that all of them raise the same error.

_MOST_BYTES = 2000  # of a rank's text; a longer one is cut
_MOST_FAULTS = 4  # different faults in a message


def told_by_all(text: str, mesh: Mesh) -> list[str]:
    """The texts of all ranks. Costs two small all-gathers over the world; every rank calls this."""
    if mesh.world.size == 1:
        return [text]
    data = text.encode(errors="replace")[:_MOST_BYTES]
    lengths = [int(n) for n in mesh.numbers(all_gather(torch.tensor([len(data)], device=mesh.device), mesh.world))]
    if not (longest := max(lengths)):
        return [""] * mesh.world.size
    padded = torch.zeros(longest, dtype=torch.uint8, device=mesh.device)
    padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    rows = mesh.on_host(all_gather(padded, mesh.world)).view(mesh.world.size, longest)
    return [bytes(row[:n].tolist()).decode(errors="replace") for row, n in zip(rows, lengths, strict=True)]


def agree(error: str, mesh: Mesh, consequence: str) -> None:
    """Return if no rank has an error, else raise the same RunError on all ranks; its message begins with `consequence`.
    Every rank calls this."""
    faults = {rank: error for rank, error in enumerate(told_by_all(error, mesh)) if error}
    if faults:
        raise RunError(say("{consequence}: {faults}", consequence=consequence, faults=by_rank(faults, mesh.world.size)))


def by_rank(faults: Mapping[int, str], num_ranks: int) -> str:
    """The faults of ranks in one text: each different fault once, with its ranks."""
    if num_ranks == 1:
        return next(iter(faults.values()))
    ranks: dict[str, list[int]] = {}
    for rank, fault in faults.items():
        ranks.setdefault(fault, []).append(rank)
    parts = [
        say("{ranks}: {fault}", ranks=_rank_list(at_fault), fault=fault)
        for fault, at_fault in list(ranks.items())[:_MOST_FAULTS]
    ]
    num_omitted = len(ranks) - _MOST_FAULTS
    listed = each(parts)
    return say("{faults}; and {more} more", faults=listed, more=num_omitted) if num_omitted > 0 else listed


def _rank_list(ranks: list[int]) -> str:
    numbers = say("{listed}", listed=tuple(map(str, ranks[:8])))
    if len(ranks) > 8:
        numbers = say("{ranks} and {more} more", ranks=numbers, more=len(ranks) - 8)
    return say("rank {number}", number=numbers) if len(ranks) == 1 else say("ranks {numbers}", numbers=numbers)


if TYPE_CHECKING:
    from shardwright.train.own_module.sharded_module import ModuleReplica
