"""A unit of ZeRO whose events move no tensors, but count their traffic and note the memory that there is."""

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from shardwright.config.job import JobSpec
from shardwright.memory.rank_state import UnitState
from shardwright.schedule.message_sizes import message_bytes
from shardwright.sharding.buffer_pool import BufferPool, Loan
from shardwright.sharding.compression import reduced_bucket, scattered_bucket
from shardwright.sharding.unit_sizes import UnitSizes
from shardwright.sharding.zero_events import UnitEvents


class MovedCounts:
    """The traffic so far, and the most memory at once: borrowed, for collectives, and for messages."""

    def __init__(self, job: JobSpec) -> None:
        self.job = job
        self.pool = BufferPool[None](lambda num_bytes: None)
        self.calls: Counter[tuple[str, str]] = Counter()
        self.moved_bytes: Counter[tuple[str, str]] = Counter()
        self.num_casts: Counter[tuple[int, str, bool]] = Counter()
        self.peak_bytes = 0
        # Gloo's reduce-scatter is an exchange of shares, which needs staging memory (parallel/comm/collectives.py).
        self.is_staged = job.runs_on_cpu
        self.staged_bytes = 0
        self.num_messages = 0
        self._message_bytes = message_bytes(job)

    def move(self, collective: str, axis: str, num_bytes: int) -> None:
        """Count one collective."""
        self.calls[collective, axis] += 1
        self.moved_bytes[collective, axis] += num_bytes

    @property
    def situation(self) -> tuple[object, ...]:
        """All that decides the memory from now on."""
        return self.peak_bytes, self.staged_bytes, self.num_messages, self.pool.situation

    @property
    def moved(self) -> "tuple[Counter[Any], ...]":
        """The counts of the traffic."""
        return self.calls, self.moved_bytes, self.num_casts

    def note(self) -> None:
        """Raise the peak to the memory that there is now, if that is more."""
        messages_bytes = self.num_messages * self._message_bytes
        self.peak_bytes = max(self.peak_bytes, self.pool.held_bytes + self.staged_bytes + messages_bytes)


class SizedUnit(UnitEvents[None]):
    """A unit whose events only count their traffic and note the memory."""

    def __init__(self, state: UnitState, counts: MovedCounts) -> None:
        precision, layout = counts.job.precision, state.layout
        sizes = UnitSizes(
            zero=state.replicas.zero,
            size=layout.size,
            shard_size=layout.shard_size,
            compute_bytes=state.value_bytes(precision.compute_bytes),
            gradient_bytes=precision.gradient_bytes,
            master_bytes=4 if state.is_exact else precision.master_bytes,
            reduce_bytes=precision.reduce_bytes,
            num_parameters=len(state.places),
            num_put_off=sum(place.is_put_off for place in state.places),
            is_frozen=state.is_frozen,
        )
        super().__init__(sizes, counts.pool)
        self._state, self._counts = state, counts
        self._reduced = list(self._moved_by_reduction())
        self._staged_bytes = 0
        self.version = 0  # of its current values

    def _start_gather(self, values: Loan[None] | None) -> None:
        replicas = self._state.replicas
        if replicas.num_ranks > 1:
            self._counts.move("all_gather", replicas.shards_axis, self.sizes.size * self.sizes.compute_bytes)
        self._counts.note()

    def _finish_gather(self) -> None: ...

    def _drop_values(self) -> None:
        self.version += 1

    def _open_gradients(self, gradients: Loan[None]) -> None:
        self._counts.note()

    def _moved_by_reduction(self) -> Iterator[tuple[str, str, int]]:
        """(collective, axis, bytes) of each reduction of the gradients, in their order."""
        plan, replicas, element = self._counts.job.plan, self._state.replicas, self.sizes.reduce_bytes
        for is_partial, parts in groupby(self._state.places, lambda place: bool(place.summed_over)):
            if is_partial:
                yield "all_reduce", "tp", self.sizes.gradient_bytes * sum(place.num_elements for place in parts)
        places = self._state.places
        collectives = (
            scattered_bucket(plan, places, replicas.num_ranks, self.sizes.size, element)
            if replicas.zero
            else reduced_bucket(plan, places, replicas.num_ranks, element)
        )
        for collective in collectives:
            yield collective.kind, replicas.shards_axis, collective.num_bytes

    def _start_reduce(self, cast: Loan[None] | None, aside: Loan[None] | None) -> None:
        for collective in self._reduced:
            self._counts.move(*collective)
        if self._counts.is_staged and any(kind == "reduce_scatter" for kind, _, _ in self._reduced):
            self._staged_bytes = self.sizes.size * self.sizes.reduce_bytes
            self._counts.staged_bytes += self._staged_bytes
        self._counts.note()

    def _finish_reduce(self, has_sum: bool) -> None:
        self._counts.staged_bytes -= self._staged_bytes
        self._staged_bytes, replicas = 0, self._state.replicas
        if replicas.num_copies > 1:
            num_bytes = self.sizes.shard_size * self.sizes.reduce_bytes
            self._counts.move("all_reduce", replicas.copies_axis, num_bytes)

    def _drop_gradients(self) -> None: ...

    def _begin_update(self, gradients: Loan[None] | None, factor: float, rate: float) -> None:
        self.version += 1
        self._counts.note()

    def _end_update(self) -> None: ...
