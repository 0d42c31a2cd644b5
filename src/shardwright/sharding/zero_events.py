"""When ZeRO gathers, releases, reduces and updates: a state machine of events, without tensors.

Replicas share their state (Rajbhandari et al. 2020, arXiv 1910.02054, section 5). A unit is the parameters that are
gathered, reduced and updated together. The stages of ZeRO differ in the state that a rank holds whole, and the state of
which it holds only its shard:

    stage   values           gradients                         optimizer state
    0       whole            whole                             whole
    1       whole            whole, its shard is reduced       shard
    2       whole            shard; whole while they arrive    shard
    3       shard; whole while they are used, by layer         shard

`UnitEvents` knows which buffers of one unit exist, and `StageEvents` when the units of a stage move. Subclasses define
the effect of an event: the engine plays it on tensors (parallel/zero/), the account on sizes (memory/zero_replay.py).
So the same lines give the collectives of a step and the peak of borrowed memory before a run and during it.

Gradients are reduced while the backward still runs (Li et al. 2020, arXiv 2006.15704, section 3.2), unit after unit in
the order in which they become complete. Nothing is reduced while microbatches accumulate.

In stage 3 the values of a unit are gathered before they are used and released afterwards. Without a pipeline this
happens layer by layer, forward and backward, and the next layer's values travel while a layer computes (Zhao et al.
2023, arXiv 2304.11277, section 3.3). In a pipeline the program gathers and releases whole stages. Less than 3 times all
parameters travel (section 7.2 of the paper): the embedding's backward needs no table, and the last region of a stage
stays gathered between a forward and the backward after it.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Generic, TypeVar

from shardwright.config.units import FLOAT32_BYTES
from shardwright.sharding.buffer_pool import BufferPool, Loan
from shardwright.sharding.unit_sizes import UnitSizes

# Reductions that a rank has under way at once. Each holds a buffer, and stages 2 and 3 are meant to save that memory.
MOST_REDUCING = 2


Memory = TypeVar("Memory")


class UnitEvents(ABC, Generic[Memory]):
    """The state of a unit's buffers: present, borrowed or in transit. An event happens only if this state needs it."""

    def __init__(self, sizes: UnitSizes, pool: BufferPool[Memory]) -> None:
        self.sizes = sizes
        self.pool = pool
        self._value_pool = pool  # lends the memory of gathered values
        self.holds = 0  # number of stages that keep the values gathered
        self.num_missing = 0  # parameters whose gradient of the running backward has not arrived
        self._values: Loan[Memory] | None = None  # gathered, or in transit
        self._is_gathering = False
        self._gradients: Loan[Memory] | None = None  # whole gradients, if the rank keeps only a shard of them
        self._reducing: list[Loan[Memory]] | None = None  # memory that the reduction under way has borrowed
        self._has_sum = False  # True if the shard already has a sum of this step
        self._exact: Loan[Memory] | None = None  # float32 gradients of the update under way, if stored in another dtype

    def borrow_values_from(self, pool: BufferPool[Memory]) -> None:
        """Place gathered values in buffers of another pool."""
        self._value_pool = pool

    @property
    def situation(self) -> tuple[object, ...]:
        """All that its next events depend on: from equal situations, equal calls lead to equal events."""
        buffers = (self._values, self._gradients, self._exact)
        lent_bytes = [None if buffer is None else buffer.num_bytes for buffer in buffers]
        reducing_bytes = None if self._reducing is None else tuple(buffer.num_bytes for buffer in self._reducing)
        return self.holds, self.num_missing, self._is_gathering, self._has_sum, *lent_bytes, reducing_bytes

    # The effects of the events.

    @abstractmethod
    def _start_gather(self, values: Loan[Memory] | None) -> None:
        """Begin an all-gather of the values over the shards, into the borrowed memory or into the whole buffer."""

    @abstractmethod
    def _finish_gather(self) -> None:
        """Wait until the values have arrived."""

    @abstractmethod
    def _drop_values(self) -> None:
        """Free the gathered values: nothing may read them any more."""

    @abstractmethod
    def _open_gradients(self, gradients: Loan[Memory]) -> None:
        """Accumulate whole gradients in this memory, which holds none yet."""

    @abstractmethod
    def _start_reduce(self, cast: Loan[Memory] | None, aside: Loan[Memory] | None) -> None:
        """Begin to sum the gradients over the replicas: from `cast` if they travel in another dtype, and into `aside`
        if the sum is to be rounded, or added to an earlier sum."""

    @abstractmethod
    def _finish_reduce(self, has_sum: bool) -> None:
        """Wait for the sum, and store it in its place, or add it to the sum there if `has_sum`."""

    @abstractmethod
    def _drop_gradients(self) -> None:
        """Free the whole gradients."""

    @abstractmethod
    def _begin_update(self, gradients: Loan[Memory] | None, factor: float, rate: float) -> None:
        """Do the first part of the update of each element, with the summed gradients times `factor`; in float32 in
        `gradients` if they are stored in another dtype, and the updated weights in float32."""

    @abstractmethod
    def _end_update(self) -> None:
        """End the update, after ranks have made steps of whole matrices if any (sharding/unit_update.py)."""

    # The times of the events.

    def start_gather(self) -> None:
        """Begin to gather the values, if they are sharded and neither present nor in transit."""
        if self.sizes.zero == 3 and self._values is None:
            self._values = self._value_pool.borrow(self.sizes.size * self.sizes.compute_bytes)
            self._is_gathering = True
            self._start_gather(self._values)

    def finish_gather(self) -> None:
        """Wait until the values have arrived."""
        if self._is_gathering:
            self._is_gathering = False
            self._finish_gather()

    def release(self) -> None:
        """Free gathered values, unless a stage holds them."""
        if self._values is not None and not self.holds:
            self.finish_gather()
            self._drop_values()
            self._value_pool.give_back(self._values)
            self._values = None

    def open(self) -> None:
        """Provide memory for gradients that no reduction is using."""
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
        """Wait until the reduction under way is complete."""
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

    def clear_gradients(self) -> None:
        """Begin a step: there are no gradients yet."""
        self._has_sum = False

    def begin_update(self, factor: float, rate: float) -> None:
        """Begin to step with the summed gradients times `factor`."""
        sizes = self.sizes
        is_cast = sizes.gradient_bytes < FLOAT32_BYTES == sizes.master_bytes
        self._exact = self.pool.borrow(sizes.shard_size * FLOAT32_BYTES) if is_cast else None
        self._begin_update(self._exact, factor, rate)

    def end_update(self) -> None:
        """End the step, and begin to gather the values that the other replicas updated."""
        self._end_update()
        if self._exact is not None:
            self.pool.give_back(self._exact)
            self._exact = None
        if self.sizes.zero in (1, 2):
            self._is_gathering = True
            self._start_gather(None)


class Reductions:
    """The reductions that a rank has under way, of all its stages, oldest first: each holds memory until its end."""

    def __init__(self) -> None:
        self._under_way: deque[UnitEvents[Any]] = deque()

    def start(self, unit: UnitEvents[Any]) -> None:
        """Begin to sum a unit's gradients, once few enough other reductions are under way."""
        while len(self._under_way) >= MOST_REDUCING:
            self._under_way.popleft().finish_reduce()
        unit.start_reduce()
        self._under_way.append(unit)

    def finish(self, units: Collection[UnitEvents[Any]]) -> None:
        """Wait until no reduction of these units is under way, nor any that began before one of them."""
        while any(unit in units for unit in self._under_way):
            self._under_way.popleft().finish_reduce()


Unit = TypeVar("Unit", bound=UnitEvents)  # type: ignore[type-arg]


class StageEvents(ABC, Generic[Unit]):
    """The times at which the units of one stage move.

    The order of calls in a step: `zero`; the backwards, with `arm` before and `reduce` after each backward whose
    gradients are then to be reduced; `wait`; `reduce_late`; `update`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        late: Collection[Unit],
        units_in: Mapping[str, Sequence[Unit]],
        is_shared: bool,
        reductions: Reductions,
        groups: Sequence[tuple[Sequence[int], int]],
    ) -> None:
        """`units_in` maps each region to the units whose values it needs, in the order in which regions are computed.

        The gradients of `late` units are complete only when another stage's are. `is_shared` is True if any other rank
        sums gradients with this one; `reductions` are this rank's reductions under way. `groups` are the numbers of
        units that are updated together, with the bytes of memory that the update needs.
        """
        self.units, trained = list(units), [unit for unit in units if not unit.sizes.is_frozen]
        self._groups = [([self.units[number] for number in numbers], size) for numbers, size in groups]
        self._late = [unit for unit in trained if unit in late]
        self._prompt = [unit for unit in reversed(trained) if unit not in late]
        self._due = self._prompt  # units of the next reduction
        self._next = 0  # index of the first due unit that has not been started
        self._reductions = reductions
        self._units_in = {region: list(region_units) for region, region_units in units_in.items()}
        self._regions = list(units_in)
        self._is_shared = is_shared
        self.is_armed = False

    def also_uses(self, region: str, unit: Unit) -> None:
        """Add a unit whose values a region needs, which may be another stage's."""
        self._units_in[region].append(unit)

    # Gradients.

    def clear_gradients(self) -> None:
        """Begin a step."""
        for unit in self.units:
            unit.clear_gradients()

    def arm(self, is_last: bool, is_split: bool) -> None:
        """Reduce each unit as soon as its gradients are complete: the next backward is the last before a reduction. If
        the backward `is_split`, its W is.

        Units that hold their gradients whole wait for the last reduction of the step.
        """
        self._due = [unit for unit in self._prompt if is_last or unit.sizes.zero >= 2]
        self.is_armed = self._is_shared
        self._next = 0
        for unit in self.units:
            unit.num_missing = unit.sizes.num_put_off if is_split else unit.sizes.num_parameters

    def gradient_arrived(self, unit: Unit, number: int = 1) -> None:
        """Count a `number` of gradients that have arrived. Reduce the unit if they were its last."""
        if self.is_armed:
            unit.num_missing -= number
            self._start_complete()

    def unit_completed(self, unit: Unit) -> None:
        """Mark a unit as complete: it gets no more gradients in this backward, even if some parameters have none."""
        if self.is_armed:
            unit.num_missing = 0
            self._start_complete()

    def _start_complete(self) -> None:
        # Units start in the order of the list: replicas must issue the same reductions in the same order.
        while self._next < len(self._due) and self._due[self._next].num_missing <= 0:
            self._start_next()

    def _start_next(self) -> None:
        unit = self._due[self._next]
        self._next += 1
        self._reductions.start(unit)

    def reduce(self) -> None:
        """Start the reductions that have not been started: of units with a parameter that got no gradient.

        A program with gathers calls this several times a step, each time for the gradients since the last call.
        """
        self.is_armed = False
        while self._next < len(self._due):
            self._start_next()

    def wait(self) -> None:
        """Block until all sums are complete, except those of late units."""
        self._reductions.finish(self.units)
        self._next = 0

    def reduce_late(self) -> None:
        """Reduce, and wait for, the units whose gradients the caller has just completed."""
        for unit in self._late:
            unit.start_reduce()
        for unit in self._late:
            unit.finish_reduce()

    def update(self, factor: float, rate: float) -> None:
        """Step with the summed gradients times `factor`; a unit's update hides the gather of the previous unit."""
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
        """Wait for the gathers that `gather` began."""
        for unit in self._all_units():
            unit.finish_gather()

    def release(self) -> None:
        """Free the values that `gather` gathered."""
        for unit in self._all_units():
            unit.holds -= 1
            unit.release()

    def _all_units(self) -> list[Unit]:
        return list(dict.fromkeys(unit for units in self._units_in.values() for unit in units))

    def is_gathered(self, region: str) -> bool:
        """True if some of a region's values are gathered before they are used."""
        return any(unit.sizes.zero == 3 for unit in self._units_in[region])

    def begin_forward(self, region: str) -> None:
        """Gather the values of the region that is computed next, and begin to gather those of the following region."""
        index = self._regions.index(region) + 1
        self._enter(region, self._regions[index] if index < len(self._regions) else None)

    def end_forward(self, region: str, has_backward: bool) -> None:
        """Release the values of a region that was computed; `has_backward` if its backward will need them."""
        # The last region's backward comes next. An embedding's backward needs no values, and would not release them.
        if not (has_backward and region == self._regions[-1]):
            self._leave(region)

    def begin_backward(self, region: str) -> None:
        """Gather the values of a region before its backward, and begin to gather those of the previous region."""
        index = self._regions.index(region)
        # The first region of the model looks up tokens, and its backward needs the tokens but not the table.
        previous = self._regions[index - 1] if index > 0 and self._regions[index - 1] != "embedding" else None
        self._enter(region, previous)

    def end_backward(self, region: str) -> None:
        """Release the values of a region after its backward."""
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
