"""What a search has to tell: the best plans and their prices, why the best one is best, how the job's own fares."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardwright.config.job import JobSpec
from shardwright.cost.calibration import Constants, pessimistic
from shardwright.cost.from_job import run_of
from shardwright.cost.job_memories import fullest
from shardwright.cost.memory import Memory
from shardwright.cost.money import Money, step_money
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.known_strategies import within_known
from shardwright.planner.search.objectives import Objective, best
from shardwright.planner.search.plan_price import fits, room_bytes
from shardwright.planner.search.results import SearchTally, TriedSize
from shardwright.planner.search.space import SCHEDULES
from shardwright.simulate.batch_pricing import Price, prices
from shardwright.simulate.closed_form import StepTime
from shardwright.simulate.full_step import played_steps

if TYPE_CHECKING:  # what explains a plan is imported where one is explained
    from shardwright.planner.advice.reasons import Reason
    from shardwright.planner.advice.recommendation import Recommendation
    from shardwright.planner.advice.repair import Misfit
    from shardwright.planner.advice.rules import RuleOfThumb
    from shardwright.planner.advice.sensitivity import Flip
    from shardwright.planner.search.sample import Standing


@dataclass(frozen=True)
class PricedPlan:
    """A plan with its price: seconds of a step that was simulated in full and where they go, bytes of its fullest
    rank, money. `closed` is what closed forms say of the step, by which plans are searched, and `cautious` the same
    under pessimistic constants."""

    job: JobSpec
    time: StepTime
    closed: StepTime
    cautious: StepTime
    memory: Memory
    money: Money
    fits: bool
    even_s: float | None = None  # what its step takes with layers spread evenly, where `plan.layout` is better
    first_is_faster: float | None = None  # how sure it is that the first plan is faster; None of that one

    @property
    def tokens_per_s_per_device(self) -> float:
        """Throughput."""
        return self.job.tokens_per_step / float(self.time.total) / self.job.plan.world


@dataclass(frozen=True)
class Own:
    """The job's own plan: its price, where it stands in the space, and what keeps it from fitting."""

    priced: PricedPlan
    standing: "Standing"
    misfit: "Misfit | None"


@dataclass(frozen=True)
class Refused:
    """The job's own plan where its cluster, batch or model does not allow it, and why."""

    job: JobSpec
    faults: tuple[str, ...]


@dataclass(frozen=True)
class Advice:
    """The best plans, best first; why the first is best; and the job's own.

    `tried` are the sizes of the cluster among which the objective chose. `flips` is what would make
    the second plan win, `left_out` what was not searched because a number is not known.
    """

    job: JobSpec
    plans: list[PricedPlan]
    tally: SearchTally
    own: Own | None = None
    refused: Refused | None = None
    flips: "list[Flip]" = field(default_factory=list)
    reasons: "list[Reason]" = field(default_factory=list)
    binding: str = ""
    rules: "list[RuleOfThumb]" = field(default_factory=list)
    recommendation: "Recommendation | None" = None  # the plan to take, where there is one
    left_out: list[str] = field(default_factory=list)
    tried: tuple[TriedSize, ...] = ()
    objective: Objective = field(default_factory=Objective)


def priced(
    jobs: Sequence[JobSpec], constants: Constants, times: Sequence[StepTime] | None = None
) -> list[PricedPlan]:  # fmt: skip
    """The prices of jobs' plans, each step played in its own order of work, unless `times` has what that says.

    KeyError says what is not known.
    """
    runs = [run_of(job) for job in jobs]
    closed, cautious = _known(prices(runs, constants)), _known(prices(runs, pessimistic()))
    if times is None:
        times = played_steps(jobs, [price.time for price in closed], constants)
    found = []
    for job, time, price, worst in zip(jobs, times, closed, cautious, strict=True):
        money, memory = step_money(job.cluster, float(time.total), job.plan.world), fullest(job, constants)
        fitting = bool(fits(job, memory, room_bytes(job)))
        found.append(PricedPlan(job, time, price.time, worst.time, memory=memory, money=money, fits=fitting))
    return found


def _known(found: Sequence[Price | str]) -> list[Price]:
    """Prices that all plans have; KeyError says what is not known."""
    known = [price for price in found if isinstance(price, Price)]
    if len(known) < len(found):
        raise KeyError(next(price for price in found if isinstance(price, str)))
    return known


def best_plans(
    job: JobSpec, constraints: Constraints, constants: Constants, objective: Objective, num_shown: int
) -> Advice:
    """Search, and price what is found; `explained` says why.

    The search has simulated their steps in full, with uneven stages where these are faster.
    """
    on, found = best(job, constraints, constants, objective, num_shown=num_shown)
    jobs, times = [plan.job for plan in found.candidates], [plan.time for plan in found.candidates]
    plans = [
        replace(plan, even_s=played.even_s)
        for plan, played in zip(priced(jobs, constants, times), found.candidates, strict=True)
    ]
    plans.sort(key=_token_s)
    return Advice(
        on, plans, found.tally, left_out=within_known(job, constraints)[1], tried=found.tried, objective=objective
    )


def explained(
    advice: Advice, given: JobSpec | None, constraints: Constraints, constants: Constants,
    own_faults: Sequence[str] = (),
) -> Advice:  # fmt: skip
    """The advice with its reasons; `given` is the job if its plan is the user's own, to compare with, or to say what is
    wrong with it."""
    plans = advice.plans
    if given is not None and own_faults:
        advice = replace(advice, refused=Refused(given, tuple(own_faults)))
    elif given is not None:
        advice = replace(advice, own=_own(given, constraints, constants))
    if not plans:
        return advice
    from shardwright.planner.advice.reasons import binding, reasons
    from shardwright.planner.advice.rules import rules_for
    from shardwright.planner.advice.sensitivity import flips

    first = plans[0].job
    why = advice.reasons or reasons(first, searched_schedules(constraints), constants)
    runner_up = flips(first, plans[1].job, constants) if len(plans) > 1 else []
    binds = binding(plans[0].time, plans[0].memory, first, why)
    return replace(advice, flips=runner_up, reasons=why, binding=binds, rules=rules_for(first))


def _own(job: JobSpec, constraints: Constraints, constants: Constants) -> Own:
    """Its standing among plans that are drawn is by closed forms."""
    from shardwright.planner.advice.repair import misfit
    from shardwright.planner.search.sample import standing

    (alone,) = priced([job], constants)
    token_s = float(alone.closed.total) / job.tokens_per_step
    stands = standing(job, token_s, constraints, constants)
    return Own(alone, stands, misfit(job, searched_schedules(constraints), constants))


def _token_s(plan: PricedPlan) -> float:
    return float(plan.time.total) / plan.job.tokens_per_step


def searched_schedules(constraints: Constraints) -> tuple[str, ...]:
    """The schedules that a search may choose among."""
    return tuple(name for name in SCHEDULES if constraints.allows("schedule", name))
