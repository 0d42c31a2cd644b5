"""Adjacent plans that are worth a simulation, though closed forms do not predict that they are faster.

Closed forms count messages and gradient reductions as exposed that a plan hides, and the bubble of some schedules as
longer than it is, by up to two fifths of a step. So an adjacent plan is assumed to need as little of these parts as the
simulated plan. Schedules take turns, because the error is alike within one schedule.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwright.config.job import JobSpec
from shardwright.layers.arrays import Array
from shardwright.simulate.closed_form import StepTime


@dataclass(frozen=True)
class Effort:
    """The effort of a search among the plans adjacent to one."""

    most: int  # plans that are simulated, at most
    num_actions: int  # of all simulated plans together, at most; two plans at least
    bubble_share: float  # of a plan's bubble by closed forms that may turn out not to exist
    data_share: float = 1.0  # of the exchange between replicas that is surely exposed
    alike: float = 0.0  # share by which a plan of the same schedule may beat its closed form relative to this plan's
    room: float = 1.02  # share of a device that a plan may need by closed forms: its account may be lower
    equal_layouts: bool = False  # layouts whose slowest rank is equally slow are simulated too

    def most_like(self, job: JobSpec) -> int:
        """The most plans to simulate whose steps are as long as the job's."""
        return min(self.most, max(2, self.num_actions // (job.plan.num_stages * job.num_microbatches)))


# For each kind that is shown; for the first kinds and all with short steps; for kinds with uneven stages.
QUICK = Effort(most=5, num_actions=2**12, bubble_share=0.0)
THOROUGH = Effort(most=64, num_actions=2**13, bubble_share=0.4, data_share=0.3, alike=0.02, equal_layouts=True)
UNEVEN = Effort(most=3, num_actions=2**12, bubble_share=0.0, room=1.2)


class Promising(NamedTuple):
    """A plan that may be faster than plan number `near`, to which it is adjacent: the seconds a token that it may take
    at best, and those by closed forms."""

    near: int
    optimistic_s: float
    closed_s: float
    job: JobSpec


@dataclass(frozen=True)
class SimulatedBase:
    """Simulated plans whose adjacent plans are searched, in arrays of seconds a token.

    `token_s` is the simulated step, `closed_s` its closed form, and of that `messages_s` the messages and `data_s` the
    exchange between replicas. `even_s` is the closed form with even stages of a plan whose stages are uneven, else 0.
    """

    token_s: Array
    closed_s: Array
    messages_s: Array
    data_s: Array
    even_s: Array

    @classmethod
    def of(
        cls,
        times: Sequence[StepTime],
        jobs: Sequence[JobSpec],
        token_s: Sequence[float],
        *,
        closed_s: Sequence[float],
        even_s: Sequence[float],
    ) -> "SimulatedBase":
        """The base made of some jobs and their simulated steps."""
        tokens = np.array([job.tokens_per_step for job in jobs])
        messages_s, data_s = (np.array([float(getattr(time, part)) for time in times]) for part in ("messages", "data"))
        return cls(np.array(token_s), np.array(closed_s), messages_s / tokens, data_s / tokens, even_s=np.array(even_s))

    def select(self, numbers: Array) -> "SimulatedBase":
        """The plans with these numbers, in their order."""
        fields = {name: values[numbers] for name, values in vars(self).items()}
        return SimulatedBase(**fields)

    def optimistic_s(self, closed_s: Array, time: StepTime, tokens: Array, is_alike: Array, effort: Effort) -> Array:
        """Return the least seconds a token that plans adjacent to these may take, whose closed form is `closed_s`.

        That is the closed form less the messages and exchanges that the simulated plan hides, and less a share of the
        bubble. A plan adjacent to one with uneven stages may gain the share that it gains with even stages. A plan
        with the same order of work (`is_alike`) may beat its closed form as far as the simulated plan does, and a
        little further.
        """
        hidden_s = np.maximum(0.0, time.messages / tokens - self.messages_s)
        data_s = time.data / tokens
        hidden_s = hidden_s + np.maximum(0.0, data_s - np.minimum(self.data_s, effort.data_share * data_s))
        optimistic_s = closed_s - hidden_s - effort.bubble_share * time.bubble / tokens
        closed_even_s, is_uneven = time.total / tokens, self.even_s > 0
        share = np.divide(closed_even_s, self.even_s, out=np.full(closed_even_s.shape, np.inf), where=is_uneven)
        optimistic_s = np.minimum(optimistic_s, self.token_s * share)
        like_base_s = closed_s * self.token_s / self.closed_s * (1 - effort.alike)
        return np.where(is_alike & (effort.alike > 0), np.minimum(optimistic_s, like_base_s), optimistic_s)


def in_turns(plans: Sequence[Promising]) -> list[JobSpec]:
    """The most promising plan of each schedule, then the second of each, and so on. Both orders count: the optimistic
    time and the closed form."""
    places = [len(plans)] * len(plans)
    for seconds in ([plan.optimistic_s for plan in plans], [plan.closed_s for plan in plans]):
        num_before: Counter[str] = Counter()
        for number in sorted(range(len(plans)), key=seconds.__getitem__):
            schedule = plans[number].job.plan.schedule
            places[number] = min(places[number], num_before[schedule])
            num_before[schedule] += 1
    order = sorted(range(len(plans)), key=lambda number: (places[number], plans[number].optimistic_s))
    return [plans[number].job for number in order]
