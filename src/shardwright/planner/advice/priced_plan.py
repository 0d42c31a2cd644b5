"""A plan with its price, as every command shows it that chooses or compares plans."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.config.job import JobSpec
from shardwright.config.schedule_facts import searched
from shardwright.cost.calibration import Constants, pessimistic
from shardwright.cost.from_job import run_of
from shardwright.cost.money import Money, step_money
from shardwright.layers.memo import Memo
from shardwright.memory.job_memories import fullest, job_fit_chance
from shardwright.memory.rank_estimate import Memory
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.plan_price import fits, room_bytes
from shardwright.simulate.batch_pricing import Price, prices
from shardwright.simulate.closed_form import StepTime
from shardwright.simulate.full_step import simulated_steps


@dataclass(frozen=True)
class PricedPlan:
    """A plan with its price: the simulated step and its parts, the memory of its fullest rank, and money.

    `closed` is the step by closed forms, by which plans are searched, and `cautious` is that under pessimistic
    constants. If `plan.layout` is uneven, `even_s` is the step with an even layout. `first_is_faster` is the confidence
    that the first plan of a list is faster than this one; None for the first plan itself.
    """

    job: JobSpec
    time: StepTime
    closed: StepTime
    cautious: StepTime
    memory: Memory
    money: Money
    fits: bool
    even_s: float | None = None
    first_is_faster: float | None = None

    @property
    def token_s(self) -> float:
        """Seconds a token of the simulated step."""
        return float(self.time.total) / self.job.tokens_per_step

    @property
    def closed_token_s(self) -> float:
        """Seconds a token by closed forms."""
        return float(self.closed.total) / self.job.tokens_per_step

    @property
    def tokens_per_s_per_device(self) -> float:
        """Throughput: tokens a second and device."""
        return self.job.tokens_per_step / float(self.time.total) / self.job.plan.world

    @property
    def fit_chance(self) -> float | None:
        """The chance that it fits, as far as predictions of memory were off; None for this runtime."""
        return job_fit_chance(self.job, float(self.memory.process))

    @property
    def kind(self) -> tuple[int, ...]:
        """The degrees in which plans of one kind agree."""
        plan = self.job.plan
        return plan.tp, plan.pp, plan.cp, plan.ep


def priced(jobs: Sequence[JobSpec], constants: Constants, times: Sequence[StepTime] | None = None) -> list[PricedPlan]:
    """The prices of jobs' plans, for one model and cluster. Each step is simulated in its own order of work, unless
    `times` has the steps.

    KeyError names an unknown number that a price needs.
    """
    runs, memo = [run_of(job) for job in jobs], Memo()
    closed, cautious = _known(prices(runs, constants, memo)), _known(prices(runs, pessimistic(), Memo()))
    if times is None:
        times = simulated_steps(jobs, [price.time for price in closed], constants, memo)
    plans = []
    for job, time, price, worst in zip(jobs, times, closed, cautious, strict=True):
        money, memory = step_money(job.cluster, float(time.total), job.plan.world), fullest(job, constants)
        fitting = bool(fits(job, memory, room_bytes(job)))
        plans.append(PricedPlan(job, time, price.time, worst.time, memory=memory, money=money, fits=fitting))
    return plans


def _known(answers: Sequence[Price | str]) -> list[Price]:
    """The prices, if all plans have one; KeyError names an unknown number."""
    priced_plans = [price for price in answers if isinstance(price, Price)]
    if len(priced_plans) < len(answers):
        raise KeyError(next(answer for answer in answers if isinstance(answer, str)))
    return priced_plans


def searched_schedules(constraints: Constraints) -> tuple[str, ...]:
    """The schedules among which a search may choose."""
    return tuple(name for name in searched() if constraints.allows("schedule", name))
