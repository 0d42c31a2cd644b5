"""The fastest plans of a job: ranked by closed forms, simulated, and judged by the memory account.

Branch and bound (branch_and_bound.py) ranks plans of different kinds by closed forms, and simulated_plans.py chooses
the fastest fitting plan of each. For this runtime the exact memory account decides if a plan fits. If it refutes all
plans of a kind, the search goes on with corrected memory (corrections.py) through the kinds that may still be shown;
the others keep their plans.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.cost.calibration import Constants
from shardwright.layers.memo import Memo
from shardwright.planner.search import space
from shardwright.planner.search.adjacent_plans import numbers_of_plan
from shardwright.planner.search.branch_and_bound import ranked_kinds
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.empty_space import empty_space_faults, refuse_no_cluster
from shardwright.planner.search.idle_zero import without_idle_zero
from shardwright.planner.search.known_strategies import within_known
from shardwright.planner.search.plan_block import DEGREES, Column, kind_codes, select
from shardwright.planner.search.plan_price import room_bytes, sure_room_bytes
from shardwright.planner.search.results import Candidate, PlanPlace, SearchResult
from shardwright.planner.search.search_scope import SearchScope
from shardwright.planner.search.simulated_plans import SimulatedPlans

_ROUNDS = 4  # at most, each with the memory corrections of the previous one


def search(
    job: JobSpec,
    constraints: Constraints,
    constants: Constants,
    num_shown: int = 16,
    room: float | None = None,
    memo: Memo | None = None,
    most_token_s: float = math.inf,
    *,
    hosted_only: bool = False,
    on_first: Callable[[float], object] | None = None,
) -> SearchResult:
    """Find the fastest plans of `num_shown` kinds that fit in `room` bytes of a device; if it is None, those that fit
    surely or, if there are none, those that are expected to fit.

    `memo` has results of earlier searches for the same model, cluster and constants; the rest is as in SearchScope.
    PlanError if the cluster is unknown or no plan meets the constraints.
    """
    refuse_no_cluster(job)
    constraints, _ = within_known(job, constraints)
    rows = space.degrees(job, constraints)
    if faults := empty_space_faults(job, constraints, rows):
        raise PlanError(
            say(
                "plans for {name} on {num_devices:,} devices", name=job.model.name, num_devices=job.cluster.num_devices
            ),
            faults,
        )
    rooms = sorted({sure_room_bytes(job), room_bytes(job)}) if room is None else [room]
    memo = memo or Memo()
    for searched_room in rooms:
        scope = SearchScope(
            job,
            constraints,
            constants,
            rows,
            num_shown,
            searched_room,
            memo,
            most_token_s=most_token_s,
            hosted_only=hosted_only,
            on_first=on_first,
        )
        result = _result_of(scope)
        if result.candidates:
            break
    return result


def _result_of(scope: SearchScope) -> SearchResult:
    """The fastest plans of a scope."""
    started = time.perf_counter()
    job, constants, num_shown = scope.job, scope.constants, scope.num_shown
    simulated = SimulatedPlans(scope)
    with simulated.begun_early() as begin_early:
        kinds, tally = ranked_kinds(scope, lambda first_kinds: begin_early(first_kinds[:num_shown]))
    candidates = simulated.fastest(kinds, num_shown)
    for _ in range(_ROUNDS - 1):
        refuted, simulated.refuted = list(simulated.refuted.values()), {}
        if not scope.corrections.learned(job, refuted, constants):
            break
        later_scope = _unsearched(scope, kinds, candidates, refuted)
        if not len(later_scope.rows["tp"]):
            break
        kinds, later_tally = ranked_kinds(later_scope)
        tally.add(later_tally)
        candidates = simulated.fastest(kinds, num_shown)
    tally.num_simulated = simulated.num_simulated
    tally.seconds = time.perf_counter() - started
    named = [without_idle_zero(plan, scope.constraints, constants) for plan in candidates]
    return SearchResult(named, tally, simulated.times)


def _unsearched(
    scope: SearchScope, kinds: Sequence[Sequence[PlanPlace]], shown: Sequence[Candidate], refuted: Sequence[JobSpec]
) -> SearchScope:
    """The scope of a search that goes on after all plans of some kinds were `refuted`.

    The search before has excluded kinds that closed forms say are slower than the last of `kinds` that it wanted. If
    the fastest plan shown is not slower, only plans of the refuted kinds may be faster than it; else any that are not
    shown. Plans that are slower than all shown ones are left out if there are enough.
    """
    codes = kind_codes(scope.rows)
    last, num_shown = min(scope.num_shown, len(kinds)) - 1, scope.num_shown
    if len(shown) >= num_shown:
        slowest_s = max(plan.token_s for plan in shown)
        scope = replace(scope, most_token_s=min(scope.most_token_s, slowest_s))
        if shown[0].token_s <= kinds[last][0].token_s:
            return replace(scope, rows=select(scope.rows, np.isin(codes, _codes_of(refuted))))
    return replace(scope, rows=select(scope.rows, ~np.isin(codes, _codes_of([plan.job for plan in shown]))))


def _codes_of(jobs: Sequence[JobSpec]) -> Column:
    """The codes of the kinds of some jobs' plans."""
    plans = [numbers_of_plan(job) for job in jobs]
    return kind_codes({name: np.array([plan[name] for plan in plans], np.int64) for name in DEGREES})
