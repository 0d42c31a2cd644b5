"""The account of communication: number of calls, bytes, and the time a rank was blocked, by collective and axis."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from shardwright.parallel.device_streams import DeviceStreams, TimedEvent, wait_on_host

# Kinds of link.
INSIDE, BETWEEN = "inside the node", "between nodes"


@dataclass
class Tally:
    """Calls of one collective on one axis, and their bytes."""

    count: int = 0
    num_bytes: int = 0


@dataclass
class BlockedTime:
    """The time in which a rank was blocked: host seconds by axis, and pairs of events on the compute stream, not read
    yet (Ledger.seconds)."""

    host_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    pairs: list[tuple[str, TimedEvent, TimedEvent]] = field(default_factory=list)


@dataclass
class Ledger:
    """The communication of one rank since the last `clear`.

    Bytes of a collective are those of its full tensor: the operand of an all-reduce, the result of an all-gather, the
    operand of a reduce-scatter or an all-to-all, the message of a send, a receive or an exchange with the neighbours.
    Bytes of an all-to-all with uneven shares (all_to_all_v) are those that this rank sends to others. The cost model
    computes how many bytes an algorithm puts on the wire for the other collectives.

    If nodes are known, each of `ranks_per_node` neighbouring ranks, the bytes that `rank` itself sends are also counted
    by axis and by kind of link: inside its node, or to another node.

    Blocked seconds are host time on a CPU; if two passes run side by side, the time in which both are blocked. On
    CUDA the host does not wait, so events on the compute stream bracket each wait; `blocked_s` resolves them, and waits
    for the last of them. Who needs the seconds later takes the events with `take_blocked`, and resolves them then.

    `kind` is the kind of device that a dry run stands for, if it differs from the device's own. `streams` are the
    device's streams, on which other code orders work too.
    """

    device: torch.device
    rank: int = 0
    ranks_per_node: int = 0
    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    kind: str = ""
    streams: DeviceStreams | None = None
    _link_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    _blocked: BlockedTime = field(default_factory=BlockedTime)
    _spare: list[TimedEvent] = field(default_factory=list)  # that are read and may be reused
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _num_lanes: int = 1
    _num_blocked: int = 0
    _blocked_since_s: float = 0.0

    def record(self, kind: str, axis: str, num_bytes: int, sent_bytes: Mapping[int, int]) -> None:
        """Count one collective, and what this rank sends for it, by receiving rank."""
        with self._lock:
            tally = self.tallies.setdefault((kind, axis), Tally())
            tally.count += 1
            tally.num_bytes += num_bytes
            for receiver, size in sent_bytes.items() if self.ranks_per_node else ():
                is_near = receiver // self.ranks_per_node == self.rank // self.ranks_per_node
                self._link_bytes[axis, INSIDE if is_near else BETWEEN] += size

    @contextmanager
    def blocked(self, axis: str, keeps_turn: bool = False) -> Iterator[None]:
        """A block in which this rank's computation waits for `axis`; if the turn is kept, that of all its passes."""
        if self.streams is not None:
            start, end = self._event(self.streams), self._event(self.streams)
            start.record()
            yield
            end.record()
            self._blocked.pairs.append((axis, start, end))
        else:
            with self._lock:
                lanes = self._num_lanes if keeps_turn else 1
                self._num_blocked += lanes
                self._blocked_since_s = time.perf_counter()
            yield
            with self._lock:
                if self._num_blocked >= self._num_lanes:
                    now_s = time.perf_counter()
                    self._blocked.host_s[axis] += now_s - self._blocked_since_s
                    self._blocked_since_s = now_s  # another pass may still be blocked, and counts from here
                self._num_blocked -= lanes

    @contextmanager
    def lanes(self, change: int) -> Iterator[None]:
        """A block in which the number of passes that run side by side changes by `change`. The rank counts as blocked
        if all of them are blocked."""
        with self._lock:
            self._num_lanes += change
            self._blocked_since_s = time.perf_counter()
        yield
        with self._lock:
            self._num_lanes -= change
            self._blocked_since_s = time.perf_counter()

    def _event(self, streams: DeviceStreams) -> TimedEvent:
        """An event that may be reused, or a new one."""
        with self._lock:
            return self._spare.pop() if self._spare else streams.timed_event()

    def blocked_s(self) -> dict[str, float]:
        """Blocked seconds by axis. On CUDA this waits for the compute stream, and not for copies on other streams."""
        blocked = self.take_blocked()
        self.wait_for(blocked)
        self._blocked.host_s.update(self.seconds(blocked))
        return dict(self._blocked.host_s)

    def take_blocked(self) -> BlockedTime:
        """The blocked time since the last `clear`, which this account then no longer has. Nothing waits."""
        taken, self._blocked = self._blocked, BlockedTime()
        return taken

    def wait_for(self, blocked: BlockedTime) -> float:
        """Let the host wait until all events of a blocked time have happened. Returns the seconds that it waited."""
        if self.streams is None:
            return 0.0
        start_s = time.perf_counter()
        for _, _, end in reversed(blocked.pairs):
            if not end.query():  # those before the last of a stream have happened, too
                wait_on_host(self.streams, end)
        return time.perf_counter() - start_s

    def seconds(self, blocked: BlockedTime) -> dict[str, float]:
        """The seconds of a blocked time by axis, once its events have happened; its events are used again."""
        for axis, start, end in blocked.pairs:
            blocked.host_s[axis] += start.elapsed_time(end) / 1e3
        self._give_back_events(blocked)
        return dict(blocked.host_s)

    def _give_back_events(self, blocked: BlockedTime) -> None:
        """Make events available again: they are created once, not for each wait of each step."""
        with self._lock:
            self._spare += [event for _, *pair in blocked.pairs for event in pair]
        blocked.pairs.clear()

    def table(self) -> dict[str, dict[str, int]]:
        """The tallies as {"all_reduce tp": {"count": ..., "bytes": ...}}, sorted, for tests and reports."""
        return {
            f"{kind} {axis}": {"count": tally.count, "bytes": tally.num_bytes}
            for (kind, axis), tally in sorted(self.tallies.items())
        }

    def by_link(self) -> dict[str, int]:
        """The sent bytes as {"ep between nodes": bytes, ...}, sorted; empty if nodes are not known."""
        return {f"{axis} {link}": num_bytes for (axis, link), num_bytes in sorted(self._link_bytes.items())}

    def sent_bytes(self, link: str, axis: str | None = None) -> int:
        """The bytes that this rank has sent over one kind of link, on all axes or on one."""
        return sum(
            num_bytes
            for (bytes_axis, bytes_link), num_bytes in self._link_bytes.items()
            if bytes_link == link and axis in (None, bytes_axis)
        )

    def clear(self) -> None:
        """Start a new account."""
        self.tallies.clear()
        self._link_bytes.clear()
        self._give_back_events(self.take_blocked())
