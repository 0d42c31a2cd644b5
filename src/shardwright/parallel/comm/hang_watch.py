"""Who waits for whom: a thread on each rank that turns a hang into a sentence.

Every second each rank publishes what it is doing in the rendezvous store. A rank that has waited longer than the
timeout reads what the ranks it waits for last said, and ends the run with that. A rank that is dead, stuck in a loop
or waiting itself shows up as such; no extra message travels between ranks.
"""

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from shardwright.config.base import RunError
from shardwright.parallel.comm.transport import Underway

NAMED_PEERS = 8  # a sentence that names thousands of ranks says nothing
_MOMENT_S = 0.1  # in which one collective of a device is watched
_LEAVING_S = 4.0  # after which a rank that is gone is known to be silent, or has told why it left


@dataclass(frozen=True)
class _UnderWay:
    """A collective on the device: its work, what it is, who takes part, and when the host issued it."""

    work: Underway
    what: str
    peers: tuple[int, ...]
    since_s: float


class Watch:
    """Publishes this rank's doing, and reports the first wait that lasts longer than `timeout_s`."""

    def __init__(
        self, store: dist.Store, rank: int, timeout_s: float, describe: Callable[[int], str],
        on_timeout: Callable[[str], None], explains_losses: bool = False,
    ) -> None:  # fmt: skip
        """Begin with nothing to tell. If it `explains_losses`, a connection that breaks in a wait becomes a RunError
        that says who left; else whoever started the ranks finds that out."""
        self.explains_losses = explains_losses
        self._store = store
        self._rank = rank
        self._timeout_s = timeout_s
        self._describe = describe
        self._on_timeout = on_timeout
        self._interval_s = min(1.0, timeout_s / 4)
        self._step = ""
        self._doing = "starting"
        self._waits: dict[int, tuple[str, tuple[int, ...], float]] = {}  # by thread
        self._under_way: deque[_UnderWay] = deque()
        self._last_over_s = 0.0
        self._num_meetings = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begin to publish and to watch. A rank that dies in its first second has reported too."""
        self._publish(None)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the store may be closed afterwards."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def step(self, number: int) -> None:
        """Note the step that this rank is at. Cheap: nothing is sent here."""
        self._step = f"step {number}, "

    def doing(self, what: str) -> None:
        """Note what this rank is at within the step."""
        self._doing = self._step + what

    @contextmanager
    def waiting(self, what: str, peers: tuple[int, ...]) -> Iterator[None]:
        """A wait for `peers`, which must end within the timeout."""
        thread = threading.get_ident()
        self._waits[thread] = (what, peers, time.monotonic())
        try:
            yield
        finally:
            del self._waits[thread]

    def under_way(self, work: Underway, what: str, peers: tuple[int, ...]) -> None:
        """Watch a collective that the device waits for, though the host goes on: of each few that are issued within a
        moment one stands for all. It must be over within the timeout after the one before it."""
        now_s = time.monotonic()
        if not self._under_way or now_s - self._under_way[-1].since_s > _MOMENT_S:
            self._under_way.append(_UnderWay(work, what, peers, now_s))

    def _stuck(self) -> tuple[str, tuple[int, ...], float] | None:
        """The first collective on the device that is not over, and since when it may be the one that is waited for."""
        while self._under_way and self._under_way[0].work.is_completed():
            self._under_way.popleft()
            self._last_over_s = time.monotonic()
        if not self._under_way:
            return None
        first = self._under_way[0]
        return first.what, first.peers, max(first.since_s, self._last_over_s)

    def leave(self, reason: str) -> None:
        """Tell the others that this rank ends, and why, and stop."""
        self.stop()
        state = {"doing": self._doing, "waits": None, "at": time.time(), "left": reason}
        self._store.set(f"watch/{self._rank}", json.dumps(state))

    def who_left(self, ranks: Sequence[int]) -> str:
        """The ranks among these that have left, by their own word or because they are silent, the first one first, in
        words. Waits some seconds for them to be known."""
        until_s = time.monotonic() + _LEAVING_S
        try:
            while True:
                states = {rank: self._state(rank) for rank in ranks if rank != self._rank}
                left = sorted((state["at"], rank) for rank, state in states.items() if "left" in state)
                gone = [rank for _, rank in left] or [rank for rank in states if self._is_silent(rank)]
                if gone or time.monotonic() > until_s:
                    break
                time.sleep(self._interval_s / 4)
            told = [f"{self._describe(rank)} {self._last_words(rank)}" for rank in gone[:NAMED_PEERS]]
        except RuntimeError:
            return "the rank that hosts the rendezvous store, rank 0 or a launcher, has left too"
        return "; ".join(told) or "all of them were heard of a moment ago"

    def announce(self, what: str) -> None:
        """Let ranks that wait for it know that something is done."""
        self._store.set(f"done/{what}", "")

    def next_meeting(self) -> int:
        """The number of the next meeting of all ranks, which tells it apart from others in the store."""
        self._num_meetings += 1
        return self._num_meetings

    def wait_while_alive(self, rank: int, what: str, most_s: float = math.inf) -> None:
        """Wait until a rank announces something, for as long as it is heard of: its work may take hours, or `most_s`.
        One that is silent for longer than the timeout is reported. Clocks of machines may differ: none is read but this
        one's."""
        heard, silent_s, look_s, began_s = "", 0.0, 0.01, time.monotonic()
        while not self._store.check([f"done/{what}"]):
            said = json.dumps(self._state(rank))
            silent_s = 0.0 if said != heard else silent_s + look_s  # and nothing for the time that this one is stopped
            heard = said
            if silent_s > self._timeout_s:
                sentence = (
                    f"{self._describe(self._rank)} waited for {self._describe(rank)} to announce {what}, and has not "
                    f"heard of it for {silent_s:.0f} s: it is dead, stopped, or its machine is"
                )
                self._on_timeout(sentence)
                raise RuntimeError(sentence)
            if time.monotonic() - began_s > most_s:
                sentence = (
                    f"{self._describe(self._rank)} waited for {self._describe(rank)} to announce {what}, which may "
                    f"take {most_s:.0f} s and no longer; it {self._last_words(rank)}"
                )
                self._on_timeout(sentence)
                raise RuntimeError(sentence)
            time.sleep(look_s)
            look_s = min(2 * look_s, self._interval_s)

    def silent_ranks(self, world: int) -> str:
        """Who has not been heard of lately, in words: asked after a connection broke."""
        silent = []
        for rank in range(world):
            try:
                if self._is_silent(rank):
                    silent.append(f"{self._describe(rank)} {self._last_words(rank)}")
            except RuntimeError:
                return "the rendezvous store is gone too"
        return "; ".join(silent) or "every rank was heard of a moment ago"

    def _run(self) -> None:
        looked_s = resumed_s = time.monotonic()
        try:
            while not self._stop.wait(self._interval_s):
                before_s, looked_s = looked_s, time.monotonic()
                if looked_s - before_s > self._timeout_s / 2:  # stopped meanwhile, as all ranks by Ctrl-Z: wait anew
                    resumed_s = looked_s
                stuck = self._stuck()
                known = [*self._waits.values(), *([stuck] if stuck else [])]
                waits = [(what, peers, max(since, resumed_s)) for what, peers, since in known]
                wait = min(waits, key=lambda wait: wait[2], default=None)  # the longest
                self._publish(wait)
                if wait and time.monotonic() - wait[2] > self._timeout_s:
                    self._on_timeout(self._sentence(*wait))
                    return
        except RuntimeError:  # the store is gone, and with it the run; the main thread hears of it itself
            return

    def _publish(self, wait: tuple[str, tuple[int, ...], float] | None) -> None:
        waits_for = [wait[0], list(wait[1])] if wait else None
        state = {"doing": self._doing, "waits": waits_for, "at": time.time()}
        self._store.set(f"watch/{self._rank}", json.dumps(state))

    def _sentence(self, what: str, peers: tuple[int, ...], since: float) -> str:
        """Who waited for whom, down the chain to a rank that waits for no one: there the fault is."""
        waited_s = time.monotonic() - since
        named = " and ".join(self._describe(peer) for peer in peers[:NAMED_PEERS])
        named += f" and {len(peers) - NAMED_PEERS} more" if len(peers) > NAMED_PEERS else ""
        lines = [f"{self._describe(self._rank)} waited {waited_s:.0f} s in {what} (at {self._doing}) for {named}"]
        chain, seen, waiting, at_fault = list(peers), {self._rank}, [], []
        while chain:
            peer = chain.pop(0)
            if peer in seen:
                continue
            seen.add(peer)
            words = f"  {self._describe(peer)} {self._last_words(peer)}"
            waits = self._state(peer).get("waits")
            if waits and not self._is_silent(peer):
                waiting.append(words)
                chain += waits[1]
            else:
                at_fault.append(words)
        lines += waiting[:NAMED_PEERS] + at_fault[:NAMED_PEERS]
        lines.append("  if the work is slow and not stuck, raise run.timeout_s")
        return "\n".join(lines)

    def _state(self, rank: int) -> dict[str, Any]:
        """The last state that a rank published; empty if there is none."""
        key = f"watch/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else {}

    def at(self) -> str:
        """Note the present action of this rank."""
        return self._doing

    def _is_silent(self, rank: int) -> bool:
        return time.time() - self._state(rank).get("at", 0.0) > 1.0 + 1.5 * self._interval_s

    def _last_words(self, rank: int) -> str:
        state = self._state(rank)
        if not state:
            return "never reported: it did not start"
        if "left" in state:
            return f"has left, at {state['doing']}: {state['left']}"
        if self._is_silent(rank):
            age_s = time.time() - state["at"]
            return (
                f"has been silent for {age_s:.0f} s: it is dead, stopped, or its machine is; it was at {state['doing']}"
            )
        if state["waits"]:
            what, peers = state["waits"]
            return f"waits itself, in {what} (at {state['doing']}) for rank {', '.join(map(str, peers))}"
        return f"is alive and busy at {state['doing']}: it waits for no one"


def is_lost_connection(error: Exception) -> bool:
    """True if an error says that another rank went away: Gloo and NCCL raise plain RuntimeErrors then."""
    text = str(error)
    signs = ("Connection closed by peer", "Connection reset", "Broken pipe", "Socket closed", "NCCL", "Timed out")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)


def explained(error: RuntimeError, watch: Watch | None, what: str, peers: Sequence[int]) -> RuntimeError:
    """An error of a wait for other ranks: where a connection was lost, and nobody else will say so, a RunError that
    names what was waited for and who left; else the error itself."""
    if not is_lost_connection(error) or not (watch is None or watch.explains_losses):
        return error
    reason = str(error).partition("\n")[0][:200]
    others = ", ".join(map(str, peers[:NAMED_PEERS])) + (", ..." if len(peers) > NAMED_PEERS else "")
    where = f" (at {watch.at()})" if watch is not None else ""
    who = f": {watch.who_left(peers)}" if watch is not None else ", of which one has left"
    return RunError(f"lost the connection in {what}{where} with rank {others}{who}\n  {reason}")


@contextmanager
def in_turn_of_rank_0(watch: Watch | None, rank: int, world: int, what: str) -> Iterator[None]:
    """A block that rank 0 leaves before others enter it, and that all leave together. It may last longer than the
    timeout, as long as ranks are heard of. Without a watch there is but one rank, or nobody waits."""
    if watch is None:
        yield
        return
    if rank > 0:
        watch.wait_while_alive(0, what)
    yield
    if rank == 0:
        watch.announce(what)
    meet(watch, rank, world, what)


def meet(watch: Watch | None, rank: int, world: int, what: str, most_s: float = math.inf) -> None:
    """Return when all ranks have come here from `what`, which may last longer than the timeout on some, as long as they
    are heard of and it takes no more than `most_s`. Every rank calls this, in one order. Without a watch there is but
    one rank, or nobody waits."""
    if watch is None:
        return
    name = f"{what}, meeting {watch.next_meeting()}"
    if rank > 0:
        watch.announce(f"{name} on rank {rank}")
        watch.wait_while_alive(0, f"{name} on all ranks", most_s)
        return
    ends_s = time.monotonic() + most_s
    for other in range(1, world):
        watch.wait_while_alive(other, f"{name} on rank {other}", ends_s - time.monotonic())
    watch.announce(f"{name} on all ranks")
