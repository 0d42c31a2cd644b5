"""Steps of plans for a search: by closed forms, for many plans at once, and simulated, each plan once."""

from collections.abc import Iterable

import numpy as np

from shardwright.config.job import JobSpec
from shardwright.cost.calibration import Constants
from shardwright.cost.from_job import run_of
from shardwright.layers.arrays import only, picked
from shardwright.layers.memo import Memo
from shardwright.simulate.batch_pricing import batches
from shardwright.simulate.closed_form import StepTime, step_time_and_spare
from shardwright.simulate.full_step import simulated_steps

_LEAST_RATIO = 0.9  # simulated step to closed form: the search relies on no lower ratio
_FIRST_RATIO = 0.99  # this ratio before any plan was simulated


def plan_key(job: JobSpec) -> str:
    """The fields of a job in which plans of a search differ."""
    return job.model_dump_json(include={"plan", "batch", "precision"})


class StepTimes:
    """Steps of plans of one model and cluster. `least_ratio` is the least ratio so far of a simulated step to its
    closed form; `num_simulated` counts the simulated plans."""

    def __init__(self, constants: Constants, memo: Memo) -> None:
        self.least_ratio = _FIRST_RATIO
        self._constants, self._memo = constants, memo
        self._closed: dict[str, tuple[StepTime, float]] = {}
        self._simulated: dict[str, StepTime] = {}

    @property
    def num_simulated(self) -> int:
        """Plans that were simulated."""
        return len(self._simulated)

    def has_simulated(self, job: JobSpec) -> bool:
        """True if the plan was simulated before."""
        return plan_key(job) in self._simulated

    def price(self, jobs: Iterable[JobSpec]) -> None:
        """Price jobs by closed forms: those that differ only in numbers at once."""
        new_jobs = [(key, job) for job in jobs if (key := plan_key(job)) not in self._closed]
        for run, places in batches([run_of(job) for _, job in new_jobs]):
            time, spare_s = step_time_and_spare(run, self._constants, self._memo)
            spare_of_each = np.broadcast_to(spare_s, len(places)).tolist()
            for entry, place in enumerate(places):
                self._closed[new_jobs[place][0]] = only(picked(time, [entry])), spare_of_each[entry]

    def closed(self, job: JobSpec) -> tuple[StepTime, float]:
        """The step by closed forms, and the most seconds that another layout could save."""
        self.price([job])
        return self._closed[plan_key(job)]

    def closed_token_s(self, job: JobSpec) -> float:
        """Seconds a token by closed forms."""
        return float(self.closed(job)[0].total) / job.tokens_per_step

    def simulated(self, job: JobSpec) -> StepTime:
        """The simulated step."""
        key = plan_key(job)
        if key not in self._simulated:
            closed, _ = self.closed(job)
            (self._simulated[key],) = simulated_steps([job], [closed], self._constants, self._memo)
            ratio = float(self._simulated[key].total / closed.total)
            self.least_ratio = min(self.least_ratio, max(_LEAST_RATIO, ratio))
        return self._simulated[key]
