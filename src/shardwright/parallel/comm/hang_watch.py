"""The hang watch: a thread on each rank that turns a hang into a sentence that says who waits for whom.

Every second each rank publishes its current action in the rendezvous store. A rank that has waited longer than the
timeout reads the last published states of the ranks it waits for, and ends the run with a report. The report shows
whether a rank is dead, stuck in a loop or waiting itself; no extra message travels between ranks.
"""

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from shardwright.config.base import RunError
from shardwright.config.phrase import Phrase, below, both, each, say
from shardwright.parallel.comm.heard_ranks import HeardRanks, State
from shardwright.parallel.comm.transport import WorkHandle, is_lost_connection

NAMED_PEERS = 8  # a sentence that names thousands of ranks is unreadable
_MOMENT_S = 0.1  # of the collectives of a device in this time, the first and the last are watched
_LEAVING_S = 4.0  # after this time a lost rank is known to be silent, or has published why it left


@dataclass(frozen=True)
class _UnderWay:
    """A collective on the device: its work, its name, the ranks that take part, and when the host issued it, or
    the first one of the same moment."""

    work: WorkHandle
    activity: str
    peers: tuple[int, ...]
    since_s: float
    moment_s: float
    is_first: bool  # of its moment


@dataclass(frozen=True)
class WatchRules:
    """The rules by which a watch judges waits, and what it tells of them.

    A wait may last `timeout_s`; `on_timeout` gets the sentence about one that lasts longer. If the watch
    `explains_losses`, a connection that breaks in a wait becomes a RunError that says who left; else the process that
    started the ranks finds that out.
    """

    timeout_s: float
    describe: Callable[[int], str]  # a rank, in words
    on_timeout: Callable[[str], None]
    explains_losses: bool = False


class Watch:
    """Publishes this rank's current action, and reports the first wait that lasts too long."""

    def __init__(self, store: dist.Store, rank: int, rules: WatchRules) -> None:
        self.explains_losses = rules.explains_losses
        self._store = store
        self._rank = rank
        self._timeout_s = rules.timeout_s
        self._describe = rules.describe
        self._on_timeout = rules.on_timeout
        self._interval_s = min(1.0, rules.timeout_s / 4)
        self._step = ""
        self._doing = "starting"
        self._waits: dict[int, tuple[str, tuple[int, ...], float]] = {}  # by thread
        self._under_way: deque[_UnderWay] = deque()
        self._lock = threading.Lock()  # of `_under_way`
        self._last_over_s = 0.0
        self._num_meetings = 0
        self._heard = HeardRanks(store, self._interval_s)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begin to publish and to watch. It publishes at once, so that a rank that dies in its first second has too."""
        self._publish(None)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the store may be closed afterwards."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def step(self, number: int) -> None:
        """Note this rank's current step. Cheap: nothing is sent here."""
        self._step = f"step {number}, "

    def doing(self, activity: str) -> None:
        """Note this rank's current action within the step."""
        self._doing = self._step + activity

    @contextmanager
    def waiting(self, activity: str, peers: tuple[int, ...]) -> Iterator[None]:
        """A wait for `peers`, which must end within the timeout."""
        thread = threading.get_ident()
        self._waits[thread] = (activity, peers, time.monotonic())
        try:
            yield
        finally:
            del self._waits[thread]

    def under_way(self, work: WorkHandle, activity: str, peers: tuple[int, ...]) -> None:
        """Watch a collective that the device waits for while the host continues. Of several collectives issued within
        `_MOMENT_S` only the first and the last are watched. Each must end within the timeout after the one before
        it."""
        now_s = time.monotonic()
        with self._lock:
            watched = self._under_way
            is_same_moment = bool(watched) and now_s - watched[-1].moment_s <= _MOMENT_S
            moment_s = watched[-1].moment_s if is_same_moment else now_s
            if is_same_moment and not watched[-1].is_first:
                watched.pop()  # no longer the last of its moment
            watched.append(_UnderWay(work, activity, peers, now_s, moment_s, is_first=not is_same_moment))

    def _stuck(self) -> tuple[str, tuple[int, ...], float] | None:
        """The first collective on the device that is not over: its name, its peers, and since when the device may be
        waiting for it. None if all are over."""
        with self._lock:
            while self._under_way and self._under_way[0].work.is_completed():
                self._under_way.popleft()
                self._last_over_s = time.monotonic()
            if not self._under_way:
                return None
            first = self._under_way[0]
        return first.activity, first.peers, max(first.since_s, self._last_over_s)

    def leave(self, reason: str) -> None:
        """Publish that this rank ends, and why, and stop the watch."""
        self.stop()
        state = {"doing": self._doing, "waits": None, "at": time.time(), "left": reason}
        self._heard.publish(self._rank, state)

    def who_left(self, ranks: Sequence[int]) -> str:
        """A description of the ranks among `ranks` that have left, in order of time: they published it, or are silent.
        Waits some seconds for this to become known."""
        until_s = time.monotonic() + _LEAVING_S
        try:
            while True:
                states = {rank: self._heard.state(rank) for rank in ranks if rank != self._rank}
                departures = sorted((state["at"], rank) for rank, state in states.items() if "left" in state)
                lost_ranks = [rank for _, rank in departures] or [
                    rank for rank in states if self._heard.is_silent(rank)
                ]
                if lost_ranks or time.monotonic() > until_s:
                    break
                time.sleep(self._interval_s / 4)
            descriptions = [self._described(rank, states[rank]) for rank in lost_ranks[:NAMED_PEERS]]
        except RuntimeError:
            return say("the rank that hosts the rendezvous store, rank 0 or a launcher, has left too")
        return each(descriptions) or say("all of them were heard of a moment ago")

    def announce(self, activity: str) -> None:
        """Publish that something is done, for the ranks that wait for it."""
        self._store.set(f"done/{activity}", "")

    def next_meeting(self) -> int:
        """The number of the next meeting of all ranks, which distinguishes the meetings in the store."""
        self._num_meetings += 1
        return self._num_meetings

    def wait_while_alive(self, rank: int, activity: str, most_s: float = math.inf) -> None:
        """Poll until a rank announces something, as long as that rank publishes new states: its work may take hours, or
        up to `most_s`. A rank that is silent for longer than the timeout is reported. Clocks of machines may differ, so
        only this machine's clock is read."""
        last_state, silent_s, look_s, began_s = "", 0.0, 0.01, time.monotonic()
        while not self._store.check([f"done/{activity}"]):
            state = json.dumps(self._heard.state(rank))
            silent_s = 0.0 if state != last_state else silent_s + look_s  # a stop of this process adds 0
            last_state = state
            if silent_s > self._timeout_s:
                sentence = say(
                    "{rank} waited for {other} to announce {what}, and has not heard of it for {silent_s:.0f} s: it is "
                    "dead, stopped, or its machine is",
                    rank=self._describe(self._rank),
                    other=self._describe(rank),
                    what=activity,
                    silent_s=silent_s,
                )
                self._on_timeout(sentence)
                raise RuntimeError(sentence)
            if time.monotonic() - began_s > most_s:
                sentence = say(
                    "{rank} waited for {other} to announce {what}, which may take {most_s:.0f} s and no longer; it "
                    "{last_words}",
                    rank=self._describe(self._rank),
                    other=self._describe(rank),
                    what=activity,
                    most_s=most_s,
                    last_words=self._last_words(rank, self._heard.state(rank)),
                )
                self._on_timeout(sentence)
                raise RuntimeError(sentence)
            time.sleep(look_s)
            look_s = min(2 * look_s, self._interval_s)

    def silent_ranks(self, world: int) -> str:
        """A description of the ranks that publish nothing for some seconds; for use after a connection broke."""
        try:
            states = self._heard.listen(range(world))
        except RuntimeError:
            return say("the rendezvous store is gone too")
        silent = [self._described(rank, state) for rank, state in states.items() if self._heard.is_silent(rank)]
        return each(silent) or say("every rank was heard of a moment ago")

    def _described(self, rank: int, state: State) -> Phrase:
        """A rank and its last words, by its state."""
        return say("{rank} {last_words}", rank=self._describe(rank), last_words=self._last_words(rank, state))

    def _run(self) -> None:
        looked_s = resumed_s = time.monotonic()
        try:
            while not self._stop.wait(self._interval_s):
                before_s, looked_s = looked_s, time.monotonic()
                # If this process was stopped meanwhile, as all ranks by Ctrl-Z, waits begin again.
                if looked_s - before_s > self._timeout_s / 2:
                    resumed_s = looked_s
                stuck = self._stuck()
                all_waits = [*self._waits.values(), *([stuck] if stuck else [])]
                waits = [(activity, peers, max(since, resumed_s)) for activity, peers, since in all_waits]
                wait = min(waits, key=lambda wait: wait[2], default=None)  # the longest
                self._publish(wait)
                if wait and time.monotonic() - wait[2] > self._timeout_s:
                    self._on_timeout(self._sentence(*wait))
                    return
        except RuntimeError:  # the store is gone, and the run with it; the main thread notices that itself
            return

    def _publish(self, wait: tuple[str, tuple[int, ...], float] | None) -> None:
        waits_for = [wait[0], list(wait[1])] if wait else None
        state = {"doing": self._doing, "waits": waits_for, "at": time.time()}
        self._heard.publish(self._rank, state)

    def _chain(self, peers: tuple[int, ...]) -> list[int]:
        """The ranks that this one waits for, those that these wait for, and so on."""
        chain, ranks = list(peers), {self._rank: None}
        while chain:
            peer = chain.pop(0)
            if peer not in ranks:
                ranks[peer] = None
                waits = self._heard.state(peer).get("waits")
                chain += waits[1] if waits else []
        return [rank for rank in ranks if rank != self._rank]

    def _sentence(self, activity: str, peers: tuple[int, ...], since: float) -> str:
        """A description of who waited for whom, down the chain to ranks that wait for no one: there the fault is."""
        waited_s = time.monotonic() - since
        self._heard.listen(self._chain(peers), lambda: self._publish((activity, peers, since)))
        named = both([self._describe(peer) for peer in peers[:NAMED_PEERS]])
        if len(peers) > NAMED_PEERS:
            named = say("{ranks} and {more} more", ranks=named, more=len(peers) - NAMED_PEERS)
        lines: list[str] = [
            say(
                "{rank} waited {waited_s:.0f} s in {what} (at {doing}) for {named}",
                rank=self._describe(self._rank),
                waited_s=waited_s,
                what=activity,
                doing=self._doing,
                named=named,
            )
        ]
        chain, seen = list(peers), {self._rank}
        waiting, at_fault = list[str](), list[str]()
        while chain:
            peer = chain.pop(0)
            if peer in seen:
                continue
            seen.add(peer)
            state = self._heard.state(peer)
            words = say("  {rank} {last_words}", rank=self._describe(peer), last_words=self._last_words(peer, state))
            waits = state.get("waits")
            if waits and not self._heard.is_silent(peer):
                waiting.append(words)
                chain += waits[1]
            else:
                at_fault.append(words)
        lines += waiting[:NAMED_PEERS] + at_fault[:NAMED_PEERS]
        lines.append(say("  if the work is slow and not stuck, raise run.timeout_s"))
        return below(lines)

    def current_action(self) -> str:
        """This rank's current action, with its step."""
        return self._doing

    def _last_words(self, rank: int, state: State) -> str:
        if not state:
            return say("never reported: it did not start")
        if "left" in state:
            return say("has left, at {doing}: {reason}", doing=state["doing"], reason=state["left"])
        if self._heard.is_silent(rank):
            return say(
                "has been silent for {age_s:.0f} s: it is dead, stopped, or its machine is; it was at {doing}",
                age_s=self._heard.silent_s(rank),
                doing=state["doing"],
            )
        if state["waits"]:
            activity, peers = state["waits"]
            return say(
                "waits itself, in {what} (at {doing}) for rank {ranks}",
                what=activity,
                doing=state["doing"],
                ranks=tuple(map(str, peers)),
            )
        return say("is alive and busy at {doing}: it waits for no one", doing=state["doing"])


def explained(error: RuntimeError, watch: Watch | None, activity: str, peers: Sequence[int]) -> RuntimeError:
    """The error to raise for an error in a wait for other ranks. If a connection was lost, and nobody else will report
    it, this is a RunError that names the wait and the ranks that left; else the error itself."""
    if not is_lost_connection(error) or not (watch is None or watch.explains_losses):
        return error
    reason = str(error).partition("\n")[0][:200]
    peer_names = ", ".join(map(str, peers[:NAMED_PEERS])) + (", ..." if len(peers) > NAMED_PEERS else "")
    if watch is None:
        return RunError(
            say(
                "lost the connection in {what} with rank {ranks}, of which one has left\n  {reason}",
                what=activity,
                ranks=peer_names,
                reason=reason,
            )
        )
    return RunError(
        say(
            "lost the connection in {what} (at {doing}) with rank {ranks}: {left}\n  {reason}",
            what=activity,
            doing=watch.current_action(),
            ranks=peer_names,
            left=watch.who_left(peers),
            reason=reason,
        )
    )


@contextmanager
def in_turn_of_rank_0(watch: Watch | None, rank: int, world: int, activity: str) -> Iterator[None]:
    """A block that rank 0 leaves before other ranks enter it, and that all ranks leave together. It may last longer
    than the timeout, as long as ranks publish states. There is no watch if there is one rank, or nobody waits."""
    if watch is None:
        yield
        return
    if rank > 0:
        watch.wait_while_alive(0, activity)
    yield
    if rank == 0:
        watch.announce(activity)
    meet(watch, rank, world, activity)


def meet(watch: Watch | None, rank: int, world: int, activity: str, most_s: float = math.inf) -> None:
    """Return when all ranks have finished an activity and called this. On some ranks it may last longer than the
    timeout, as long as they publish states and it takes no more than `most_s`. Every rank calls this, in one order.
    There is no watch if there is one rank, or nobody waits."""
    if watch is None:
        return
    name = say("{work}, meeting {number}", work=activity, number=watch.next_meeting())
    on_all_ranks = say("{work} on all ranks", work=name)
    if rank > 0:
        watch.announce(say("{work} on rank {rank}", work=name, rank=rank))
        watch.wait_while_alive(0, on_all_ranks, most_s)
        return
    ends_s = time.monotonic() + most_s
    for peer in range(1, world):
        on_peer = say("{work} on rank {rank}", work=name, rank=peer)
        watch.wait_while_alive(peer, on_peer, ends_s - time.monotonic())
    watch.announce(on_all_ranks)
