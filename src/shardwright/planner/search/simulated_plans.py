"""Full simulations of plans. Closed forms offer several plans of each kind; here the fastest fitting one is chosen.

A step is simulated in the plan's own order of work, with layers spread evenly over its stages and, if that is faster,
with uneven stages. Then a local search improves the fastest plan of a kind: it simulates adjacent plans, which differ
in one field, until none is faster. For this runtime the exact memory account decides if the fastest plan fits. If not,
the next plan takes its place, and the local search goes on from there.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.config.checks.check import job_faults
from shardwright.config.cluster_facts import host_room_bytes
from shardwright.config.job import JobSpec
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.cost.calibration import Constants
from shardwright.cost.from_job import run_of
from shardwright.layers.memo import Memo
from shardwright.memory.job_memories import every_rank_has_room
from shardwright.memory.rank_estimate import peak_memory
from shardwright.planner.search.adjacent_plans import (
    adjacent_blocks,
    with_even_stages,
    with_layout_kept,
    with_virtual_stages,
)
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.plan_block import Column, Columns, PlanBlock
from shardwright.planner.search.plan_price import fits, prices
from shardwright.planner.search.promising import QUICK, THOROUGH, UNEVEN, Effort, Promising, SimulatedBase, in_turns
from shardwright.planner.search.results import PlanPlace, SimulatedPlan
from shardwright.planner.search.search_progress import Phase, tell, tell_best
from shardwright.planner.search.step_times import StepTimes, plan_key
from shardwright.planner.stages.best_layout import LEAST_GAIN, adjacent_layouts, paying_layout
from shardwright.schedule.job_program import plan_faults
from shardwright.simulate.full_step import is_simulated

_LEAST_SHARE = 1e-6  # of a step: a smaller gain counts as none
_LEAST_SPARE = 1e-3  # share of a step that uneven stages must be able to save
# Share of the time that layers take in the fastest plan of a kind: layouts adjacent to plans slower by less are
# simulated too. No layout of layers changes what the optimizer and copies to host memory take.
_NEARLY = 0.03
# Share of a device. A plan that needs less by closed forms counts as fitting until its account is made.
_SURE_ROOM = 0.9
_MOST_ROUNDS = 24  # of the local search, if one fastest plan after another does not fit
# Lengths of a step in actions: stages times microbatches.
_SHORT_STEP = 2**9  # takes no time to simulate: such kinds get a thorough local search
_LONG_STEP = 2**10  # a longer one takes long to simulate
_LONGEST_STEP = 2**11  # a longer one takes a fifth of a second
_THOROUGH_KINDS = 3  # get a thorough local search, however long their steps are
_LISTED_KINDS = 5  # a table has so many lines if the user does not ask for more: all get a local search
# Times the fastest plan of all: a kind that is not listed and slower does not become the fastest by a local search. In
# the jobs of the catalog one made a kind up to 3.6 % faster.
_MAY_WIN = 1.05
_LONG_STEP_KINDS = 2  # of kinds with longer steps than _LONGEST_STEP only these first ones are searched around


@dataclass
class _Kind:
    """The simulated plans of a kind that may fit, by their fields.

    `simulated` are the keys of all plans that were simulated, `expanded` those whose adjacent plans were searched, with
    the effort, and `laid_out` those whose adjacent layouts were simulated.
    """

    plans: dict[str, SimulatedPlan] = field(default_factory=dict)
    simulated: set[str] = field(default_factory=set)
    expanded: set[tuple[str, Effort]] = field(default_factory=set)
    laid_out: set[str] = field(default_factory=set)


class SimulatedPlans:
    """Simulated steps of plans, and which plans fit in `room` bytes of a device.

    `rows` are the degrees of the space. `refuted` has the fastest plan of each kind without a fitting plan.
    """

    def __init__(
        self, job: JobSpec, constraints: Constraints, constants: Constants, rows: Columns, room: float, memo: Memo
    ) -> None:
        self.job, self.constraints, self.constants = job, constraints, constants
        self.rows, self.room, self.memo = rows, room, memo
        self.may_lay_out = "layout" not in constraints.among
        self.host_room = host_room_bytes(job.cluster)
        self.refuted: dict[str, JobSpec] = {}
        self._fits: dict[str, bool] = {}
        self._times = StepTimes(constants, memo)
        self._kinds: dict[int, tuple[Sequence[PlanPlace], _Kind]] = {}  # with a plan that may fit, by their codes
        self._best_job: JobSpec | None = None  # the last one that was recorded

    @property
    def num_simulated(self) -> int:
        """Plans that were simulated."""
        return self._times.num_simulated

    def fastest(self, kinds: Sequence[Sequence[PlanPlace]], num_shown: int) -> list[SimulatedPlan]:
        """Return the fastest fitting plan of each of `num_shown` kinds, fastest first, among `kinds` and those of
        earlier calls.

        `kinds` are sorted by the lower bounds of their plans. A kind without a fitting plan is left out, and its
        fastest plan is added to `refuted`.
        """
        for number, places in enumerate(kinds):
            best_s = sorted(self._best(kind).token_s for _, kind in self._kinds.values())
            if len(best_s) >= num_shown and self._times.least_ratio * places[0].token_s >= best_s[num_shown - 1]:
                break
            tell(Phase.SIMULATING, 0.45 * number / len(kinds))
            self._take(places)
        chosen = list(self._kinds.values())
        chosen.sort(key=lambda item: self._best(item[1]).token_s)
        kinds_shown = [kind for _, kind in chosen[:num_shown]]
        tell(Phase.SIMULATING, 0.45)
        self._improve(self._that_may_win(kinds_shown), QUICK)
        tell(Phase.SIMULATING, 0.7)
        thorough_kinds = [
            kind
            for n, kind in enumerate(self._that_may_win(kinds_shown))
            if n < _THOROUGH_KINDS or _actions(self._best(kind).job) <= _SHORT_STEP
        ]
        self._improve(thorough_kinds, THOROUGH)
        uneven = [kind for kind in thorough_kinds if kind.plans and self._best(kind).job.plan.layout]
        tell(Phase.SIMULATING, 0.9)
        self._improve([kind for kind in uneven if not _is_long(self._best(kind).job)], UNEVEN)
        return self._first_fitting(chosen, num_shown)

    def _that_may_win(self, kinds: Sequence[_Kind]) -> list[_Kind]:
        """The kinds with a plan that are listed first, or whose fastest plan may become the fastest of all by a
        local search; fastest first."""
        with_plans = sorted((kind for kind in kinds if kind.plans), key=lambda kind: self._best(kind).token_s)
        most_s = _MAY_WIN * self._best(with_plans[0]).token_s if with_plans else 0.0
        return [kind for n, kind in enumerate(with_plans) if n < _LISTED_KINDS or self._best(kind).token_s <= most_s]

    def _first_fitting(self, kinds: Sequence[tuple[Sequence[PlanPlace], _Kind]], num_shown: int) -> list[SimulatedPlan]:
        """The fastest fitting plans of `num_shown` kinds, fastest first. The fastest of all is judged next, so that no
        account is made of a plan that is too slow to be shown."""
        open_kinds, shown = [item for item in kinds if item[1].plans], list[SimulatedPlan]()
        for places in [places for places, kind in kinds if not kind.plans]:  # none of them fits
            self._refute(places)
        while open_kinds and len(shown) < num_shown:
            item = min(open_kinds, key=lambda item: self._best(item[1]).token_s if item[1].plans else 0.0)
            places, kind = item
            if not kind.plans:  # all were dropped
                self._refute(places)
                open_kinds.remove(item)
            elif self.fits((best := self._best(kind)).job):
                shown.append(best)
                open_kinds.remove(item)
            else:
                self._drop(kind, best)
        return shown

    def _refute(self, places: Sequence[PlanPlace]) -> None:
        job = places[0].plan(self.job)
        self.refuted[plan_key(job)] = job
        self._kinds.pop(places[0].kind, None)

    def _take(self, places: Sequence[PlanPlace]) -> None:
        """Simulate the plans of a kind that may be the fastest; fewer of them if steps are long."""
        _, kind = self._kinds.get(places[0].kind, (places, _Kind()))
        is_among_first = len(self._kinds) < _LONG_STEP_KINDS
        for place in places[: 1 + is_among_first if _is_long(places[0].plan(self.job)) else None]:
            if kind.plans and self._times.least_ratio * place.token_s >= self._best(kind).token_s:
                break
            self._add(kind, [place.plan(self.job)])
        if kind.plans:
            self._kinds[places[0].kind] = places, kind
            self._tell_best(kind for _, kind in self._kinds.values())
        else:  # an earlier call has shown that none of them fits
            self._refute(places)

    def _tell_best(self, kinds: Iterable[_Kind]) -> None:
        """Record the fastest plan of some kinds if it is another one than before."""
        best = min((self._best(kind) for kind in kinds if kind.plans), key=_seconds, default=None)
        if best is not None and best.job is not self._best_job:
            self._best_job = best.job
            tell_best(lambda: best.job, best.token_s)

    def _best(self, kind: _Kind) -> SimulatedPlan:
        return min(kind.plans.values(), key=_seconds)

    def _improve(self, kinds: Sequence[_Kind], effort: Effort) -> None:
        """Add the plans adjacent to the fastest plan of each kind, until that plan fits and none of them is faster."""
        # Kinds with the longest steps are searched only if they are among the first.
        open_kinds = [
            kind
            for n, kind in enumerate(kinds)
            if n < _LONG_STEP_KINDS or _actions(self._best(kind).job) <= _LONGEST_STEP
        ]
        open_kinds, num_rounds = [kind for kind in open_kinds if self._has_more_to_look_at(kind, effort)], 0
        while open_kinds and num_rounds < _MOST_ROUNDS:
            num_rounds += 1
            best = [self._best(kind) for kind in open_kinds]
            adjacent = self._adjacent(best, effort)
            for kind, plan, tried in zip(open_kinds, best, adjacent, strict=True):
                kind.expanded.add((plan_key(plan.job), effort))
                self._add(kind, tried)
                if effort.equal_layouts:
                    self._lay_out_nearly_fastest(kind)
            self._tell_best(kinds)
            open_kinds = [kind for kind in open_kinds if self._has_more_to_look_at(kind, effort)]

    def _has_more_to_look_at(self, kind: _Kind, effort: Effort) -> bool:
        """True if the plans adjacent to the fastest fitting plan of a kind were not searched yet.

        Plans that do not fit are dropped on the way. A plan with room to spare by closed forms is searched around
        before its account is made.
        """
        while kind.plans:
            best = self._best(kind)
            is_open = (plan_key(best.job), effort) not in kind.expanded
            if is_open and self._needs_share(best.job) < _SURE_ROOM:
                return True
            if self.fits(best.job):
                return is_open
            self._drop(kind, best)
        return False

    def _drop(self, kind: _Kind, plan: SimulatedPlan) -> None:
        """Drop a plan that does not fit, and add it with a smaller microbatch, which may fit and be nearly as fast."""
        del kind.plans[plan_key(plan.job)]
        smaller = plan.job.plan.microbatch_size // 2
        if smaller and self.constraints.allows("microbatch_size", smaller):
            smaller_job = plan.job.model_copy(
                update={"plan": plan.job.plan.model_copy(update={"microbatch_size": smaller})}
            )
            if self._times.has_simulated(smaller_job) or _is_legal(smaller_job):
                self._add(kind, [smaller_job])

    def _needs_share(self, job: JobSpec) -> float:
        """The share of the room that a plan needs by closed forms."""
        return float(peak_memory(run_of(job), self.constants, self.memo).process) / self.room

    def _add(self, kind: _Kind, jobs: Iterable[JobSpec]) -> None:
        """Simulate plans, each with its own layout and with its best one."""
        new_jobs = {key: job for job in jobs if (key := plan_key(job)) not in kind.simulated}
        self._times.price(new_jobs.values())
        for job_key, job in new_jobs.items():
            kind.simulated.add(job_key)
            for plan in self._with_layouts(job):
                key = plan_key(plan.job)
                if self._fits.get(key, True):
                    kind.plans[key] = plan

    def _lay_out_nearly_fastest(self, kind: _Kind) -> None:
        """Simulate nearly fastest plans with a layer of their slowest rank moved to another one, if steps are short.

        A step waits not only for its slowest rank, so such a layout may be faster though its bound is not.
        """
        for plan in list(kind.plans.values()):
            is_short = 0 < _actions(plan.job) <= _SHORT_STEP
            if not (plan.job.plan.layout and is_short and plan.token_s < _nearly_s(self._best(kind))):
                continue
            if (key := plan_key(plan.job)) not in kind.laid_out:
                kind.laid_out.add(key)
                self._add(kind, self._adjacent_layouts(plan.job, THOROUGH))

    def _with_layouts(self, job: JobSpec) -> Iterator[SimulatedPlan]:
        """Yield a plan and, if its even layout may not be the best one, the plan with its best layout."""
        time, (_, spare_s) = self._times.simulated(job), self._times.closed(job)
        even_s = self._even_s(job) if job.plan.layout else None
        yield SimulatedPlan(job, float(time.total) / job.tokens_per_step, time, even_s)
        least_gain = LEAST_GAIN if _is_long(job) else _LEAST_SHARE
        least_spare = max(_LEAST_SPARE, least_gain) * time.total
        if self.may_lay_out and is_simulated(job) and not job.plan.layout and spare_s > least_spare:
            laid_out = paying_layout(job, self.constants, least_gain, self.memo)
            if laid_out is not None:
                laid_out_time = self._times.simulated(laid_out)
                token_s = float(laid_out_time.total) / job.tokens_per_step
                yield SimulatedPlan(laid_out, token_s, laid_out_time, even_s=float(time.total))

    def _even_s(self, job: JobSpec) -> float:
        return float(self._times.simulated(with_even_stages(job)).total)

    def _closed_even_s(self, job: JobSpec) -> float:
        """Seconds a token, by closed forms, of an uneven plan if its stages were even; 0 if they are even."""
        return self._times.closed_token_s(with_even_stages(job)) if job.plan.layout else 0.0

    def fits(self, job: JobSpec) -> bool:
        """True if a plan is legal, and fits by the account that every command uses."""
        key = plan_key(job)
        if key not in self._fits:
            # The space has legal plans alone. Rules that it does not know hold here.
            self._fits[key] = _is_legal(job) and every_rank_has_room(
                job, self.constants, lambda memory: bool(fits(job, memory, self.room)), self.memo
            )
        return self._fits[key]

    def _adjacent(self, plans: Sequence[SimulatedPlan], effort: Effort) -> list[list[JobSpec]]:
        """For each plan its adjacent plans that may be faster and fit."""
        promising: list[list[Promising]] = [[] for _ in plans]
        jobs = [plan.job for plan in plans]
        base = SimulatedBase.of(
            [self._times.simulated(job) for job in jobs],
            jobs,
            [plan.token_s for plan in plans],
            closed_s=[self._times.closed_token_s(job) for job in jobs],
            even_s=[self._closed_even_s(job) for job in jobs],
        )
        schedules = np.array([SCHEDULES.names.index(job.plan.schedule) for job in jobs])
        for block in adjacent_blocks(self.job, self.constraints, self.rows, jobs):
            base_of = block.columns["near"]
            for plan in self._promising(block, base.select(base_of), block.schedule == schedules[base_of], effort):
                promising[plan.near].append(plan)
        adjacent = []
        for job, promising_plans in zip(jobs, promising, strict=True):
            simulated = [plan.job for plan in promising_plans if self._times.has_simulated(plan.job)]
            not_simulated = [plan for plan in promising_plans if not self._times.has_simulated(plan.job)]
            tried = [*simulated, *in_turns(not_simulated)[: effort.most_like(job)]]
            laid_out = [laid_out_job for tried_job in tried for laid_out_job in with_layout_kept(tried_job, job)]
            adjacent.append([*tried, *laid_out, *self._adjacent_layouts(job, effort), *self._other_virtual_stages(job)])
        return adjacent

    def _adjacent_layouts(self, job: JobSpec, effort: Effort) -> Iterator[JobSpec]:
        if self.may_lay_out and is_simulated(job):
            yield from adjacent_layouts(job, self.constants, self.memo, may_be_equal=effort.equal_layouts)

    def _other_virtual_stages(self, job: JobSpec) -> Iterator[JobSpec]:
        """Yield the plan with other numbers of stages a rank, evenly laid out, if its schedule allows any number.

        Closed forms do not tell which number hides the messages, nor how much uneven stages gain with it. Uneven
        stages that gain most may have room only with a smaller microbatch, so a plan that has them is yielded with half
        of its microbatch too.
        """
        plan = job.plan
        if SCHEDULES[plan.schedule].stages_per_rank or plan.pp == 1 or (plan.layout and not self.may_lay_out):
            return
        most = job.model.layers // plan.pp
        sizes = [plan.microbatch_size]
        if plan.layout and plan.microbatch_size > 1:
            sizes.append(plan.microbatch_size // 2)
        for virtual in sorted({2, most, plan.virtual_stages * 2, plan.virtual_stages // 2, plan.virtual_stages + 1}):
            for size in sizes:
                other_job = job.model_copy(update={"plan": with_virtual_stages(plan, virtual, size)})
                if (
                    _actions(other_job) <= _LONGEST_STEP
                    and self.constraints.allows("virtual_stages", virtual)
                    and self.constraints.allows("microbatch_size", size)
                    and (self._times.has_simulated(other_job) or _is_legal(other_job))
                ):
                    yield other_job

    def _promising(
        self, block: PlanBlock, base: SimulatedBase, is_alike: Column, effort: Effort
    ) -> Iterator[Promising]:
        """Yield the plans of a block that may fit and be faster than the plan to which they are adjacent.

        `is_alike` marks those with the schedule of that plan.
        """
        priced = prices(self.job, block, self.constants, self.memo)
        host, process = (
            np.broadcast_to(num_bytes, base.token_s.shape) for num_bytes in (priced.memory.host, priced.memory.process)
        )
        tokens = block.columns["global_batch_size"] * self.job.model.sequence
        optimistic_s = base.optimistic_s(priced.laid_out_s, priced.time, tokens, is_alike, effort)
        may_fit = (process <= effort.room * self.room) & (host <= self.host_room)
        for index in np.flatnonzero(may_fit & (optimistic_s * (1 + _LEAST_SHARE) < base.token_s)).tolist():
            near, job = int(block.columns["near"][index]), block.plan(index, self.job)
            yield Promising(near, float(optimistic_s[index]), float(priced.laid_out_s[index]), job)


def _is_legal(job: JobSpec) -> bool:
    """True if neither the job nor its plan's schedule has a fault."""
    return not (job_faults(job) or plan_faults(job))


def _is_long(job: JobSpec) -> bool:
    """True if a step takes long to simulate."""
    return _actions(job) > _LONG_STEP


def _actions(job: JobSpec) -> int:
    """Stages times microbatches of a step; 0 if it is not simulated."""
    return job.plan.num_stages * job.num_microbatches if is_simulated(job) else 0


def _nearly_s(best: SimulatedPlan) -> float:
    """Seconds a token below which a plan is nearly as fast as the fastest one of its kind."""
    layers_share = 1 - (best.time.optimizer + best.time.host) / best.time.total
    return best.token_s * float(1 + _NEARLY * layers_share)


def _seconds(plan: SimulatedPlan) -> float:
    return plan.token_s
