"""The batch of a step, and how it grows at the beginning of a run.

A ramp begins with fewer sequences and adds `increment` sequences at equal intervals, as Megatron's
--rampup-batch-size does: there are n = (full - start) / increment sizes before the full size, and each is used for
samples / n sequences. These numbers determine the batch of every step, whatever the plan.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from pydantic import Field

from shardwright.config import largest
from shardwright.config.base import SectionSpec, Spec
from shardwright.config.field_types import Sequences
from shardwright.config.phrase import say

SequencesOr0 = Annotated[int, Field(ge=0, le=largest.BATCH)]


class RampSpec(Spec):
    """The growth of the batch."""

    start: SequencesOr0 = Field(0, description="Sequences in the first steps; 0 means that all steps have as many.")
    increment: SequencesOr0 = Field(0, description="By how many sequences the batch grows, again and again.")
    samples: Annotated[int, Field(ge=0, le=largest.SAMPLES)] = Field(
        0, description="Sequences that are trained on while it grows, as many with each size."
    )


class BatchSpec(SectionSpec):
    """The samples of one optimizer step."""

    global_batch_size: Sequences = Field(
        8, description="Sequences in one optimizer step, over all ranks, once it has grown."
    )
    ramp: RampSpec = Field(RampSpec(), description="How it grows at the beginning of a run.")

    @property
    def grows(self) -> bool:
        """True if the first steps have a smaller batch."""
        return self.ramp.start > 0

    def sizes(self) -> list[int]:
        """The sizes that steps may have, ascending."""
        if not self.grows:
            return [self.global_batch_size]
        return [*range(self.ramp.start, self.global_batch_size, self.ramp.increment), self.global_batch_size]

    def with_size(self, size: int) -> "BatchSpec":
        """A batch of constant size `size`; this batch itself if that is its full size."""
        return self if size == self.global_batch_size else BatchSpec(global_batch_size=size)

    @property
    def divisor(self) -> int:
        """The largest number that divides all sizes."""
        return math.gcd(self.ramp.start, self.ramp.increment, self.global_batch_size)

    def size_at(self, step: int) -> int:
        """Number of sequences in step 0, 1, ..."""
        return self._period(step).size

    def samples_before(self, step: int) -> int:
        """Number of sequences in all steps before a step."""
        period = self._period(step)
        return period.first_sample + (step - period.first_step) * period.size

    def next_change(self, step: int) -> int | None:
        """The first step after `step` that has another size; None if there is none."""
        return next((period.first_step for period in _periods(self) if period.first_step > step), None)

    @property
    def num_growing(self) -> int:
        """Number of steps before the first of full size."""
        return _periods(self)[-1].first_step

    def steps_by_size(self, steps: int) -> dict[int, int]:
        """The number of steps of each size, among the first `steps` steps."""
        periods = _periods(self)
        ends = [*(period.first_step for period in periods[1:]), steps]
        return {
            period.size: min(end, steps) - period.first_step
            for period, end in zip(periods, ends, strict=True)
            if period.first_step < steps
        }

    def faults(self) -> list[str]:
        """Faults of the ramp."""
        ramp, full = self.ramp, self.global_batch_size
        if not self.grows:
            return [
                say(
                    "batch.ramp.{field} is {value}, and batch.ramp.start 0 says that the batch does not grow; set "
                    "that too, or leave both out",
                    field=field,
                    value=getattr(ramp, field),
                )
                for field in ("increment", "samples")
                if getattr(ramp, field)
            ]
        if ramp.start >= full:
            return [
                say(
                    "batch.ramp.start {start} is not less than batch.global_batch_size {full}, to which the batch "
                    "grows; use a smaller one, or 0 for none",
                    start=ramp.start,
                    full=full,
                )
            ]
        return self._growth_faults(full - ramp.start)

    def _growth_faults(self, grown: int) -> list[str]:
        """Faults of the increment and the samples of a ramp that grows by `grown` sequences."""
        ramp, full = self.ramp, self.global_batch_size
        if ramp.increment == 0 and ramp.samples == 0:
            return [
                say(
                    "batch.ramp.start {start} says that the batch grows, and nothing says how: set "
                    "batch.ramp.increment, which divides {full} - {start} = {grown}, and batch.ramp.samples, the "
                    "sequences that are trained on meanwhile; or leave all three out",
                    start=ramp.start,
                    full=full,
                    grown=grown,
                )
            ]
        if ramp.increment == 0 or grown % ramp.increment:
            near = next(n for n in range(max(1, min(ramp.increment, grown)), 0, -1) if grown % n == 0)
            return [
                say(
                    "batch.ramp.increment {increment} does not divide what the batch grows by, {full} - {start} = "
                    "{grown}; use {choices}",
                    increment=ramp.increment,
                    full=full,
                    start=ramp.start,
                    grown=grown,
                    choices=near if ramp.increment else grown,
                )
            ]
        number = grown // ramp.increment
        if number > _MOST_SIZES:
            return [
                say(
                    "batch.ramp grows {number:,} times, by {increment} from {start} to {full}, and may at most "
                    "{most:,} times; use a larger batch.ramp.increment",
                    number=number,
                    increment=ramp.increment,
                    start=ramp.start,
                    full=full,
                    most=_MOST_SIZES,
                )
            ]
        if ramp.samples < number:
            return [
                say(
                    "batch.ramp.samples {samples} leaves less than a sequence for each of the {number} sizes before "
                    "the full one; use more, or batch.ramp.start 0",
                    samples=ramp.samples,
                    number=number,
                )
            ]
        return []

    def _period(self, step: int) -> "_Period":
        return next(period for period in reversed(_periods(self)) if period.first_step <= step)


_MOST_SIZES = 4096


@dataclass(frozen=True)
class _Period:
    """Steps of one size: the number of the first step, and the number of its first sequence."""

    first_step: int
    first_sample: int
    size: int


@lru_cache(maxsize=64)
def _periods(batch: BatchSpec) -> tuple[_Period, ...]:
    return tuple(_growth(batch))


def _growth(batch: BatchSpec) -> Iterator[_Period]:
    """The periods of a run, the last with the full size."""
    ramp, full, step, sample, number = batch.ramp, batch.global_batch_size, 0, 0, 0
    times = (full - ramp.start) // ramp.increment if batch.grows else 0
    while number < times:
        size = ramp.start + number * ramp.increment
        yield _Period(step, sample, size)
        # The period ends with the first step that reaches (`number` + 1) / `times` of `ramp.samples`.
        steps = -(-((number + 1) * ramp.samples - sample * times) // (times * size))
        step, sample = step + steps, sample + steps * size
        number = min(times, sample * times // ramp.samples)
    yield _Period(step, sample, full)
