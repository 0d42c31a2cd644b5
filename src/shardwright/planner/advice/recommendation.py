"""The plan to take: the one that is predicted to be the fastest; and beside it the simplest that may be as fast.

A prediction that one plan is 3 % faster than another is right some three times in four, so the fastest is the likelier
winner. A plan with fewer axes, a plain schedule and nothing in host memory is easier to set up, to watch and to mend,
so the simplest of the plans that can't be told apart from the fastest is shown with what it costs. Two plans are told
apart from a confidence of TOLD_APART. Then the advice is explained: why its first plan is best, changes that would
alter that, and the user's own plan.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.cost.calibration import Constants
from shardwright.cost.from_job import run_of
from shardwright.layers.memo import Memo
from shardwright.planner.advice.advice import Advice, OwnPlan, Recommendation, RefusedPlan, SimplerPlan
from shardwright.planner.advice.binding import binding
from shardwright.planner.advice.confidence import DIFFERENCES, RatioSpread, differing, fitted_spread
from shardwright.planner.advice.hosted_look import HostedLook
from shardwright.planner.advice.priced_plan import PricedPlan, priced, searched_schedules
from shardwright.planner.advice.reasons import faster_adjacent, reasons
from shardwright.planner.advice.repair import Limits, misfit
from shardwright.planner.advice.rules import rules_for
from shardwright.planner.advice.simplicity import Simplicity, simplicity
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.forked_copies import shared
from shardwright.planner.search.known_strategies import within_known
from shardwright.planner.search.objectives import EarlierSearches, Objective, best, check_in_time
from shardwright.planner.search.plan_price import fits, plan_room_bytes
from shardwright.planner.search.results import Candidate
from shardwright.planner.search.sample import standing
from shardwright.planner.search.search_progress import Phase, tell
from shardwright.planner.search.simpler_plans import simpler_plans
from shardwright.planner.search.step_times import StepTimes

# The confidence from which two plans are told apart. The order is right for 19 of 20 such pairs of published runs
# (docs/planner.md). With 90 %, plans that take a seventh longer would count as equal.
TOLD_APART = 0.8
# Kinds of plans to compare, at least: the number of plans shown must not change the choice.
CONSIDERED = 10
_AS_LONG = 5e-4  # a share of a step: plans that differ by less take as long, and the simpler one is recommended
_LEAST_GAIN = 0.005  # a share of a step: by less, plans with state in host memory are no faster, "0 %"
_MOST_MOVES = 8  # from the first plan to a faster adjacent one
_TRIES = 4  # simpler plans that are simulated, at most
# Objectives by which plans with state in host memory are compared with others; true if the devices of a plan count.
_PER_DEVICE = {"time": False, "goodput": False, "cost": True, "energy": True}


def plans_of(
    job: JobSpec,
    constraints: Constraints,
    constants: Constants,
    objective: Objective | None = None,
    num_shown: int = CONSIDERED,
) -> Advice:
    """The best plans of a job and the plan to take. Every command chooses by this function.

    PlanError if no plan meets the deadline.
    """
    wanted = objective or Objective()
    on_device = _on_device(job, constraints) if wanted.name in _PER_DEVICE else None
    if on_device is None:
        advice = _plans_of(job, constraints, constants, wanted, num_shown=num_shown, earlier=EarlierSearches())
    else:
        advice = _on_device_or_hosted(job, constraints, on_device, constants, wanted, num_shown=num_shown)
    if not advice.plans:
        return advice
    token_s, devices = advice.plans[0].token_s, advice.job.cluster.num_devices
    check_in_time(advice.job, wanted, token_s)
    tried = tuple(replace(size, token_s=token_s) if size.num_devices == devices else size for size in advice.tried)
    return replace(advice, tried=tried)


def _on_device_or_hosted(
    job: JobSpec,
    constraints: Constraints,
    on_device: Constraints,
    constants: Constants,
    objective: Objective,
    *,
    num_shown: int,
) -> Advice:
    """The best plans without state in host memory, which `on_device` excludes; those with it if they are surely better,
    or if there are no others."""
    earlier = EarlierSearches()

    def hosted_within(most: float) -> Advice:
        limited = replace(earlier, hosted_within=lambda sized: most / _weight(objective, sized))
        return replace(best_plans(job, constraints, constants, objective, num_shown=1, earlier=limited), times=None)

    with HostedLook(hosted_within) as look:

        def begin_look(sized: JobSpec, token_s: float) -> None:
            look.begin(token_s * _weight(objective, sized))

        observed = replace(earlier, on_first=begin_look)
        advice = _plans_of(job, on_device, constants, objective, num_shown=num_shown, earlier=observed)
        if advice.plans:
            first = advice.plans[0]
            advice = surely_hosted(look.result(first.token_s * _weight(objective, first.job)), advice)
    if not advice.plans or _is_hosted(advice.plans[0].job):
        advice = _plans_of(job, constraints, constants, objective, num_shown=num_shown, earlier=earlier)
    return advice


def _plans_of(
    job: JobSpec,
    constraints: Constraints,
    constants: Constants,
    objective: Objective,
    *,
    num_shown: int,
    earlier: EarlierSearches,
) -> Advice:
    """The best plans of a job and the fastest of them, which may keep state in host memory."""
    advice = best_plans(job, constraints, constants, objective, max(num_shown, CONSIDERED), earlier=earlier)
    if objective.name == "memory":
        return recommended(advice, constraints, constants, num_shown=num_shown, is_roomy=True)
    return settled(advice, constraints, constants, num_shown=num_shown)


def _on_device(job: JobSpec, constraints: Constraints) -> Constraints | None:
    """The constraints without plans that keep state in host memory, if there may be such plans and others."""
    searched, _ = within_known(job, constraints)
    nowhere: dict[str, Any] = {"offload_optimizer": 0.0, "offload_parameters": False}
    elsewhere: dict[str, Any] = {"offload_optimizer": 1.0, "offload_parameters": True}
    if not all(searched.allows(*field) for field in nowhere.items()):
        return None
    if not any(searched.allows(*field) for field in elsewhere.items()):
        return None
    return replace(constraints, among={**constraints.among, **{name: (value,) for name, value in nowhere.items()}})


def _weight(objective: Objective, job: JobSpec) -> int:
    """The number of times that an objective counts a second of a job's step: once, or once for each device."""
    return job.cluster.num_devices if _PER_DEVICE[objective.name] else 1


def _is_hosted(job: JobSpec) -> bool:
    """True if the job's plan keeps optimizer state or parameters in host memory."""
    return job.plan.offload_optimizer > 0 or job.plan.offload_parameters


def surely_hosted(hosted: Advice, on_device: Advice) -> Advice:
    """The advice whose first plan keeps state in host memory; that without such plans, if both can't be told apart, or
    if the first has no such plan that is faster."""
    if not (hosted.plans and _is_hosted(hosted.plans[0].job)):
        return on_device
    first, other = hosted.plans[0], on_device.plans[0]
    cost, other_cost = (plan.token_s * _weight(hosted.objective, plan.job) for plan in (first, other))
    if 1 - cost / other_cost < _LEAST_GAIN:
        return on_device
    confidence = fitted_spread().confidence(math.log(other_cost / cost), kinds_between(first.job, other.job))
    if confidence >= TOLD_APART:
        return hosted
    sentence = say(
        "Plans that keep state in host memory are left out: the best of them is predicted to take {share:.0%} less "
        "than the best without, and such predictions are off by more; keep plan.offload_optimizer=1 for plans that do",
        share=1 - cost / other_cost,
    )
    return replace(on_device, left_out=[*on_device.left_out, sentence])


def best_plans(
    job: JobSpec,
    constraints: Constraints,
    constants: Constants,
    objective: Objective,
    num_shown: int,
    *,
    earlier: EarlierSearches | None = None,
) -> Advice:
    """Search plans, after `earlier` searches as in `objectives.best`, and price those that the search returns. Their
    steps were simulated by the search."""
    chosen_job, result = best(job, constraints, constants, objective, num_shown, earlier=earlier)
    plans = priced([plan.job for plan in result.candidates], constants, [plan.time for plan in result.candidates])
    plans = [replace(plan, even_s=simulated.even_s) for plan, simulated in zip(plans, result.candidates, strict=True)]
    plans.sort(key=attrgetter("token_s"))
    left_out = within_known(job, constraints)[1]
    return Advice(
        chosen_job,
        plans,
        result.tally,
        left_out=left_out,
        tried=result.tried,
        objective=objective,
        times=result.times,
    )


def settled(advice: Advice, constraints: Constraints, constants: Constants, *, num_shown: int) -> Advice:
    """The recommended advice, whose first plan no adjacent plan beats.

    The search simulates adjacent plans only if closed forms predict that they may be faster, and closed forms can be
    wrong. A faster adjacent plan that fits takes the first place.
    """
    searched, _ = within_known(advice.job, constraints)
    result = recommended(advice, constraints, constants, num_shown=num_shown)
    for move in range(_MOST_MOVES):
        tell(Phase.COMPARING, move / _MOST_MOVES)
        if not result.plans:
            break
        first = result.plans[0]
        faster = faster_adjacent(
            first.job, first.time, searched_schedules(constraints), searched, constants, times=advice.times
        )
        if faster is None:
            break
        advice = replace(advice, plans=_with(advice.plans, priced([faster], constants)[0]))
        result = recommended(advice, constraints, constants, num_shown=num_shown)
    return result


def _with(plans: Sequence[PricedPlan], plan: PricedPlan) -> list[PricedPlan]:
    """Plans of different kinds, fastest first, in which `plan` replaces the plan of its kind."""
    return sorted([plan, *(kept_plan for kept_plan in plans if kept_plan.kind != plan.kind)], key=attrgetter("token_s"))


def recommended(
    advice: Advice, constraints: Constraints, constants: Constants, *, num_shown: int, is_roomy: bool = False
) -> Advice:
    """The advice with its first plans, the confidence in their order, the plan to take, and a simpler one.

    The simpler plan may be one that the search did not return. If it is faster than the plan of its kind, it replaces
    that; if it takes as long as the fastest, it is the first. With `is_roomy` it needs no more memory than the plans
    that are shown.
    """
    if not advice.plans:
        return advice
    spread = fitted_spread()
    if is_roomy:
        room = max(float(plan.memory.process) for plan in advice.plans[:num_shown])
    else:
        room = plan_room_bytes(advice.job, advice.plans[0].memory)
    chosen = _chosen(advice, constraints, constants, spread, room)
    first, *others = _with_simplest(advice.plans, chosen)
    plans = [first, *(replace(plan, first_is_faster=_confidence(first, plan, spread)) for plan in others)]
    simpler = None
    if first.job is not chosen.job:
        confidence = _confidence(first, chosen, spread)
        plan = next((plan for plan in plans if plan.job is chosen.job), replace(chosen, first_is_faster=confidence))
        simpler = SimplerPlan(plan, confidence, simplicity(plan.job), simplicity(first.job))
    return replace(advice, plans=plans[:num_shown], recommendation=Recommendation(first, simpler))


def accepted(advice: Advice, is_refused: Callable[[JobSpec], bool]) -> Advice:
    """The advice with those of its plans that are not refused; without a plan if each is."""
    plans = [plan for plan in advice.plans if not is_refused(plan.job)]
    if not plans or advice.recommendation is None:
        return replace(advice, plans=[], recommendation=None)
    first, spread = plans[0], fitted_spread()
    others = [replace(plan, first_is_faster=_confidence(first, plan, spread)) for plan in plans[1:]]
    plans = [replace(first, first_is_faster=None), *others]
    simpler, is_same = advice.recommendation.simpler, first is advice.plans[0]
    if simpler is not None and (not is_same or is_refused(simpler.plan.job)):
        simpler = None
    return replace(advice, plans=plans, recommendation=Recommendation(plans[0], simpler))


def _with_simplest(plans: Sequence[PricedPlan], simplest: PricedPlan) -> list[PricedPlan]:
    """Plans of different kinds, fastest first, among them the simplest if it is the fastest of its kind; it is the
    first if it takes as long as the fastest."""
    ranked = sorted(
        (simplest if plan.kind == simplest.kind and simplest.token_s < plan.token_s else plan for plan in plans),
        key=attrgetter("token_s"),
    )
    if simplest.token_s > (1 + _AS_LONG) * ranked[0].token_s:
        return ranked
    return [simplest, *(plan for plan in ranked if plan.kind != simplest.kind)]


def _chosen(
    advice: Advice, constraints: Constraints, constants: Constants, spread: RatioSpread, room: float
) -> PricedPlan:
    """The simplest plan, of the advice or simpler than its plans, that can't be told apart from the first."""
    first_plan, *others = advice.plans
    fitting = [plan for plan in others if fits(plan.job, plan.memory, room)]
    alike = [first_plan, *(plan for plan in fitting if _confidence(first_plan, plan, spread) < TOLD_APART)]
    is_hosted = _is_hosted(first_plan.job)
    slower = spread.ratio(TOLD_APART, [kind for kind in DIFFERENCES if is_hosted or kind != "offload"])
    simpler = simpler_plans(
        advice.job,
        constraints,
        [plan.job for plan in advice.plans],
        constants,
        room=room,
        most_token_s=slower * first_plan.closed_token_s,
    )
    tries = _TRIES
    for candidate in in_order([*alike, *simpler]):
        if isinstance(candidate, PricedPlan):
            return candidate
        kinds = kinds_between(first_plan.job, candidate.job)
        if (
            tries == 0
            or spread.confidence(math.log(candidate.token_s / first_plan.closed_token_s), kinds) >= TOLD_APART
        ):
            continue
        (plan,) = priced([candidate.job], constants)
        tries -= 1
        if fits(plan.job, plan.memory, room) and _confidence(first_plan, plan, spread) < TOLD_APART:
            return plan
    raise AssertionError("the first plan is among those that can't be told apart from it")


def in_order(plans: Sequence[PricedPlan | Candidate]) -> Iterator[PricedPlan | Candidate]:
    """Plans, the simplest first; equally simple plans are sorted by closed forms, the fastest first."""
    keys = [_key(plan) for plan in plans]
    return (plans[index] for index in sorted(range(len(plans)), key=keys.__getitem__))


def _key(plan: PricedPlan | Candidate) -> tuple[Simplicity, float, str]:
    """A total order: plans with one key are one plan."""
    token_s = plan.token_s if isinstance(plan, Candidate) else plan.closed_token_s
    return simplicity(plan.job), token_s, plan.job.plan.model_dump_json()


def _confidence(first: PricedPlan, second: PricedPlan, spread: RatioSpread) -> float:
    """The confidence that the first plan is faster than the second."""
    return spread.confidence(math.log(second.token_s / first.token_s), kinds_between(first.job, second.job))


def kinds_between(first: JobSpec, second: JobSpec) -> frozenset[str]:
    """The kinds of difference between two plans."""
    return differing(run_of(first).grid, run_of(second).grid)


def explained(
    advice: Advice,
    own_job: JobSpec | None,
    constraints: Constraints,
    constants: Constants,
    own_faults: Sequence[str] = (),
) -> Advice:
    """The advice with its reasons. `own_job` is the job if the user gave a plan: it is compared with the others or, if
    it has faults, shown as refused. A forked copy prices it meanwhile, where there is a second core."""
    tell(Phase.EXPLAINING, 0.0)
    tasks: list[Callable[[], Any]] = []
    if advice.plans:
        job, schedules = advice.plans[0].job, searched_schedules(constraints)
        tasks.append(partial(reasons, job, schedules, constants, advice.times))
    if own_job is not None and not own_faults:
        tasks.append(partial(_own_plan, own_job, constraints, constants, advice.times))
    with closing(shared(tasks, lambda task: task())) as answers:
        results = [task() if result is None else result for task, result in answers]
    if own_job is not None and own_faults:
        advice = replace(advice, refused=RefusedPlan(own_job, tuple(own_faults)))
    elif own_job is not None:
        advice = replace(advice, own=results[-1])
    if not advice.plans:
        return advice
    best, why = advice.plans[0], results[0]
    return replace(
        advice,
        reasons=why,
        binding=binding(best.time, best.memory, best.job, why),
        rules=rules_for(best.job),
    )


def _own_plan(job: JobSpec, constraints: Constraints, constants: Constants, times: StepTimes | None) -> OwnPlan:
    """The user's plan. Its standing among drawn plans is by closed forms, like their times."""
    (plan,) = priced([job], constants)
    memo = times.memo if times else Memo()
    place = standing(job, plan.closed_token_s, constraints, constants, memo=memo)
    return OwnPlan(plan, place, misfit(job, searched_schedules(constraints), constants, Limits(constraints.among)))
