"""What a search has to tell: the best plans and their prices, why the best one is best, how the job's own fares."""

from dataclasses import dataclass, replace

from shardwright.cost.calibration import Constants
from shardwright.cost.memory import Memory, peak_memory
from shardwright.cost.money import Money, step_money
from shardwright.planner.constraints import Constraints
from shardwright.planner.price import room_bytes
from shardwright.planner.reasons import Binding, Reason, binding, reasons
from shardwright.planner.rules import Rule, rules_for
from shardwright.planner.search import Tally, search
from shardwright.planner.space import SCHEDULES
from shardwright.simulate.step import StepTime, step_time
from shardwright.spec.job import JobSpec
from shardwright.workload.shape import run_of


@dataclass(frozen=True)
class Priced:
    """A plan with its price: seconds of a step and where they go, bytes of its fullest rank, money."""

    job: JobSpec
    time: StepTime
    memory: Memory
    money: Money
    fits: bool

    @property
    def tokens_per_s_per_device(self) -> float:
        """Throughput."""
        return self.job.tokens_per_step / float(self.time.total) / self.job.plan.world


@dataclass(frozen=True)
class Advice:
    """The best plans, best first; the reasons for the first; what the rules of thumb say of it; and the job's own."""

    plans: list[Priced]
    own: Priced | None
    reasons: list[Reason]
    binding: Binding | None
    rules: list[Rule]
    tally: Tally


def priced(job: JobSpec, constants: Constants) -> Priced:
    """The price of a job's plan. KeyError says what is not known."""
    run = run_of(job)
    time, memory = step_time(run, constants), peak_memory(run, constants)
    money = step_money(job.cluster, float(time.total), job.plan.world)
    return Priced(job, time, memory, money, bool(memory.process <= room_bytes(job)))


def advise(job: JobSpec, constraints: Constraints, constants: Constants, num_shown: int, has_own: bool) -> Advice:
    """Search, and say why. `has_own`: the job's plan is the user's own, to compare with."""
    found = search(job, constraints, constants, num_shown=num_shown)
    plans = [priced(candidate.job, constants) for candidate in found.candidates]
    own = priced(job, constants) if has_own else None
    if not plans:
        return Advice([], own, [], None, [], found.tally)
    best = plans[0].job
    why = reasons(best, _schedules(constraints), constants)
    return Advice(plans, own, why, binding(best, why, constants), rules_for(best), replace(found.tally))


def _schedules(constraints: Constraints) -> tuple[str, ...]:
    return tuple(name for name in SCHEDULES if constraints.allows("schedule", name))
