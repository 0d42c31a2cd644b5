"""The folder of a run and the folder of its checkpoints: their paths, checks that they can be written to, and locks, so
that one run at a time uses them."""

import errno
import fcntl
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.user_file import system_reason
from shardwright.train.checkpoint.kept import place_of
from shardwright.train.checkpoint.storage import LocalStorage, open_storage
from shardwright.train.run_files import name_faults, open_own

RUN_FOLDER, CHECKPOINTS = "run.folder", "checkpoint.path"  # the fields that name folders
# A file that names the process using the folder, and is locked by it. The system releases the lock however it ends.
LOCK = ".lock"
# How late a network file system may show a new file.
SHARED_S = 30.0


def folder_of(job: JobSpec) -> Path:
    """The folder to which a job's run writes."""
    return Path(os.path.expanduser(job.run.folder) or Path("runs", job.name))


def make_folder(folder: Path, field: str = RUN_FOLDER) -> list[str]:
    """Make the folder, and check that it can be written to. Returns the fault if that fails; `field` is the field that
    names the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        file = next((path for path in (folder, *folder.parents) if path.is_file()), folder)
        return [
            say(
                "{field} {folder} can't be made: {file} is a file; {way_out}",
                field=field,
                folder=folder,
                file=file,
                way_out=_way_out(field),
            )
        ]
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = system_reason(error) if isinstance(error, OSError) else str(error)
        return [
            say(
                "{field} {folder} can't be written to: {reason}; {way_out}",
                field=field,
                folder=folder,
                reason=reason,
                way_out=_way_out(field),
            )
        ]
    return name_faults(folder) if field == RUN_FOLDER else []


@contextmanager
def removing_new_folders_on_error(folder: Path) -> Iterator[None]:
    """If the block raises PlanError or exits with status 2, remove new folders without files: `folder`, its subfolders,
    and its parents. Folders that existed before the block stay."""
    new_folders = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        yield
    except (PlanError, SystemExit) as end:
        if isinstance(end, PlanError) or end.code == 2:
            with suppress(ValueError):  # a NUL in the name: there is no such folder
                is_new = folder in new_folders
                subfolders = [Path(path) for path, _, _ in os.walk(folder, topdown=False)] if is_new else []
                for path in dict.fromkeys([*subfolders, *new_folders]):
                    with suppress(OSError):  # the folder is not empty, or does not exist
                        path.rmdir()
        raise


def _way_out(field: str) -> str:
    return say("name another folder in {field}", field=field)


def this_node() -> str:
    """The name of this machine in faults of a run on several machines."""
    return f"node {socket.gethostname()}"


def unshared_faults(folder: Path, patience_s: float, field: str = RUN_FOLDER) -> list[str]:
    """The fault if `folder` on this machine is not the shared one that rank 0 has locked. Waits for the lock to show,
    `patience_s` seconds at most."""
    late_s = time.monotonic() + patience_s
    while not _is_held_elsewhere(folder):
        if time.monotonic() > late_s:
            return [
                say(
                    "{field} {folder} is not the one that rank 0 writes to, and a run goes on from checkpoints of "
                    "all machines; name a folder in run.folder or checkpoint.path that all of them share",
                    field=field,
                    folder=folder.absolute(),
                )
            ]
        time.sleep(0.2)
    return []


def _is_held_elsewhere(folder: Path) -> bool:
    """True if another process has the lock of the folder. The file of a dead process is not locked."""
    if not (os.path.isdir(folder) and LOCK in os.listdir(folder)):  # listing a folder asks its file server again
        return False
    try:
        descriptor = open_own(folder / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # this file system has no locks, so the file's existence must suffice
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def holding(folder: Path, other_faults: list[str], field: str = RUN_FOLDER) -> Iterator[None]:
    """Lock the folder for this process during the block. Raises PlanError with `other_faults`, and with a fault if
    another run uses the folder."""
    descriptor, faults = -1, list(other_faults)
    if os.path.isdir(folder):
        descriptor, lock_faults = _lock(folder / LOCK, field)
        faults += lock_faults
    try:
        if faults:
            raise PlanError("this machine", faults)
        yield
    finally:
        if descriptor >= 0:
            (folder / LOCK).unlink(missing_ok=True)
            os.close(descriptor)


def shared_place(job: JobSpec, folder: Path) -> tuple[Path, str] | None:
    """The folder that all machines of a run must share, and the field that names it; None if checkpoints are not in a
    file system."""
    storage = open_storage(place_of(job, folder))
    if job.checkpoint.path:
        return (Path(storage.root), CHECKPOINTS) if isinstance(storage, LocalStorage) else None
    return folder, RUN_FOLDER


@contextmanager
def holding_checkpoints(job: JobSpec, folder: Path) -> Iterator[None]:
    """Lock the folder of the run's checkpoints for this process during the block, if it is in a file system: another
    run with another run.folder may name it, too. Raises PlanError if another run uses it."""
    storage = open_storage(place_of(job, folder)) if job.checkpoint.is_on else None
    if not isinstance(storage, LocalStorage) or os.path.realpath(storage.root) == os.path.realpath(folder):
        yield
        return
    place = Path(storage.root)
    with removing_new_folders_on_error(place), holding(place, make_folder(place, CHECKPOINTS), CHECKPOINTS):
        yield


def _lock(file: Path, field: str) -> tuple[int, list[str]]:
    """Lock a file. Returns its descriptor and no faults, or -1 and the fault; -1 and no fault if the file system has no
    locks or the file can't be written."""
    try:
        descriptor = open_own(file, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if error.errno == errno.ELOOP:
            kind = say("no file of its own, but has another name or is a FIFO")
            if os.path.islink(file):
                kind = say("a link")
            return -1, [
                say(
                    "{file} is {kind}, and would be written to; remove it, or {way_out}",
                    file=file,
                    kind=kind,
                    way_out=_way_out(field),
                )
            ]
        return -1, []  # not writable: make_folder tells it
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(descriptor)
        os.close(descriptor)
        way_out = say("wait for its end, or {way_out}", way_out=_way_out(field))
        return -1, [
            say(
                "{field} {parent} is in use by another run, {holder}; {way_out}",
                field=field,
                parent=file.parent,
                holder=holder,
                way_out=way_out,
            )
        ]
    except OSError:
        os.close(descriptor)
        return -1, []
    if not _is_at(descriptor, file):  # its owner has removed it after it was opened here
        os.close(descriptor)
        return _lock(file, field)
    own_fields = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now().isoformat(" ", "seconds")}
    with suppress(OSError):  # the writers of larger files report a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(own_fields).encode(), 0)
    return descriptor, []


def _is_at(descriptor: int, file: Path) -> bool:
    """True if `file` is the path of an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except OSError:
        return False


def _holder(descriptor: int) -> str:
    """The process that has the lock, in words."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        fields = json.loads(os.pread(descriptor, 4096, 0))
        return say(
            "process {pid} on {host} since {since}", **{name: str(fields[name]) for name in ("pid", "host", "since")}
        )
    return say("which has not said which")
