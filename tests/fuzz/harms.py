"""Harms of a run: each harm is done at a moment that is drawn or seen, and shown to have happened.

A harm looks at what the run has written, and stops a process to look again before it kills it: what was to be hit while
it wrote was writing. A harm whose moment was gone raises `MissedError`, and is drawn anew.
"""

import os
import random
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwright.train.checkpoint.kept import check_whole, is_said_healthy, steps_kept
from shardwright.train.checkpoint.manifest import BrokenCheckpointError, folder_name, index_file
from shardwright.train.checkpoint.storage import LocalStorage
from support.process_tree import children

LOOK_S, LONGEST_S = 0.0005, 120.0
_STEP = re.compile(r"^step +(\d+)/", re.MULTILINE)


class MissedError(Exception):
    """The moment of a harm was gone."""


@dataclass
class Run:
    """A command that trains, and what it has left so far. `process` is as of subprocess.Popen."""

    process: Any
    folder: Path
    place: Path
    log: Path
    # As of the moment of the harm: characters said, and the newest checkpoint that was there.
    said_before: int = 0
    floor: int = 0
    where: str = ""
    is_felt: bool = False
    # All processes that were seen to be of it.
    family: set[int] = field(default_factory=set)
    # Starts its command again, with more options.
    again: Callable[[list[str]], Any] = field(default=lambda more: None)

    def said(self, first: int = 0) -> str:
        """Its output so far."""
        return self.log.read_text(errors="replace")[first:] if self.log.exists() else ""

    def goes_on(self) -> bool:
        """True until its launcher has ended."""
        return self.process.poll() is None

    def ranks(self) -> list[int]:
        """The processes of ranks, by number."""
        return self._those([child for server in self.servers() for child in children(server)])

    def servers(self) -> list[int]:
        """The server that ranks are forked from, if it is there."""
        return self._those(children(self.process.pid))

    def _those(self, pids: list[int]) -> list[int]:
        self.family |= set(pids)
        return sorted(pid for pid in pids if state_of(pid) not in "ZX")

    def until(self, happened: Callable[[], bool], within_s: float = LONGEST_S) -> None:
        """Wait until something has happened. MissedError if the run ends before."""
        late_s = time.monotonic() + within_s
        while not happened():
            if not self.goes_on() or time.monotonic() > late_s:
                raise MissedError
            time.sleep(LOOK_S)

    def note(self, where: str) -> None:
        """The moment of the harm is now."""
        self.where = f"{self.where}, {where}" if self.where else where
        self.said_before = len(self.said())
        self.floor = next((step for step in kept(self.place) if is_healthy(self.place, step)), 0)


def state_of(pid: int) -> str:
    """The state of a process as of ps: R computes, S and D wait, T is stopped, Z has ended; X if there is none."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "X"


def kept(place: Path) -> list[int]:
    """The steps of all checkpoints that have a manifest, newest first."""
    return steps_kept(LocalStorage(place))


def is_healthy(place: Path, step: int) -> bool:
    """True if a checkpoint says that it is healthy."""
    return is_said_healthy(LocalStorage(place), step)


def newest_whole(place: Path) -> int:
    """The step of the newest healthy checkpoint of which every byte is as it was written; 0 if there is none."""
    for step in filter(lambda step: is_healthy(place, step), kept(place)):
        with suppress(BrokenCheckpointError):
            return check_whole(LocalStorage(place), step).step
    return 0


def latest(place: Path) -> int:
    """The step that `latest` names; 0 if there is none."""
    with suppress(OSError, ValueError):
        return int((place / "latest").read_text().strip().removeprefix("step-"))
    return 0


def written_by(place: Path, rank: int) -> list[Path]:
    """The files that a rank is writing: begun, and not yet said to be durable."""
    files = place.glob(f"step-*/rank-{rank:05d}.safetensors")
    return [file for file in files if not (file.parent / index_file(rank)).exists()]


def is_between(place: Path) -> bool:
    """True if there is a checkpoint with a manifest that `latest` does not name yet."""
    return max(kept(place), default=0) > latest(place)


def where_it_is(run: Run) -> str:
    """The phase of a run, as far as its files and the state of its ranks tell."""
    states = [state_of(rank) for rank in run.ranks()]
    if not states:
        return "without ranks"
    if is_between(run.place):
        return "between manifest and latest"
    if any(written_by(run.place, rank) for rank in range(2)):
        return "writing"
    if not _STEP.search(run.said()):
        return "before the first step"
    return "both compute" if states.count("R") == 2 else "one waits" if "R" in states else "both wait"


def one_of(pids: list[int], rng: random.Random) -> int:
    """A process of those that are there. MissedError if none is."""
    if not pids:
        raise MissedError
    return rng.choice(pids)


def kill(run: Run, pid: int, where: str = "") -> None:
    """Kill a process that has not ended."""
    where = where or where_it_is(run)
    if state_of(pid) in "ZX":
        raise MissedError
    os.kill(pid, signal.SIGKILL)
    run.note(where)


def is_caught(pid: int, is_open: Callable[[], bool]) -> bool:
    """Stop a process while something holds. If that has passed when all its threads stand still, it goes on."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        late_s = time.monotonic() + 1.0
        while not _stands_still(pid) and time.monotonic() < late_s:
            time.sleep(LOOK_S)
        if _stands_still(pid) and is_open():
            return True
        os.kill(pid, signal.SIGCONT)
    return False


def _stands_still(pid: int) -> bool:
    states = set()
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            states.add((task / "stat").read_text().rpartition(")")[2].split()[0])
    return bool(states) and states <= {"T"}


def catch(run: Run, who: Callable[[], int], is_open: Callable[[], bool]) -> int:
    """Stop a process in a window, the next one if it is over before. Returns the process, which stands still."""
    while True:
        run.until(is_open)
        with suppress(IndexError):  # it has ended meanwhile
            if is_caught(pid := who(), is_open):
                return pid


# --- harms ---


def kill_a_rank(run: Run, rng: random.Random) -> None:
    """At any moment."""
    run.until(lambda: bool(run.ranks()))
    kill(run, one_of(run.ranks(), rng))


def kill_all_ranks(run: Run, rng: random.Random) -> None:
    """As when memory runs out."""
    run.until(lambda: len(run.ranks()) == 2)
    where = where_it_is(run)
    for pid in run.ranks():
        os.kill(pid, signal.SIGKILL)
    run.note(where)


def kill_the_server(run: Run, rng: random.Random) -> None:
    """The server that ranks are forked from, and with it the ranks. One that has none yet is missed by nobody."""
    run.until(lambda: bool(run.ranks()))
    kill(run, one_of(run.servers(), rng))


def kill_the_launcher(run: Run, rng: random.Random) -> None:
    """And with it all that it started."""
    kill(run, run.process.pid)


def kill_the_writer(run: Run, rng: random.Random) -> None:
    """Between the first byte of its file and the word that it is durable."""
    rank = rng.randrange(2)
    pid = catch(run, lambda: run.ranks()[rank], lambda: bool(written_by(run.place, rank)))
    # The launcher takes the ranks with it; else the others go on for a moment.
    kill(run, run.process.pid if rng.random() < 0.3 else pid)


def kill_the_writer_twice(run: Run, rng: random.Random) -> None:
    """And again at the first checkpoint that the ranks after it write."""
    rank = rng.randrange(2)
    for _ in range(2):
        before = run.ranks()
        pid = catch(run, lambda: run.ranks()[rank], lambda: bool(written_by(run.place, rank)))
        kill(run, pid)
        run.until(lambda before=before: not set(before) & set(run.ranks()))  # type: ignore[misc]


def kill_between_manifest_and_latest(run: Run, rng: random.Random) -> None:
    """The checkpoint is whole, and `latest` names the one before."""
    pid = catch(run, lambda: run.ranks()[0], lambda: is_between(run.place))
    kill(run, run.process.pid if rng.random() < 0.3 else pid)


def kill_while_restarting(run: Run, rng: random.Random) -> None:
    """A rank, and then one of those in its place, their server or the launcher before they have done a step."""
    kill_a_rank(run, rng)
    before = run.said_before
    run.until(lambda: "restart 1 of" in run.said(before))
    time.sleep(rng.uniform(0.0, 2.0))
    victims = {"rank": run.ranks, "server": run.servers, "launcher": lambda: [run.process.pid]}
    who = rng.choice(["rank", "rank", "server", "launcher"])
    run.until(lambda: bool(victims[who]()))
    pid = one_of(victims[who](), rng)
    if not is_caught(pid, lambda: not _STEP.search(run.said(before))):
        raise MissedError
    floor = run.floor
    kill(run, pid, f"{who} while restarting")
    run.said_before, run.floor = before, floor


def stop_a_rank(run: Run, rng: random.Random) -> None:
    """It stands still, and others wait for it."""
    run.until(lambda: bool(run.ranks()))
    pid = one_of(run.ranks(), rng)
    where = where_it_is(run)
    if not is_caught(pid, run.goes_on):
        raise MissedError
    run.note(where)


def stop_the_launcher(run: Run, rng: random.Random) -> None:
    """For a while, or until it is killed."""
    where = where_it_is(run)
    if not is_caught(run.process.pid, run.goes_on):
        raise MissedError
    time.sleep(rng.uniform(0.0, 4.0))
    run.note(where)
    run.is_felt = True
    os.kill(run.process.pid, rng.choice((signal.SIGCONT, signal.SIGKILL)))


def ask_to_leave(run: Run, rng: random.Random) -> None:
    """As a batch system does."""
    run.note(where_it_is(run))
    run.process.send_signal(rng.choice((signal.SIGTERM, signal.SIGUSR1)))


def ask_twice(run: Run, rng: random.Random) -> None:
    """The second time ends the run at once."""
    run.note(where_it_is(run))
    run.process.send_signal(signal.SIGTERM)
    time.sleep(rng.uniform(0.0, 0.2))
    run.process.send_signal(rng.choice((signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)))


def press_ctrl_c(run: Run, rng: random.Random) -> None:
    """As a terminal does, to all processes of the run: it saves and leaves."""
    _press(run)
    run.note(where_it_is(run))


def press_twice(run: Run, rng: random.Random) -> None:
    """The second Ctrl-C ends the run at once."""
    _press(run)
    time.sleep(rng.uniform(0.0, 0.3))
    _press(run)
    run.note(where_it_is(run))


def _press(run: Run) -> None:
    for pid in (run.process.pid, *run.servers(), *run.ranks()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)


_WARM = 8  # losses before the band of the loss has a verdict
_DIVERGES = ["optimizer.learning_rate=1e6"]
_OVERFLOWS = ['precision.compute="fp16"', "precision.loss_scale=281474976710656", "precision.loss_scale_growth_steps=0"]


def go_wrong(fields: list[str]) -> Callable[[Run, random.Random], None]:
    """The run is killed, and goes on under a job that ruins it, to its end. The last healthy checkpoint is still there,
    and the next command with the old job goes on from it."""

    def do(run: Run, rng: random.Random) -> None:
        run.until(lambda: any(step >= _WARM and is_healthy(run.place, step) for step in kept(run.place)))
        kill(run, run.process.pid)
        run.process.wait(LONGEST_S)
        wait_until_gone(run)
        if "; metrics in " in run.said():
            raise MissedError
        floor, policy = newest_whole(run.place), rng.choice(["stop", "skip", "rewind"])
        given = [*fields, f"health.not_finite={policy}", "health.most_skips=3"]
        run.process = run.again([part for one in given for part in ("--set", one)])
        status = run.process.wait(LONGEST_S)
        wait_until_gone(run)
        printed = run.said()
        assert newest_whole(run.place) == floor, f"step {floor} was healthy, and {newest_whole(run.place)} is now"
        assert status == 0 or folder_name(floor) in printed.splitlines()[-1], "it does not say what to go on from"
        run.note(f"{policy}, status {status}")
        run.floor, run.is_felt, run.process = floor, True, run.again([])

    return do


def limit_files(run: Run, rng: random.Random) -> None:
    """No rank may write a file as large as a checkpoint's, for a while: as with a quota."""
    run.until(lambda: bool(kept(run.place)) and len(run.ranks()) == 2)
    sizes = [file.stat().st_size for file in run.place.glob(f"{folder_name(kept(run.place)[0])}/rank-*.safetensors")]
    ranks, limit = run.ranks(), round(rng.uniform(0.5, 0.99) * min(sizes))
    run.note(where_it_is(run))
    _limit(ranks, limit)
    try:
        _until_told(run)
    finally:
        _limit(ranks, resource.RLIM_INFINITY)


def _limit(pids: list[int], most_bytes: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (most_bytes, hard))


def fill_the_disk(run: Run, rng: random.Random) -> None:
    """There is no room for a checkpoint, for a while; nor for a line, where the run's folder is on that disk, too."""
    run.until(lambda: bool(kept(run.place)))
    filler, disk = run.place / "filler", shutil.disk_usage(run.place)
    of_one = disk.used // len(list(run.place.glob("step-*")))
    run.note(where_it_is(run))
    left = 0 if run.folder in run.place.parents else rng.randrange(of_one // 2)
    with suppress(OSError), filler.open("wb") as file:  # closing it writes once more
        while shutil.disk_usage(run.place).free > left:
            file.write(bytes(1 << 12))
            file.flush()
    try:
        _until_told(run)
        time.sleep(rng.uniform(0.0, 0.3))
    finally:
        filler.unlink()


def _until_told(run: Run) -> None:
    """Wait until the run has told of a save that failed, or of a file. Checkpoints from before are whole."""
    try:
        run.until(lambda: re.search(r"could not be written|can't be written", run.said(run.said_before)) is not None)
        run.is_felt = True
    finally:
        run.floor = max(run.floor, newest_whole(run.place))


def damage(how: str) -> Callable[[Run, random.Random], None]:
    """A file of the newest checkpoint is changed after the run was killed."""

    def do(run: Run, rng: random.Random) -> None:
        run.until(lambda: bool(kept(run.place)))
        kill(run, run.process.pid)
        run.process.wait(LONGEST_S)
        wait_until_gone(run)
        if "; metrics in " in run.said():  # it was done, and does not look at its last checkpoint again
            raise MissedError
        newest = run.place / folder_name(kept(run.place)[0])
        file = rng.choice([*newest.iterdir(), run.place / "latest"])
        raw = bytearray(file.read_bytes())
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        file.unlink()
        if how != "remove":
            file.write_bytes(raw if how == "flip" else raw[: rng.randrange(len(raw))])
        run.note(f"{file.suffix or file.name}")
        run.floor, run.is_felt = newest_whole(run.place), True

    return do


def wait_until_gone(run: Run) -> None:
    """Wait until nothing of a run whose launcher has ended is left. AssertionError if something stays."""
    late_s = time.monotonic() + 10.0
    while left := [pid for pid in run.family if state_of(pid) not in "ZX"]:
        assert time.monotonic() < late_s, f"processes {left} outlive their launcher"
        time.sleep(0.02)


HARMS: dict[str, Callable[[Run, random.Random], None]] = {
    "kill a rank": kill_a_rank,
    "kill all ranks": kill_all_ranks,
    "kill the server": kill_the_server,
    "kill the launcher": kill_the_launcher,
    "kill while writing": kill_the_writer,
    "kill the writer twice": kill_the_writer_twice,
    "kill between manifest and latest": kill_between_manifest_and_latest,
    "kill while restarting": kill_while_restarting,
    "stop a rank": stop_a_rank,
    "stop the launcher": stop_the_launcher,
    "ask to leave": ask_to_leave,
    "ask twice": ask_twice,
    "press Ctrl-C": press_ctrl_c,
    "press it twice": press_twice,
    "diverge": go_wrong(_DIVERGES),
    "overflow": go_wrong(_OVERFLOWS),
    "limit files": limit_files,
    "fill the disk": fill_the_disk,
}
DAMAGES = {
    "flip a bit": damage("flip"),
    "truncate a file": damage("truncate"),
    "remove a file": damage("remove"),
}
HARMS = HARMS | DAMAGES
