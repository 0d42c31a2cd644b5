"""Which plan to take: of those that can't be told apart from the fastest, the simplest.

A prediction that one plan is 3 % faster than another is right some three times in four, and a plan with fewer axes, a
plain schedule and nothing in host memory is easier to set up, to watch and to mend. So plans are equal unless the
fastest one is faster with a confidence of at least TOLD_APART, and of equal plans the simplest is recommended.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardwright.config.job import JobSpec
from shardwright.cost.calibration import Constants
from shardwright.cost.from_job import run_of
from shardwright.planner.advice.advice import Advice, PricedPlan, best_plans, priced, searched_schedules
from shardwright.planner.advice.confidence import DIFFERENCES, RatioSpread, differing, fitted_spread
from shardwright.planner.advice.simplicity import Simplicity, simplicity
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.known_strategies import within_known
from shardwright.planner.search.objectives import Objective, check_in_time
from shardwright.planner.search.plan_price import fits, room_bytes
from shardwright.planner.search.results import Candidate, TriedSize
from shardwright.planner.search.simpler_plans import simpler_plans

# The confidence from which two plans are told apart. Of the pairs of published runs that are, 19 of 20 are told right
# (docs/planner.md); with 90 % plans that take a seventh longer would count as equal.
TOLD_APART = 0.8
# Kinds of plans that are looked at, at least: how many are shown decides nothing.
CONSIDERED = 10
_MOST_MOVES = 8  # from the first plan to a faster one beside it
_TRIES = 4  # plans beside those that were found that are simulated, at most


@dataclass(frozen=True)
class Recommendation:
    """The plan to take, how sure it is that the fastest one is faster (0.5 if it is that itself), and how simple both
    are."""

    plan: PricedPlan
    confidence: float
    simplicity: Simplicity
    of_fastest: Simplicity

    @property
    def is_fastest(self) -> bool:
        """Whether none was found that is faster."""
        return self.plan.first_is_faster is None


def plans_of(
    job: JobSpec, constraints: Constraints, constants: Constants, objective: Objective | None = None,
    num_shown: int = CONSIDERED,
) -> Advice:  # fmt: skip
    """The best plans of a job, and the one to take: what every command that chooses a plan goes by.

    PlanError if none is in time for a deadline.
    """
    wanted = objective or Objective()
    advice = best_plans(job, constraints, constants, wanted, num_shown=max(num_shown, CONSIDERED))
    if wanted.name == "memory":
        advice = recommended(advice, constraints, constants, num_shown=num_shown, is_roomy=True)
    else:
        advice = settled(advice, constraints, constants, num_shown=num_shown)
    if not advice.plans:
        return advice
    chosen = TriedSize(advice.job.cluster.num_devices, _token_s(advice.plans[0]))
    check_in_time(advice.job, wanted, chosen.token_s)
    tried = tuple(chosen if size.num_devices == chosen.num_devices else size for size in advice.tried)
    return replace(advice, tried=tried)


def settled(advice: Advice, constraints: Constraints, constants: Constants, *, num_shown: int) -> Advice:
    """The advice as `recommended` says, with the reasons of its first plan: one that no plan beside it is faster than.

    The search simulates only those beside a plan of which closed forms say that they may be faster, and they can be
    wrong. Where the reasons show a faster plan that fits, that one takes its place.
    """
    from shardwright.planner.advice.reasons import faster_beside, reasons  # imported where plans are explained

    searched, _ = within_known(advice.job, constraints)
    told = recommended(advice, constraints, constants, num_shown=num_shown)
    for _ in range(_MOST_MOVES):
        if not told.plans:
            break
        why = reasons(told.plans[0].job, searched_schedules(constraints), constants)
        faster = faster_beside(why, searched)
        if faster is None:
            return replace(told, reasons=why)
        advice = replace(advice, plans=_with(advice.plans, priced([faster], constants)[0]))
        told = recommended(advice, constraints, constants, num_shown=num_shown)
    return told


def _with(plans: Sequence[PricedPlan], plan: PricedPlan) -> list[PricedPlan]:
    """Plans of different kinds, fastest first, with one more that takes the place of that of its kind."""
    return sorted([plan, *(other for other in plans if _kind(other) != _kind(plan))], key=_token_s)


def recommended(
    advice: Advice, constraints: Constraints, constants: Constants, *, num_shown: int, is_roomy: bool = False
) -> Advice:
    """The advice with the first of its plans, how sure it is of their order, and the plan to take.

    That one may be a plan beside those that were found. If it is faster than the found one of its kind, it takes its
    place. With `is_roomy` it needs no more memory than those that are shown.
    """
    if not advice.plans:
        return advice
    spread = fitted_spread()
    fastest = advice.plans[0]
    room = max(float(plan.memory.process) for plan in advice.plans[:num_shown]) if is_roomy else room_bytes(advice.job)
    chosen = _chosen(advice, constraints, constants, spread, room)
    kept = [
        chosen if _kind(plan) == _kind(chosen) and _token_s(chosen) < _token_s(plan) else plan for plan in advice.plans
    ]
    kept.sort(key=_token_s)
    fastest = kept[0]
    plans = [fastest, *(replace(plan, first_is_faster=_sure(fastest, plan, spread)) for plan in kept[1:])]
    taken = next((plan for plan in plans if plan.job is chosen.job), None)
    if taken is None:
        taken = replace(chosen, first_is_faster=_sure(fastest, chosen, spread))
    confidence = 0.5 if taken.first_is_faster is None else taken.first_is_faster
    found = Recommendation(taken, confidence, simplicity(taken.job), simplicity(fastest.job))
    return replace(advice, plans=plans[:num_shown], recommendation=found)


def _chosen(
    advice: Advice, constraints: Constraints, constants: Constants, spread: RatioSpread, room: float
) -> PricedPlan:
    """The simplest plan of those that were found, and of those beside them, that can't be told apart from the first."""
    first, *others = advice.plans
    roomy = [plan for plan in others if fits(plan.job, plan.memory, room)]
    alike = [first, *(plan for plan in roomy if _sure(first, plan, spread) < TOLD_APART)]
    slower = spread.ratio(TOLD_APART, DIFFERENCES)
    beside = simpler_plans(
        advice.job, constraints, [plan.job for plan in advice.plans], constants, room=room,
        most_token_s=slower * _closed_token_s(first),
    )  # fmt: skip
    tries = _TRIES
    for one in in_order([*alike, *beside]):
        if isinstance(one, PricedPlan):
            return one
        kinds = kinds_between(first.job, one.job)
        if tries == 0 or spread.confidence(math.log(one.token_s / _closed_token_s(first)), kinds) >= TOLD_APART:
            continue
        (plan,) = priced([one.job], constants)
        tries -= 1
        if fits(plan.job, plan.memory, room) and _sure(first, plan, spread) < TOLD_APART:
            return plan
    raise AssertionError("the first plan is among those that can't be told apart from it")


def in_order(plans: Sequence[PricedPlan | Candidate]) -> Iterator[PricedPlan | Candidate]:
    """Plans, the simplest first, and of equally simple ones the fastest by closed forms."""
    keys = [_key(plan) for plan in plans]
    return (plans[place] for place in sorted(range(len(plans)), key=keys.__getitem__))


def _key(plan: PricedPlan | Candidate) -> tuple[Simplicity, float, str]:
    """Total: plans of the same key are the same plan."""
    token_s = plan.token_s if isinstance(plan, Candidate) else _closed_token_s(plan)
    return simplicity(plan.job), token_s, plan.job.plan.model_dump_json()


def _kind(plan: PricedPlan) -> tuple[int, ...]:
    of = plan.job.plan
    return of.tp, of.pp, of.cp, of.ep


def _token_s(plan: PricedPlan) -> float:
    return float(plan.time.total) / plan.job.tokens_per_step


def _closed_token_s(plan: PricedPlan) -> float:
    return float(plan.closed.total) / plan.job.tokens_per_step


def _sure(first: PricedPlan, second: PricedPlan, spread: RatioSpread) -> float:
    """How sure it is that the first plan is faster."""
    return spread.confidence(math.log(_token_s(second) / _token_s(first)), kinds_between(first.job, second.job))


def kinds_between(first: JobSpec, second: JobSpec) -> frozenset[str]:
    """What differs between two plans."""
    return differing(run_of(first).cut, run_of(second).cut)
