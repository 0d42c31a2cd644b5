"""Which plans beside a simulated one are worth a simulation, though closed forms say that they are no faster.

Closed forms take messages and the sums of gradients for waited for where a plan hides them, and the bubble of some
schedules for longer than it is, by up to two fifths of a step. So of these parts a plan may hope for as little as is in
sight in the one that it is beside. Seats go round by schedule, for there the error is alike.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwright.config.job import JobSpec
from shardwright.simulate.closed_form import StepTime
from shardwright.workload.arrays import Array


@dataclass(frozen=True)
class Look:
    """How closely plans beside one are looked at: `most` of them are simulated, and of long steps fewer, of at most
    `num_actions` together but two. Each may hope to be without `bubble_share` of its bubble and to wait for
    `data_share` of what its replicas exchange, and one with the same schedule to be by a share `alike` faster than
    closed forms say that it is beside the other. It may need so much of the `room` by closed forms: its account may say
    less, and far less under uneven stages. With `equal_layouts` layouts are tried whose slowest rank is as slow."""

    most: int
    num_actions: int
    bubble_share: float
    data_share: float = 1.0
    alike: float = 0.0
    room: float = 1.02
    equal_layouts: bool = False

    def most_like(self, job: JobSpec) -> int:
        """How many plans are simulated whose steps are as long as that of a job."""
        return min(self.most, max(2, self.num_actions // (job.plan.num_stages * job.num_microbatches)))


QUICK = Look(most=5, num_actions=2**12, bubble_share=0.0)
THOROUGH = Look(most=64, num_actions=2**13, bubble_share=0.4, data_share=0.3, alike=0.02, equal_layouts=True)
UNEVEN = Look(most=3, num_actions=2**12, bubble_share=0.0, room=1.2)


class Promising(NamedTuple):
    """A plan that may be faster than the one that it is beside, number `near`: seconds by token that it may hope for,
    and those that closed forms say."""

    near: int
    hoped_s: float
    closed_s: float
    job: JobSpec


@dataclass(frozen=True)
class InSight:
    """Plans that were simulated, in arrays: seconds by token of a step, and of its parts that other plans may hide as
    these do; what closed forms say of all; and of those with uneven stages what these say of even ones, 0 of others."""

    token_s: Array
    closed_s: Array
    messages_s: Array
    data_s: Array
    even_s: Array

    @classmethod
    def of(
        cls, times: Sequence[StepTime], jobs: Sequence[JobSpec], token_s: Sequence[float], *,
        closed_s: Sequence[float], even_s: Sequence[float],
    ) -> "InSight":  # fmt: skip
        """Some jobs by their steps."""
        tokens = np.array([job.tokens_per_step for job in jobs])
        messages_s, data_s = (np.array([float(getattr(of, part)) for of in times]) for part in ("messages", "data"))
        return cls(np.array(token_s), np.array(closed_s), messages_s / tokens, data_s / tokens, even_s=np.array(even_s))

    def taken(self, numbers: Array) -> "InSight":
        """The plans of these numbers."""
        fields = {name: values[numbers] for name, values in vars(self).items()}
        return InSight(**fields)

    def hoped_s(self, closed_s: Array, time: StepTime, tokens: Array, is_alike: Array, look: Look) -> Array:
        """Seconds by token that plans beside these may hope for, of which closed forms say `closed_s` in all. Under the
        uneven stages of one of these, a plan may hope for the share that it gains with even ones; and where its order
        of work `is_alike`, for as much as the other gains over closed forms, and a little more."""
        hidden_s = np.maximum(0.0, time.messages / tokens - self.messages_s)
        data_s = time.data / tokens
        hidden_s = hidden_s + np.maximum(0.0, data_s - np.minimum(self.data_s, look.data_share * data_s))
        hoped_s = closed_s - hidden_s - look.bubble_share * time.bubble / tokens
        closed_even_s, is_uneven = time.total / tokens, self.even_s > 0
        share = np.divide(closed_even_s, self.even_s, out=np.full(closed_even_s.shape, np.inf), where=is_uneven)
        hoped_s = np.minimum(hoped_s, self.token_s * share)
        as_here_s = closed_s * self.token_s / self.closed_s * (1 - look.alike)
        return np.where(is_alike & (look.alike > 0), np.minimum(hoped_s, as_here_s), hoped_s)


def by_turns(plans: Sequence[Promising]) -> list[JobSpec]:
    """The first of each schedule, by what plans may hope for and by closed forms, then the second of each, and on."""
    places = [len(plans)] * len(plans)
    for seconds in ([of.hoped_s for of in plans], [of.closed_s for of in plans]):
        num_before: Counter[str] = Counter()
        for number in sorted(range(len(plans)), key=seconds.__getitem__):
            schedule = plans[number].job.plan.schedule
            places[number] = min(places[number], num_before[schedule])
            num_before[schedule] += 1
    order = sorted(range(len(plans)), key=lambda number: (places[number], plans[number].hoped_s))
    return [plans[number].job for number in order]
