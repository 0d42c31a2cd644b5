"""The check that every message of all ranks ends, under NCCL's rules.

NCCL's operations of one communicator run one after the other, in the order in which a rank issues them. An operation
ends when all its ranks have begun it: a collective of the group, a send with its receive. So ranks that issue in
different orders wait for each other forever. Here the records of all ranks (message_record.py) are played, step by
step, under several readings of these rules:

- lazy: the two ranks of a message have a communicator of their own. It is made at its first use, as that of a group is,
  and the host blocks until all its ranks have arrived. This is torch's default, without `device_id`.
- eager: all communicators are made before, and messages share their group's communicator with its collectives.
- one queue: eager, and the device runs all of a rank's operations in one order (CUDA_DEVICE_MAX_CONNECTIONS=1).

A rank passes a wait when the operation is over. On a device only the stream waits, and the host goes on, so this play
blocks more often than a device.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.config.phrase import each, say
from shardwright.measure.checks.message_record import Communicator, MessageRecord, Operation

_NAMED = 8  # ranks whose standstill is reported


@dataclass(frozen=True)
class Rules:
    """A reading of NCCL's rules."""

    name: str
    lazy: bool
    one_queue: bool = False


ALL_RULES = (Rules("lazy", lazy=True), Rules("eager", lazy=False), Rules("one queue", lazy=False, one_queue=True))

_Place = tuple[int, int]  # a rank, and the index of an operation in its record
_Carrier = tuple[Communicator, int, int]  # a communicator; and the two ranks of a message, or -1 for its group's


def message_faults(records: Sequence[MessageRecord]) -> list[str]:
    """Faults of the order of messages under any of the rules; empty if there are none."""
    partners, faults = _partners(records)
    if faults:
        return faults
    for rules in ALL_RULES:
        if stuck := _NcclPlay(records, partners, rules).stuck():
            return [say("under the rules '{name}' ranks wait for each other for ever", name=rules.name), *stuck]
    return []


def _partners(records: Sequence[MessageRecord]) -> tuple[dict[_Place, tuple[_Place, ...]], list[str]]:
    """For each place, all places that make one operation with it, itself included; and the faults of places that do not
    match.

    The n-th collective of a rank on a communicator is the n-th of all its ranks, and its n-th send to a rank is that
    rank's n-th receive from it.
    """
    by_name: dict[tuple[object, ...], list[_Place]] = defaultdict(list)
    counts: dict[tuple[object, ...], int] = defaultdict(int)
    for record in records:
        for number, operation in enumerate(record.operations):
            for name in _names(record.rank, operation):
                by_name[(*name, counts[record.rank, *name])].append((record.rank, number))
                counts[record.rank, *name] += 1
    operation_at = {
        (record.rank, number): operation for record in records for number, operation in enumerate(record.operations)
    }
    partners: dict[_Place, dict[_Place, None]] = defaultdict(dict)
    faults = list[str]()
    for name, places in by_name.items():
        operations = [operation_at[place] for place in places]
        expected = 2 if name[1] != "collective" else len(operations[0].communicator.ranks)
        if len(places) != expected:
            requests = _requests(places, operation_at)
            faults.append(
                say(
                    "{expected} ranks take part, and {count} ask for it: {requests}",
                    expected=expected,
                    count=len(places),
                    requests=requests,
                )
            )
        elif not _fit(operations):
            requests = _requests(places, operation_at)
            faults.append(say("ranks ask for different things at once: {requests}", requests=requests))
        for place in places:
            partners[place] |= dict.fromkeys(places)
    return {place: tuple(partner_places) for place, partner_places in partners.items()}, faults


def _requests(places: Sequence[_Place], operation_at: Mapping[_Place, Operation]) -> str:
    """The first requests of places, in words."""
    return each(
        [
            say("rank {rank}: {operation}", rank=rank, operation=str(operation_at[rank, number]))
            for rank, number in places[:_NAMED]
        ]
    )


def _names(rank: int, operation: Operation) -> Iterator[tuple[object, ...]]:
    """The names under which an operation meets its partners: one per direction, so two for an exchange."""
    if operation.to < 0 and operation.source < 0:
        yield operation.communicator, "collective"
    kind = "exchange" if operation.kind == "exchange" else "message"
    if operation.to >= 0:
        yield operation.communicator, kind, rank, operation.to
    if operation.source >= 0:
        yield operation.communicator, kind, operation.source, rank


def _fit(operations: Sequence[Operation]) -> bool:
    reference = operations[0]
    if reference.to >= 0 or reference.source >= 0:
        return len({operation.num_bytes for operation in operations}) == 1
    is_even = reference.kind != "all_to_all_v"
    return all(
        operation.kind == reference.kind and (not is_even or operation.num_bytes == reference.num_bytes)
        for operation in operations
    )


@dataclass
class _RankState:
    """The state of a rank: the next moment of its record, the operations under way in each queue, and those over."""

    record: MessageRecord
    next_moment: int = 0
    queues: dict[object, deque[int]] = field(default_factory=lambda: defaultdict(deque))
    over: set[int] = field(default_factory=set)

    @property
    def is_done(self) -> bool:
        return self.next_moment == len(self.record.moments) and not any(self.queues.values())


class _NcclPlay:
    """The play of all ranks at once."""

    def __init__(
        self, records: Sequence[MessageRecord], partners: dict[_Place, tuple[_Place, ...]], rules: Rules
    ) -> None:
        self._ranks = {record.rank: _RankState(record) for record in records}
        self._partners, self._rules = partners, rules
        self._arrived: dict[_Carrier, set[int]] = defaultdict(set)
        self._at_first_use: dict[_Carrier, list[int]] = defaultdict(list)

    def stuck(self) -> list[str]:
        """Play to the end. Returns what ranks still wait for then, if any."""
        due = deque(self._ranks)
        while due:
            due.extend(self._go_on(due.popleft()))
        standing = [rank for rank, state in self._ranks.items() if not state.is_done]
        return [self._standstill(rank) for rank in standing[:_NAMED]]

    def _go_on(self, rank: int) -> set[int]:
        """Play a rank until it blocks. Returns the other ranks that may go on since."""
        state, resumed = self._ranks[rank], set[int]()
        while state.next_moment < len(state.record.moments):
            moment = state.record.moments[state.next_moment]
            if moment.is_wait:
                if moment.operation not in state.over:
                    break
            else:
                operation = state.record.operations[moment.operation]
                if self._rules.lazy and not self._may_use(rank, _carrier(rank, operation), resumed):
                    break
                state.queues[self._queue(rank, operation)].append(moment.operation)
                resumed |= self._end_what_can(rank, moment.operation)
            state.next_moment += 1
        return resumed - {rank}

    def _may_use(self, rank: int, carrier: _Carrier, resumed: set[int]) -> bool:
        """True if a communicator exists, or is made now because this rank is the last to arrive."""
        ranks = carrier[0].ranks if carrier[1] < 0 else carrier[1:]
        arrived = self._arrived[carrier]
        if rank not in arrived:
            arrived.add(rank)
            if len(arrived) == len(ranks):
                resumed |= set(ranks)
        return len(arrived) == len(ranks)

    def _queue(self, rank: int, operation: Operation) -> object:
        if self._rules.one_queue:
            return "all"
        return _carrier(rank, operation) if self._rules.lazy else operation.communicator

    def _end_what_can(self, rank: int, place: int) -> set[int]:
        """End an operation if all its ranks are at it, and then those that become first. Returns the ranks
        concerned."""
        due, ended = deque([(rank, place)]), set[int]()
        while due:
            places = self._all_with(due.popleft())
            if not all(self._is_first(place) for place in places):
                continue
            for partner_rank, number in places:
                state = self._ranks[partner_rank]
                queue = state.queues[self._queue(partner_rank, state.record.operations[number])]
                queue.popleft()
                state.over.add(number)
                ended.add(partner_rank)
                if queue:
                    due.append((partner_rank, queue[0]))
        return ended

    def _all_with(self, place: _Place) -> tuple[_Place, ...]:
        """All places that end with an operation: its partners, and in a ring of exchanges the partners of these."""
        places, due = dict.fromkeys(self._partners[place]), deque(self._partners[place])
        while due:
            for partner in self._partners[due.popleft()]:
                if partner not in places:
                    places[partner] = None
                    due.append(partner)
        return tuple(places)

    def _is_first(self, place: _Place) -> bool:
        state = self._ranks[place[0]]
        queue = state.queues[self._queue(place[0], state.record.operations[place[1]])]
        return bool(queue) and queue[0] == place[1]

    def _standstill(self, rank: int) -> str:
        state = self._ranks[rank]
        if state.next_moment == len(state.record.moments):
            waiting = next(queue[0] for queue in state.queues.values() if queue)
            operation = str(state.record.operations[waiting])
            return say("rank {rank} is at its end, where {operation} is not over", rank=rank, operation=operation)
        moment = state.record.moments[state.next_moment]
        operation = str(state.record.operations[moment.operation])
        if moment.is_wait:
            return say("rank {rank} waits for {operation}", rank=rank, operation=operation)
        return say("rank {rank} makes the communicator of {operation}", rank=rank, operation=operation)


def _carrier(rank: int, operation: Operation) -> _Carrier:
    """The communicator that carries an operation if pairs of ranks have their own for messages."""
    if operation.kind not in ("send", "recv"):
        return operation.communicator, -1, -1
    low, high = sorted((rank, max(operation.to, operation.source)))
    return operation.communicator, low, high
