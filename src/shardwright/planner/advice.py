"""What a search has to tell: the best plans and their prices, why the best one is best, how the job's own fares."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardwright.cost.calibration import Constants, pessimistic
from shardwright.cost.memory import Memory
from shardwright.cost.money import Money, step_money
from shardwright.planner.constraints import Constraints
from shardwright.planner.found import Tally
from shardwright.planner.objectives import Objective, best
from shardwright.planner.price import room_bytes
from shardwright.planner.space import SCHEDULES
from shardwright.simulate.prices import Price, prices
from shardwright.simulate.step import StepTime
from shardwright.spec.job import JobSpec
from shardwright.workload.run import run_of

if TYPE_CHECKING:  # what explains a plan is imported where one is explained
    from shardwright.planner.flips import Flip
    from shardwright.planner.misfit import Misfit
    from shardwright.planner.reasons import Binding, Reason
    from shardwright.planner.rules import Rule
    from shardwright.planner.sample import Standing


@dataclass(frozen=True)
class Priced:
    """A plan with its price: seconds of a step and where they go, the same under pessimistic constants, bytes of its
    fullest rank, money. `simulated`: by its own program, not by closed forms."""

    job: JobSpec
    time: StepTime
    cautious: StepTime
    memory: Memory
    money: Money
    fits: bool
    simulated: bool = False

    @property
    def tokens_per_s_per_device(self) -> float:
        """Throughput."""
        return self.job.tokens_per_step / float(self.time.total) / self.job.plan.world


@dataclass(frozen=True)
class Own:
    """The job's own plan: its price, where it stands in the space, and what keeps it from fitting."""

    priced: Priced
    standing: "Standing"
    misfit: "Misfit | None"


@dataclass(frozen=True)
class Advice:
    """The best plans, best first; why the first is best; and the job's own.

    `flips` is what would make the second plan win.
    """

    job: JobSpec
    plans: list[Priced]
    tally: Tally
    own: Own | None = None
    flips: "list[Flip]" = field(default_factory=list)
    reasons: "list[Reason]" = field(default_factory=list)
    binding: "Binding | None" = None
    rules: "list[Rule]" = field(default_factory=list)


def priced(jobs: Sequence[JobSpec], constants: Constants) -> list[Priced]:
    """The prices of jobs' plans. KeyError says what is not known."""
    runs = [run_of(job) for job in jobs]
    found = []
    for job, price, cautious in zip(jobs, prices(runs, constants), prices(runs, pessimistic()), strict=True):
        if not isinstance(price, Price) or not isinstance(cautious, Price):
            raise KeyError(price if isinstance(price, str) else cautious)
        money = step_money(job.cluster, float(price.time.total), job.plan.world)
        fits = bool(price.memory.process <= room_bytes(job))
        found.append(Priced(job, price.time, cautious.time, price.memory, money, fits))
    return found


def best_plans(
    job: JobSpec, constraints: Constraints, constants: Constants, objective: Objective, num_shown: int,
    num_simulated: int = 0,
) -> Advice:  # fmt: skip
    """Search, and price what is found; `explained` says why.

    The first `num_simulated` plans are simulated in full, by their own programs, and ordered anew.
    """
    on, found = best(job, constraints, constants, objective, num_shown)
    plans = priced([candidate.job for candidate in found.candidates], constants)
    played = [_played(plan, constants) for plan in plans[:num_simulated]]
    played.sort(key=lambda plan: float(plan.time.total) / plan.job.tokens_per_step)
    return Advice(on, played + plans[num_simulated:], found.tally)


def explained(advice: Advice, given: JobSpec | None, constraints: Constraints, constants: Constants) -> Advice:
    """The same with what it has to say; `given` is the job if its plan is the user's own, to compare with."""
    plans = advice.plans
    advice = replace(advice, own=None if given is None else _own(given, constraints, constants))
    if not plans:
        return advice
    from shardwright.planner.flips import flips
    from shardwright.planner.reasons import binding, reasons
    from shardwright.planner.rules import rules_for

    first = plans[0].job
    why = reasons(first, _schedules(constraints), constants)
    runner_up = flips(first, plans[1].job, constants) if len(plans) > 1 else []
    binds = binding(plans[0].time, plans[0].memory, first, why)
    return replace(advice, flips=runner_up, reasons=why, binding=binds, rules=rules_for(first))


def _played(plan: Priced, constants: Constants) -> Priced:
    """The plan with the time of its own program, simulated."""
    from shardwright.simulate.played import played_step

    time = played_step(plan.job, constants)
    money = step_money(plan.job.cluster, float(time.total), plan.job.plan.world)
    return replace(plan, time=time, money=money, simulated=True)


def _own(job: JobSpec, constraints: Constraints, constants: Constants) -> Own:
    from shardwright.planner.misfit import misfit
    from shardwright.planner.sample import standing

    alone = priced([job], constants)[0]
    token_s = float(alone.time.total) / job.tokens_per_step
    return Own(
        alone, standing(job, token_s, constraints, constants), misfit(job, _schedules(constraints), constants)
    )  # fmt: skip


def _schedules(constraints: Constraints) -> tuple[str, ...]:
    return tuple(name for name in SCHEDULES if constraints.allows("schedule", name))
