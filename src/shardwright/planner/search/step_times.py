"""Steps of plans for a search: by closed forms, for many plans at once, and simulated, each plan once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from shardwright.config.job import JobSpec
from shardwright.config.kept_results import kept_by_identity
from shardwright.cost.calibration import Constants
from shardwright.cost.from_job import run_of
from shardwright.layers.arrays import entries
from shardwright.layers.memo import Memo
from shardwright.simulate.batch_pricing import batches
from shardwright.simulate.closed_form import StepTime, step_time_and_spare
from shardwright.simulate.full_step import simulated_steps

_LEAST_RATIO = 0.9  # simulated step to closed form: the search relies on no lower ratio
_FIRST_RATIO = 0.99  # this ratio before any plan was simulated


@partial(kept_by_identity, most=4096)  # each step of a search asks for the keys of plans that it has asked for before
def plan_key(job: JobSpec) -> str:
    """The fields of a job in which plans of a search differ."""
    return job.model_dump_json(include={"plan", "batch", "precision"})


@dataclass(frozen=True)
class KnownSteps:
    """Steps of plans by `plan_key`: by closed forms, with the most seconds that another layout could save, and
    simulated; with the least ratio of the latter to the former."""

    closed: Mapping[str, tuple[StepTime, float]]
    simulated: Mapping[str, StepTime]
    least_ratio: float

    def without(self, earlier: "KnownSteps") -> "KnownSteps":
        """The steps that were not known earlier."""
        closed = {key: self.closed[key] for key in self.closed.keys() - earlier.closed.keys()}
        simulated = {key: self.simulated[key] for key in self.simulated.keys() - earlier.simulated.keys()}
        return KnownSteps(closed, simulated, self.least_ratio)


class StepTimes:
    """Steps of plans of one model and cluster. `least_ratio` is the least ratio so far of a simulated step to its
    closed form; `num_simulated` counts the simulated plans. `memo` has what they have in common."""

    def __init__(self, constants: Constants, memo: Memo) -> None:
        self.least_ratio = _FIRST_RATIO
        self._constants, self.memo = constants, memo
        self._closed: dict[str, tuple[StepTime, float]] = {}
        self._simulated: dict[str, StepTime] = {}
        self._expected: dict[str, StepTime] = {}  # simulated ahead; not used yet

    @property
    def num_simulated(self) -> int:
        """Plans that were simulated."""
        return len(self._simulated)

    def has_simulated(self, job: JobSpec) -> bool:
        """True if the plan was simulated before."""
        return plan_key(job) in self._simulated

    def known(self) -> KnownSteps:
        """All steps that are known now."""
        return KnownSteps(dict(self._closed), dict(self._simulated), self.least_ratio)

    def take_over(self, steps: KnownSteps) -> None:
        """Take over steps that a forked copy of this process has computed, as if they were computed here."""
        self._closed |= steps.closed
        self._simulated |= steps.simulated
        self.least_ratio = min(self.least_ratio, steps.least_ratio)

    def expect(self, steps: KnownSteps) -> None:
        """Keep steps that a forked copy of this process has computed ahead: they count once they are asked for."""
        self._closed |= steps.closed
        self._expected |= steps.simulated

    def expected(self, jobs: Iterable[JobSpec]) -> KnownSteps:
        """The steps of jobs that were simulated ahead."""
        keys = [plan_key(job) for job in jobs]
        closed = {key: self._closed[key] for key in keys}
        return KnownSteps(closed, {key: self._expected[key] for key in keys}, self.least_ratio)

    def price(self, jobs: Iterable[JobSpec]) -> None:
        """Price jobs by closed forms: those that differ only in numbers at once."""
        new_jobs = [(key, job) for job in jobs if (key := plan_key(job)) not in self._closed]
        if not new_jobs:
            return
        for run, places in batches([run_of(job) for _, job in new_jobs]):
            time, spare_s = step_time_and_spare(run, self._constants, self.memo)
            steps = zip(entries(time), np.broadcast_to(spare_s, len(places)).tolist(), strict=True)
            self._closed |= zip((new_jobs[place][0] for place in places), steps, strict=True)

    def closed(self, job: JobSpec) -> tuple[StepTime, float]:
        """The step by closed forms, and the most seconds that another layout could save."""
        self.price([job])
        return self._closed[plan_key(job)]

    def closed_token_s(self, job: JobSpec) -> float:
        """Seconds a token by closed forms."""
        return float(self.closed(job)[0].total) / job.tokens_per_step

    def simulate_ahead(self, jobs: Iterable[JobSpec]) -> None:
        """Simulate jobs, those with one order of work at once. They count once they are asked for."""
        new_jobs = {
            key: job for job in jobs if (key := plan_key(job)) not in self._simulated and key not in self._expected
        }
        if not new_jobs:
            return
        self.price(new_jobs.values())
        closed = [self._closed[key][0] for key in new_jobs]
        steps = simulated_steps(list(new_jobs.values()), closed, self._constants, self.memo)
        self._expected |= zip(new_jobs, steps, strict=True)

    def simulate(self, jobs: Iterable[JobSpec]) -> None:
        """Simulate jobs that were not simulated yet."""
        new_jobs = {key: job for job in jobs if (key := plan_key(job)) not in self._simulated}
        if not new_jobs:
            return
        self.price(new_jobs.values())
        self.simulate_ahead(new_jobs.values())
        for key in new_jobs:
            self._simulated[key] = self._expected.pop(key)
            ratio = float(self._simulated[key].total / self._closed[key][0].total)
            self.least_ratio = min(self.least_ratio, max(_LEAST_RATIO, ratio))

    def simulated(self, job: JobSpec) -> StepTime:
        """The simulated step."""
        self.simulate([job])
        return self._simulated[plan_key(job)]
