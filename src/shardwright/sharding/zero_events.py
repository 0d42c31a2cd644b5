"""When ZeRO gathers, releases, reduces and updates: a machine of events, without tensors.

Replicas share their state (Rajbhandari et al. 2020, arXiv 1910.02054, section 5). A unit is the parameters that are
gathered, reduced and updated together. What of a unit a rank holds whole, and of what only its shard, is what the
stages of ZeRO differ in:

    stage   values           gradients                         optimizer state
    0       whole            whole                             whole
    1       whole            whole, its shard is reduced       shard
    2       whole            shard; whole while they arrive    shard
    3       shard; whole while they are used, by layer         shard

`UnitEvents` knows what of one unit is there, and `StageEvents` when the units of a stage move. What an event does is in
their subclasses: the engine plays it on tensors (parallel/zero/), the account on sizes (account/zero_replay.py). So the
collectives of a step and the peak of borrowed memory are told by the same lines before a run and in it.

Gradients are reduced while the backward still runs (Li et al. 2020, arXiv 2006.15704, section 3.2), unit after unit in
the order in which they become complete. Nothing is reduced while microbatches accumulate.

In stage 3 the values of a unit are gathered before they are used and released after. Without a pipeline that goes layer
by layer, forward and backward, the next one's on its way while one computes (Zhao et al. 2023, arXiv 2304.11277,
section 3.3). In a pipeline the program gathers and releases whole stages, and the layers find theirs there. Less than 3
times all parameters is moved (section 7.2 of the paper): the embedding's backward needs no table, and the last region
of a stage stays between a forward and the backward after it.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from shardwright.sharding.buffer_pool import BufferPool, Loan

# Reductions that a rank has under way at once. Each holds a buffer, and in stages 2 and 3 that memory is what is being
# saved.
MOST_REDUCING = 2

_MASTER_BYTES = 4  # of an element that the optimizer updates

Memory = TypeVar("Memory")


@dataclass(frozen=True)
class UnitSizes:
    """How much a unit is: its stage of ZeRO, elements of its whole buffer and of one shard, padding included, bytes of
    an element of its values, of a gradient that is added up and of one on its way, how many parameters it has, and how
    many of these get their gradient in W where a backward is split."""

    zero: int
    size: int
    shard_size: int
    compute_bytes: int
    gradient_bytes: int
    reduce_bytes: int
    num_parameters: int
    num_put_off: int


class UnitEvents(ABC, Generic[Memory]):
    """The buffers of a unit: there, borrowed or on their way. An event happens only if this state asks for it."""

    def __init__(self, sizes: UnitSizes, pool: BufferPool[Memory]) -> None:
        self.sizes = sizes
        self.pool = pool
        self._value_pool = pool  # what gathered values are borrowed from
        self.holds = 0  # how many stages want the values kept
        self.num_missing = 0  # parameters whose gradient of the running backward has not arrived
        self._values: Loan[Memory] | None = None  # gathered, or on their way
        self._is_gathering = False
        self._gradients: Loan[Memory] | None = None  # whole ones, where shards are kept
        self._reducing: list[Loan[Memory]] | None = None  # what the reduction under way has borrowed
        self._has_sum = False  # whether the shard has a sum of this step already
        self._exact: Loan[Memory] | None = None  # float32 gradients of the update under way, if they are in others

    def borrow_values_from(self, pool: BufferPool[Memory]) -> None:
        """Have gathered values lie in buffers of another pool."""
        self._value_pool = pool

    # What the events do.

    @abstractmethod
    def _start_gather(self, values: Loan[Memory] | None) -> None:
        """Begin to gather the values, into what was borrowed or into the whole buffer. Moves an all-gather over the
        shards."""

    @abstractmethod
    def _finish_gather(self) -> None:
        """Wait until the values are here."""

    @abstractmethod
    def _drop_values(self) -> None:
        """The gathered values go: nothing may look at them any more."""

    @abstractmethod
    def _open_gradients(self, gradients: Loan[Memory]) -> None:
        """Whole gradients are added up in this memory, which holds none yet."""

    @abstractmethod
    def _start_reduce(self, cast: Loan[Memory] | None, aside: Loan[Memory] | None) -> None:
        """Begin to sum the gradients over the replicas: from `cast` where they travel in other numbers, and into
        `aside` where the sum is to be rounded, or added to what is there."""

    @abstractmethod
    def _finish_reduce(self, has_sum: bool) -> None:
        """Wait for the sum, and put it, or add it if there is one, where it stays."""

    @abstractmethod
    def _drop_gradients(self) -> None:
        """The whole gradients go."""

    @abstractmethod
    def _begin_update(self, gradients: Loan[Memory] | None, factor: float, rate: float) -> None:
        """Do with each element what its update begins with, with the summed gradients times `factor`; in float32 in
        `gradients` where they are in other numbers."""

    @abstractmethod
    def _end_update(self) -> None:
        """End the update, where ranks have made steps of whole matrices meanwhile (sharding/unit_update.py)."""

    # When they happen.

    def start_gather(self) -> None:
        """Begin to gather the values, if they are sharded and neither here nor on their way."""
        if self.sizes.zero == 3 and self._values is None:
            self._values = self._value_pool.borrow(self.sizes.size * self.sizes.compute_bytes)
            self._is_gathering = True
            self._start_gather(self._values)

    def finish_gather(self) -> None:
        """Wait until the values are here."""
        if self._is_gathering:
            self._is_gathering = False
            self._finish_gather()

    def release(self) -> None:
        """Let gathered values go, unless a stage holds them."""
        if self._values is not None and not self.holds:
            self.finish_gather()
            self._drop_values()
            self._value_pool.give_back(self._values)
            self._values = None

    def open(self) -> None:
        """Have memory for gradients that is not just being summed."""
        if self.sizes.zero >= 2:
            self.finish_reduce()
            if self._gradients is None:
                self._gradients = self.pool.borrow(self.sizes.size * self.sizes.gradient_bytes)
                self._open_gradients(self._gradients)

    def start_reduce(self) -> None:
        """Begin to sum the gradients over the replicas."""
        self.finish_reduce()
        self.open()
        sizes = self.sizes
        assert sizes.zero >= 2 or not self._has_sum, "a second reduction in place would count the first sum again"
        is_cast = sizes.reduce_bytes != sizes.gradient_bytes
        is_aside = sizes.zero > 0 and (is_cast or self._has_sum)
        cast = self.pool.borrow(sizes.size * sizes.reduce_bytes) if is_cast else None
        aside = self.pool.borrow(sizes.shard_size * sizes.reduce_bytes) if is_aside else None
        self._reducing = [buffer for buffer in (aside, cast) if buffer is not None]
        self._start_reduce(cast, aside)

    def finish_reduce(self) -> None:
        """Wait until the sum that is on its way is there."""
        if self._reducing is None:
            return
        borrowed, self._reducing = self._reducing, None
        self._finish_reduce(self._has_sum)
        for buffer in borrowed:
            self.pool.give_back(buffer)
        if self._gradients is not None:
            self._drop_gradients()
            self.pool.give_back(self._gradients)
            self._gradients = None
        self._has_sum = True

    def zero(self) -> None:
        """Begin a step: there are no gradients yet."""
        self._has_sum = False

    def begin_update(self, factor: float, rate: float) -> None:
        """Begin to step with the summed gradients times `factor`."""
        is_cast = self.sizes.gradient_bytes != _MASTER_BYTES
        self._exact = self.pool.borrow(self.sizes.shard_size * _MASTER_BYTES) if is_cast else None
        self._begin_update(self._exact, factor, rate)

    def end_update(self) -> None:
        """End the step, and begin to gather what the other replicas updated."""
        self._end_update()
        if self._exact is not None:
            self.pool.give_back(self._exact)
            self._exact = None
        if self.sizes.zero in (1, 2):
            self._is_gathering = True
            self._start_gather(None)


class Reductions:
    """The reductions that a rank has under way, oldest first, of all its stages: each holds memory until it is over."""

    def __init__(self) -> None:
        self._under_way: deque[UnitEvents[Any]] = deque()

    def start(self, unit: UnitEvents[Any]) -> None:
        """Begin to sum a unit's gradients, once there are few enough others under way."""
        while len(self._under_way) >= MOST_REDUCING:
            self._under_way.popleft().finish_reduce()
        unit.start_reduce()
        self._under_way.append(unit)

    def finish(self, units: Collection[UnitEvents[Any]]) -> None:
        """Wait until no reduction of these units is under way, nor any that began before."""
        while any(unit in units for unit in self._under_way):
            self._under_way.popleft().finish_reduce()


Unit = TypeVar("Unit", bound=UnitEvents)  # type: ignore[type-arg]


class StageEvents(ABC, Generic[Unit]):
    """When the units of one stage move.

    In a step: `zero`, backwards, each with `arm` before it if its gradients are then to be reduced and `reduce` after
    it, `wait`, `reduce_late`, and `update`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        late: Collection[Unit],
        units_in: Mapping[str, Sequence[Unit]],
        is_shared: bool,
        reductions: Reductions,
        groups: Sequence[tuple[Sequence[int], int]] | None = None,
    ) -> None:
        """`units_in` are the units whose values each region needs, in the order in which regions are computed.

        `late` units have gradients that are complete only when another stage's are. `is_shared` says whether any other
        rank sums gradients with this one, and `reductions` are those that this rank has under way. Units that are
        updated together are `groups` of their numbers, with the memory that this takes; each by itself, if left out.
        """
        self.units = list(units)
        each = [([number], 0) for number in range(len(self.units))]
        self._groups = [([self.units[number] for number in numbers], size) for numbers, size in groups or each]
        self._late = [unit for unit in units if unit in late]
        self._prompt = [unit for unit in reversed(units) if unit not in late]
        self._due = self._prompt  # those of the next reduction
        self._next = 0  # the first of them that has not been started
        self._reductions = reductions
        self._units_in = {region: list(needed) for region, needed in units_in.items()}
        self._regions = list(units_in)
        self._is_shared = is_shared
        self.is_armed = False

    def also_uses(self, region: str, unit: Unit) -> None:
        """A region needs the values of one more unit, which may be another stage's."""
        self._units_in[region].append(unit)

    # Gradients.

    def zero(self) -> None:
        """Begin a step."""
        for unit in self.units:
            unit.zero()

    def arm(self, is_last: bool, is_split: bool) -> None:
        """The next backward, or of one that `is_split` its W, is the last before a reduction: reduce each unit as soon
        as it is complete.

        Units that hold their gradients whole wait for the last reduction of the step.
        """
        self._due = [unit for unit in self._prompt if is_last or unit.sizes.zero >= 2]
        self.is_armed = self._is_shared
        self._next = 0
        for unit in self.units:
            unit.num_missing = unit.sizes.num_put_off if is_split else unit.sizes.num_parameters

    def gradient_arrived(self, unit: Unit, number: int = 1) -> None:
        """A gradient was added to, or a `number` of them. If it was the last of its unit, the unit is reduced."""
        if self.is_armed:
            unit.num_missing -= number
            self._start_complete()

    def unit_completed(self, unit: Unit) -> None:
        """A unit gets no more gradients in this backward, whether all of its parameters have one or not."""
        if self.is_armed:
            unit.num_missing = 0
            self._start_complete()

    def _start_complete(self) -> None:
        # Always in the order of the list: replicas must issue the same reductions in the same order.
        while self._next < len(self._due) and self._due[self._next].num_missing <= 0:
            self._start_next()

    def _start_next(self) -> None:
        unit = self._due[self._next]
        self._next += 1
        self._reductions.start(unit)

    def reduce(self) -> None:
        """Start what has not been started: units with a parameter that got no gradient.

        In a program with gathers this comes several times a step, each time for the gradients since the last.
        """
        self.is_armed = False
        while self._next < len(self._due):
            self._start_next()

    def wait(self) -> None:
        """Block until all sums are there, but those of late units."""
        self._reductions.finish(self.units)
        self._next = 0

    def reduce_late(self) -> None:
        """Reduce, and wait for, the units whose gradients the caller has just completed."""
        for unit in self._late:
            unit.start_reduce()
        for unit in self._late:
            unit.finish_reduce()

    def update(self, factor: float, rate: float) -> None:
        """Step with the summed gradients times `factor`; the update of one unit hides the gather of the one before."""
        for number, (units, scratch_bytes) in enumerate(self._groups):
            for unit in units:
                unit.begin_update(factor, rate)
            if scratch_bytes:
                scratch = units[0].pool.borrow(scratch_bytes)
                self._make_steps(number, scratch)
                units[0].pool.give_back(scratch)
            for unit in units:
                unit.end_update()
        for unit in self.units:
            unit.finish_gather()

    @abstractmethod
    def _make_steps(self, number: int, scratch: Loan[Any]) -> None:
        """Make steps of the matrices of a group, with other ranks (sharding/unit_update.py)."""

    # Values.

    def gather(self) -> None:
        """Begin to gather all values, and keep them until `release`."""
        for unit in self._all_units():
            unit.holds += 1
            unit.start_gather()

    def finish_gather(self) -> None:
        """Wait for what `gather` began."""
        for unit in self._all_units():
            unit.finish_gather()

    def release(self) -> None:
        """Let the values go that `gather` asked for."""
        for unit in self._all_units():
            unit.holds -= 1
            unit.release()

    def _all_units(self) -> list[Unit]:
        return list(dict.fromkeys(unit for units in self._units_in.values() for unit in units))

    def is_gathered(self, region: str) -> bool:
        """True if some of a region's values are gathered before they are used."""
        return any(unit.sizes.zero == 3 for unit in self._units_in[region])

    def begin_forward(self, region: str) -> None:
        """A region is computed next: have its values, and begin to gather those of the one behind it."""
        index = self._regions.index(region) + 1
        self._enter(region, self._regions[index] if index < len(self._regions) else None)

    def end_forward(self, region: str, has_backward: bool) -> None:
        """A region was computed; `has_backward` if its backward will need the values."""
        # The last region's backward comes next; that of an embedding needs no values, nor would it let them go.
        if not (has_backward and region == self._regions[-1]):
            self._leave(region)

    def begin_backward(self, region: str) -> None:
        """The backward of a region begins: have its values, and begin to gather those of the one before."""
        index = self._regions.index(region)
        # The first region of the model looks tokens up, and its backward needs the tokens and not the table.
        before = self._regions[index - 1] if index > 0 and self._regions[index - 1] != "embedding" else None
        self._enter(region, before)

    def end_backward(self, region: str) -> None:
        """The backward of a region is done."""
        self._leave(region)

    def _enter(self, region: str, following: str | None) -> None:
        units = self._units_in[region]
        for unit in units:
            unit.start_gather()
        for unit in units:
            unit.finish_gather()
        for unit in self._units_in[following] if following is not None else ():
            unit.start_gather()

    def _leave(self, region: str) -> None:
        for unit in self._units_in[region]:
            unit.release()
