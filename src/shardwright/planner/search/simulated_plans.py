"""Full simulations of plans. Closed forms offer several plans of each kind; here the fastest fitting one is chosen.

A step is simulated in the plan's own order of work. Then a local search (adjacent_search.py) improves the fastest plan
of a kind. Plans are simulated and judged ahead by forked copies of this process, which changes no result: each is the
same whoever makes it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import NamedTuple

from shardwright.config.job import JobSpec
from shardwright.planner.search.adjacent_search import (
    LONG_STEP_KINDS,
    SHORT_STEP,
    AdjacentSearch,
    KindPlans,
    is_long,
    num_actions,
)
from shardwright.planner.search.forked_copies import ForkedCopy, forked_copies, num_processes, shared
from shardwright.planner.search.promising import QUICK, THOROUGH, UNEVEN
from shardwright.planner.search.results import PlanPlace, SimulatedPlan
from shardwright.planner.search.search_progress import Phase, tell
from shardwright.planner.search.search_scope import SearchScope
from shardwright.planner.search.step_times import KnownSteps, StepTimes, plan_key

_THOROUGH_KINDS = 3  # get a thorough local search, however long their steps are
_LISTED_KINDS = 5  # a table has so many lines if the user does not ask for more: all get a local search
# Times the fastest plan of all: a kind that is not listed and slower does not become the fastest by a local search. In
# the jobs of the catalog one made a kind up to 3.6 % faster.
_MAY_WIN = 1.05


class _Ahead(NamedTuple):
    """Steps and paying layouts of plans that a forked copy has found ahead."""

    steps: KnownSteps
    paying_layouts: dict[str, JobSpec | None]


class SimulatedPlans:
    """Simulated steps of plans of a scope, and which plans fit in its room.

    `refuted` has the fastest plan of each kind without a fitting plan. Kinds are left out that no local search brings
    below `most_token_s` of the scope.
    """

    def __init__(self, scope: SearchScope) -> None:
        self.job, self._most_token_s, self._on_first = scope.job, scope.most_token_s, scope.on_first
        self.refuted: dict[str, JobSpec] = {}
        self._search = AdjacentSearch(
            scope.job, scope.constraints, scope.constants, scope.rows, room=scope.room, memo=scope.memo
        )
        self._kinds: dict[int, tuple[Sequence[PlanPlace], KindPlans]] = {}  # with a plan that may fit, by their codes

    @property
    def times(self) -> StepTimes:
        """The steps of all plans that were simulated."""
        return self._search.times

    @property
    def num_simulated(self) -> int:
        """Plans that were simulated."""
        return self._search.times.num_simulated

    @contextmanager
    def begun_early(self) -> Iterator[Callable[[Sequence[Sequence[PlanPlace]]], None]]:
        """Yield a function that takes the kinds that are best so far, while this process still ranks kinds. A forked
        copy simulates them meanwhile, and what it knows at the end of the context is kept until it is asked for."""
        with ExitStack() as ended_last:
            copies: list[ForkedCopy[tuple[int, Sequence[PlanPlace]], _Ahead]] = []

            def begin(kinds: Sequence[Sequence[PlanPlace]]) -> None:
                if num_processes() > 1:  # one more plan of a kind at a time, because a plan may take half a second
                    share = [(n, places[:end]) for n, places in enumerate(kinds) for end in range(1, len(places) + 1)]
                    copies.extend(ended_last.enter_context(forked_copies(self._taken_ahead, [share])))

            yield begin
            for copy in copies:
                for ahead in copy.results_so_far(least=1):  # of the kind that leads, which is asked for first
                    self._expect(ahead)

    def _expect(self, ahead: _Ahead) -> None:
        """Keep what a forked copy has found ahead."""
        self._search.times.expect(ahead.steps)
        self._search.paying_layouts |= ahead.paying_layouts

    def fastest(self, kinds: Sequence[Sequence[PlanPlace]], num_shown: int) -> list[SimulatedPlan]:
        """Return the fastest fitting plan of each of `num_shown` kinds, fastest first, among `kinds` and those of
        earlier calls.

        `kinds` are sorted by the lower bounds of their plans. A kind without a fitting plan is left out, and its
        fastest plan is added to `refuted`.
        """
        self._take_first(kinds, num_shown)
        most_s = _MAY_WIN * self._most_token_s
        chosen = [item for item in self._kinds.values() if item[1].best.token_s <= most_s]
        chosen.sort(key=lambda item: item[1].best.token_s)
        kinds_shown = [kind for _, kind in chosen[:num_shown]]
        if chosen and self._on_first is not None:
            self._on_first(chosen[0][1].best.token_s)
        tell(Phase.SIMULATING, 0.45)
        self._search.improve(_that_may_win(kinds_shown), QUICK, efforts_of_first=[THOROUGH])
        tell(Phase.SIMULATING, 0.7)
        thorough_kinds = [
            kind
            for n, kind in enumerate(_that_may_win(kinds_shown))
            if n < _THOROUGH_KINDS or num_actions(kind.best.job) <= SHORT_STEP
        ]
        others = [kind for kind in kinds_shown if kind.plans and not any(kind is other for other in thorough_kinds)]
        self._search.improve(thorough_kinds, THOROUGH, [kind.best.job for kind in others])
        uneven = [kind for kind in thorough_kinds if kind.plans and kind.best.job.plan.layout]
        tell(Phase.SIMULATING, 0.9)
        self._search.improve([kind for kind in uneven if not is_long(kind.best.job)], UNEVEN)
        return self._first_fitting(chosen, num_shown)

    def _take_first(self, kinds: Sequence[Sequence[PlanPlace]], num_shown: int) -> None:
        """Simulate plans of kinds, until the others are surely slower than `num_shown` of them."""
        if self._is_enough(kinds, 0, num_shown):
            return
        with closing(shared(list(enumerate(kinds)), self._taken_ahead)) as numbered:
            for (number, places), ahead in numbered:
                tell(Phase.SIMULATING, 0.45 * number / len(kinds))
                if ahead is not None:
                    self._expect(ahead)
                self._take(places, is_among_first=len(self._kinds) < LONG_STEP_KINDS)
                if self._is_enough(kinds, number + 1, num_shown):
                    break

    def _is_enough(self, kinds: Sequence[Sequence[PlanPlace]], number: int, num_shown: int) -> bool:
        """True if kind `number`, and so all after it, are surely slower than `num_shown` kinds that were simulated."""
        best_s = sorted(kind.best.token_s for _, kind in self._kinds.values())
        if number == len(kinds):
            return True
        last_s = best_s[num_shown - 1] if len(best_s) >= num_shown else math.inf
        return self._search.times.least_ratio * kinds[number][0].token_s >= min(last_s, self._most_token_s)

    def _taken_ahead(self, numbered: tuple[int, Sequence[PlanPlace]]) -> _Ahead:
        """The steps and layouts of the plans that are probably simulated of a kind."""
        number, places = numbered
        known, layouts = self._search.times.known(), self._search.paying_layouts
        known_layouts = layouts.copy()
        self._take(places, is_among_first=number < LONG_STEP_KINDS)
        new_layouts = {key: layouts[key] for key in layouts.keys() - known_layouts.keys()}
        return _Ahead(self._search.times.known().without(known), new_layouts)

    def _first_fitting(
        self, kinds: Sequence[tuple[Sequence[PlanPlace], KindPlans]], num_shown: int
    ) -> list[SimulatedPlan]:
        """The fastest fitting plans of `num_shown` kinds, fastest first. The fastest of all is judged next, so that no
        account is made of a plan that is too slow to be shown."""
        self._judge_ahead([kind for _, kind in kinds if kind.plans], num_shown)
        open_kinds, shown = [item for item in kinds if item[1].plans], list[SimulatedPlan]()
        for places in [places for places, kind in kinds if not kind.plans]:  # none of them fits
            self._refute(places)
        while open_kinds and len(shown) < num_shown:
            item = min(open_kinds, key=lambda item: item[1].best.token_s if item[1].plans else 0.0)
            places, kind = item
            if not kind.plans:  # all were dropped
                self._refute(places)
                open_kinds.remove(item)
            elif self._search.fits((best := kind.best).job):
                shown.append(best)
                open_kinds.remove(item)
            else:
                self._search.drop(kind, best)
        self._search.tell_best(kind for _, kind in kinds)
        return shown

    def _judge_ahead(self, kinds: Sequence[KindPlans], num_shown: int) -> None:
        """Make the accounts of the fastest plans of the first kinds, which are needed in any case."""
        best = sorted((kind.best for kind in kinds), key=lambda plan: plan.token_s)[:num_shown]
        jobs = [plan.job for plan in best if not self._search.is_judged(plan.job)]
        with closing(shared(jobs, self._search.judged)) as all_judged:
            for job, judged in all_judged:
                self._search.remember(judged or self._search.judged(job))

    def _refute(self, places: Sequence[PlanPlace]) -> None:
        job = places[0].plan(self.job)
        self.refuted[plan_key(job)] = job
        self._kinds.pop(places[0].kind, None)

    def _take(self, places: Sequence[PlanPlace], *, is_among_first: bool) -> None:
        """Simulate the plans of a kind that may be the fastest; fewer of them if steps are long."""
        _, kind = self._kinds.get(places[0].kind, (places, KindPlans()))
        for place in places[: 1 + is_among_first if is_long(places[0].plan(self.job)) else None]:
            if kind.plans and self._search.times.least_ratio * place.token_s >= kind.best.token_s:
                break
            self._search.add(kind, [place.plan(self.job)])
        if kind.plans:
            self._kinds[places[0].kind] = places, kind
            self._search.tell_best(kind for _, kind in self._kinds.values())
        else:  # an earlier call has shown that none of them fits
            self._refute(places)


def _that_may_win(kinds: Sequence[KindPlans]) -> list[KindPlans]:
    """The kinds with a plan that are listed first, or whose fastest plan may become the fastest of all by a local
    search; fastest first."""
    with_plans = sorted((kind for kind in kinds if kind.plans), key=lambda kind: kind.best.token_s)
    most_s = _MAY_WIN * with_plans[0].best.token_s if with_plans else 0.0
    return [kind for n, kind in enumerate(with_plans) if n < _LISTED_KINDS or kind.best.token_s <= most_s]
