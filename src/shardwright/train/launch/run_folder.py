"""The folder of a run, and that of its checkpoints: which it is, whether it can be written to, and that one run at a
time has it."""

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
from shardwright.train.checkpoint.kept import place_of
from shardwright.train.checkpoint.storage import LocalStorage, open_storage
from shardwright.train.run_files import name_faults, open_own

RUN_FOLDER, CHECKPOINTS = "run.folder", "checkpoint.path"  # the fields that name folders
# Says who has the folder, and is locked by it. The system gives the lock of a process back however that ends.
LOCK = ".lock"
# A network file system may show a new file that late.
SHARED_S = 30.0


def folder_of(job: JobSpec) -> Path:
    """Where a job's run writes."""
    return Path(os.path.expanduser(job.run.folder) or Path("runs", job.name))


def folder_faults(folder: Path, field: str = RUN_FOLDER) -> list[str]:
    """Make the folder and write to it: what else could tell that it can be done?"""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        file = next((path for path in (folder, *folder.parents) if path.is_file()), folder)
        return [f"{field} {folder} can't be made: {file} is a file; {_way_out(field)}"]
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else error
        return [f"{field} {folder} can't be written to: {reason}; {_way_out(field)}"]
    return name_faults(folder) if field == RUN_FOLDER else []


@contextmanager
def leaving_no_empty(folder: Path) -> Iterator[None]:
    """Where what is done meanwhile is refused, remove the folders that were made for it and have no file: the one of
    this name, what is in it, and those that it is in. Those that were there before stay."""
    new = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        yield
    except (PlanError, SystemExit) as end:
        if isinstance(end, PlanError) or end.code == 2:
            with suppress(ValueError):  # a NUL in the name: there is no such folder
                inside = [Path(path) for path, _, _ in os.walk(folder, topdown=False)] if folder in new else []
                for path in dict.fromkeys([*inside, *new]):
                    with suppress(OSError):  # it is not empty, or not there
                        path.rmdir()
        raise


def _way_out(field: str) -> str:
    return f"name another folder in {field}"


def this_node() -> str:
    """The name of this machine in faults, if the run has several."""
    return f"node {socket.gethostname()}"


def unshared_faults(folder: Path, patience_s: float, field: str = RUN_FOLDER) -> list[str]:
    """The fault of a folder that a run on another machine holds and that is another folder here."""
    late_s = time.monotonic() + patience_s
    while not _is_held_elsewhere(folder):
        if time.monotonic() > late_s:
            return [
                f"{field} {folder.absolute()} is not the one that rank 0 writes to, and a run goes on from "
                "checkpoints of all machines; name a folder in run.folder or checkpoint.path that all of them share"
            ]
        time.sleep(0.2)
    return []


def _is_held_elsewhere(folder: Path) -> bool:
    """True if some process has the lock of a folder that is there. A lock that a dead one left is nobody's."""
    if not (os.path.isdir(folder) and LOCK in os.listdir(folder)):  # to list it asks the server anew
        return False
    try:
        descriptor = open_own(folder / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks on this file system: that it is there must do
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def holding(folder: Path, other_faults: list[str], field: str = RUN_FOLDER) -> Iterator[None]:
    """Have the folder for this process alone. PlanError with all faults if there are others, or another run has it."""
    descriptor, faults = -1, list(other_faults)
    if os.path.isdir(folder):
        descriptor, in_use = _lock(folder / LOCK, field)
        faults += in_use
    try:
        if faults:
            raise PlanError("this machine", faults)
        yield
    finally:
        if descriptor >= 0:
            (folder / LOCK).unlink(missing_ok=True)
            os.close(descriptor)


def shared_place(job: JobSpec, folder: Path) -> tuple[Path, str] | None:
    """The folder that all machines of a run must see, and the field that names it; None where it is an address."""
    storage = open_storage(place_of(job, folder))
    if job.checkpoint.path:
        return (Path(storage.root), CHECKPOINTS) if isinstance(storage, LocalStorage) else None
    return folder, RUN_FOLDER


@contextmanager
def holding_checkpoints(job: JobSpec, folder: Path) -> Iterator[None]:
    """Have the folder that a run writes its checkpoints to for this process alone, where it is one of a file system:
    another run, with another run.folder, may name it too. PlanError where that has it."""
    storage = open_storage(place_of(job, folder)) if job.checkpoint.is_on else None
    if not isinstance(storage, LocalStorage) or os.path.realpath(storage.root) == os.path.realpath(folder):
        yield
        return
    place = Path(storage.root)
    with leaving_no_empty(place), holding(place, folder_faults(place, CHECKPOINTS), CHECKPOINTS):
        yield


def _lock(file: Path, field: str) -> tuple[int, list[str]]:
    """An open file that is locked, or why there is none: -1 alone where the file system has no locks."""
    try:
        descriptor = open_own(file, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if error.errno == errno.ELOOP:
            what = "a link" if os.path.islink(file) else "no file of its own, but has another name or is a FIFO"
            return -1, [f"{file} is {what}, and would be written to; remove it, or {_way_out(field)}"]
        return -1, []  # not writable: another fault says so
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(descriptor)
        os.close(descriptor)
        way_out = f"wait for its end, or {_way_out(field)}"
        return -1, [f"{field} {file.parent} is in use by another run, {holder}; {way_out}"]
    except OSError:
        os.close(descriptor)
        return -1, []
    if not _is_at(descriptor, file):  # its owner has removed it since it was opened
        os.close(descriptor)
        return _lock(file, field)
    about = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now().isoformat(" ", "seconds")}
    with suppress(OSError):  # a full disk is told by those who need it
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(about).encode(), 0)
    return descriptor, []


def _is_at(descriptor: int, file: Path) -> bool:
    """True if an open file is the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except OSError:
        return False


def _holder(descriptor: int) -> str:
    """Who has the lock, in words."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        about = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {about['pid']} on {about['host']} since {about['since']}"
    return "which has not said which"
