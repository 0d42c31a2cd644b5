"""Schedules from a building block: the length of the block decides how much memory it takes. Qi et al. 2024
(arXiv 2405.15362).

Time is cut into slots that hold one action each. A building block gives the slots of one microbatch on each rank, and
is repeated every 6 slots: a rank holds two stages in a V, so a microbatch has two F, two I and two W there. The actions
of all microbatches then never collide. Each microbatch keeps its activations as long as its block lasts, so the rank's
peak is the block's length / 6, in halves of its layers. A short block gives a schedule with little memory.

Only F and I have their slots in the block (`starts`: chunk 0's F, chunk 1's F, chunk 1's I, chunk 0's I). Then
1. there are holes before the first block is complete and after the last block has begun: work moves to an earlier hole
   if its inputs and the peak allow ("squeeze"; the pattern between these two ends has no holes, and stays),
2. the pattern between the two ends is repeated as often as there are microbatches,
3. each remaining hole takes the weight gradient that has waited longest.
Only the resulting order is kept: the real times of actions depend on their real costs.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator

from shardwright.schedule.action import Action, Kind
from shardwright.schedule.schedule import Schedule
from shardwright.sharding.stage_placement import vee

PERIOD = 6
Block = tuple[int, int, int, int]
Work = tuple[int, int]  # (0 F0, 1 F1, 2 I1, 3 I0, 4 W1, 5 W0; microbatch)
_KINDS = (Kind.FORWARD, Kind.FORWARD, Kind.INPUT_GRAD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.WEIGHT_GRAD)
_CHUNK = (0, 1, 1, 0, 1, 0)


def from_building_block(
    name: str, num_ranks: int, num_microbatches: int, starts: Callable[[int, int], Block]
) -> Schedule:
    """Repeat the block, squeeze both ends, fill the holes. `starts(rank, num_ranks)` gives a rank's four slots."""
    num_drawn = min(num_microbatches, 2 * num_ranks + 2)  # enough that neither end reaches the other
    slots = [
        {(n, i): start + PERIOD * i for n, start in enumerate(starts(rank, num_ranks)) for i in range(num_drawn)}
        for rank in range(num_ranks)
    ]
    steady = _squeeze(slots, num_drawn)
    rows = []
    for rank, rank_slots in enumerate(slots):
        stages = (rank, 2 * num_ranks - 1 - rank)
        work = _with_weight_grads(_stretched(rank_slots, steady.start, num_microbatches - num_drawn))
        rows.append(tuple(Action(_KINDS[n], stages[_CHUNK[n]], i) for n, i in work))
    return Schedule(name, num_microbatches, vee(num_ranks), tuple(rows))


def _squeeze(slots: list[dict[Work, int]], num_microbatches: int) -> range:
    """Move work of both ends to earlier holes, in place, earliest first. Returns the slots between the ends."""
    lanes = [_Lane(rank_slots) for rank_slots in slots]
    allowed = max(lane.peak for lane in lanes)
    steady = range(slots[0][3, 0], 1 + max(rank_slots[0, num_microbatches - 1] for rank_slots in slots))
    for slot, rank, work in sorted(
        (slot, rank, work) for rank, rank_slots in enumerate(slots) for work, slot in rank_slots.items()
    ):
        if slot in steady:
            continue
        for earlier in lanes[rank].holes(_earliest(slots, rank, work), slot):
            if lanes[rank].move(slot, earlier, allowed):
                slots[rank][work] = earlier
                break
    return steady


def _stretched(slots: dict[Work, int], start: int, num_added: int) -> dict[Work, int]:
    """A rank's slots with `num_added` further microbatches: the period from slot `start` is repeated that often."""
    longer = {}
    for (n, i), slot in slots.items():
        first, last = 0 if slot < start + PERIOD else num_added, num_added if slot >= start else 0
        for shift in range(first, last + 1):
            longer[n, i + shift] = slot + PERIOD * shift
    return longer


def _earliest(slots: list[dict[Work, int]], rank: int, work: Work) -> int:
    """The first slot after all work that must run before."""
    n, i = work
    source = rank - 1 if n % 2 == 0 else rank + 1  # F0 and I1 go down the V, F1 and I0 up
    before = [slots[rank].get((n - 1, i), -1), slots[rank].get((n, i - 1), -1)]
    if 0 <= source < len(slots):
        before.append(slots[source][work])
    return 1 + max(before)


def _with_weight_grads(slots: dict[Work, int]) -> list[Work]:
    """A rank's work in order, with a weight gradient in each hole as long as one waits."""
    work_of_slot = {slot: work for work, slot in slots.items()}
    order, waiting = list[Work](), deque[Work]()
    for slot in range(max(work_of_slot) + 1):
        if work := work_of_slot.get(slot):
            order.append(work)
            if work[0] in (2, 3):
                waiting.append((work[0] + 2, work[1]))
        elif waiting:
            order.append(waiting.popleft())
    return [*order, *waiting]


class _Lane:
    """The slots of a rank's work, and the numbers waiting and alive when each begins; all other slots are holes.

    A hole runs the weight gradient that has waited longest, if one waits. So a move of one piece of work changes the
    number waiting from its new slot on, until that number is the same as before the move.
    """

    def __init__(self, slots: dict[Work, int]) -> None:
        self._slots = sorted(slots.values())
        forwards = {slot for (n, _), slot in slots.items() if n < 2}
        self._is_forward = [slot in forwards for slot in self._slots]  # else an input gradient
        self._waiting, self._alive = [0], [0]  # weight gradients; halves of microbatches
        for i in range(len(self._slots) - 1):
            waiting, alive = self._after(i, self._slots[i + 1])
            self._waiting.append(waiting)
            self._alive.append(alive)

    @property
    def peak(self) -> int:
        """Most halves of microbatches alive at once."""
        return max(map(int.__add__, self._alive, self._is_forward))

    def holes(self, first: int, last: int) -> Iterator[int]:
        """The holes from slot `first` up to, but without, slot `last`."""
        occupied = set(self._slots[bisect_left(self._slots, first) : bisect_left(self._slots, last)])
        return (slot for slot in range(first, last) if slot not in occupied)

    def _after(self, i: int, slot: int) -> tuple[int, int]:
        """(weight gradients waiting, halves alive) when a slot begins, if the i-th work is the last before it."""
        if i < 0:
            return 0, 0
        waiting, alive = self._waiting[i] + (not self._is_forward[i]), self._alive[i] + self._is_forward[i]
        ended = min(waiting, slot - self._slots[i] - 1)
        return waiting - ended, alive - ended

    def move(self, slot: int, earlier: int, allowed: int) -> bool:
        """Move the work in a slot to an earlier hole, if at most `allowed` halves are alive at any time then. True if
        it was moved."""
        slots, is_forward = self._slots, self._is_forward
        first, old = bisect_left(slots, earlier), bisect_left(slots, slot)
        waiting, alive = self._after(first - 1, earlier)
        new_slots, new_is_forward = [earlier, *slots[first:old]], [is_forward[old], *is_forward[first:old]]
        new_waiting, new_alive = list[int](), list[int]()
        i = 0
        while True:
            new_waiting.append(waiting)
            new_alive.append(alive)
            alive += new_is_forward[i]
            waiting += not new_is_forward[i]
            if alive > allowed:
                return False
            if i + 1 == len(new_slots):  # work after the old slot, until as many wait as before
                following = first + i + 1
                if following == len(slots):
                    break
                new_slots.append(slots[following])
                new_is_forward.append(is_forward[following])
            ended = min(waiting, new_slots[i + 1] - new_slots[i] - 1)
            waiting -= ended
            alive -= ended
            i += 1
            if first + i > old and waiting == self._waiting[first + i]:
                del new_slots[i], new_is_forward[i]
                break
        changed = slice(first, first + len(new_slots))
        slots[changed], is_forward[changed] = new_slots, new_is_forward
        self._waiting[changed], self._alive[changed] = new_waiting, new_alive
        return True
