"""The local search among simulated plans of one kind: plans adjacent to the fastest one, until none is faster.

It simulates plans that differ from the fastest one in one field, each in its own order of work, with layers spread
evenly over its stages and, if that is faster, with uneven stages. For this runtime the exact memory account decides if
the fastest plan fits. If not, the next plan takes its place, and the search goes on from there.

Kinds do not depend on each other, so forked copies of this process search a part of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import numpy as np

from shardwright.config.checks.check import job_faults
from shardwright.config.cluster_facts import host_room_bytes
from shardwright.config.job import JobSpec
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.cost.calibration import Constants
from shardwright.cost.from_job import run_of
from shardwright.layers.memo import Memo
from shardwright.memory.job_memories import AccountsByRank, every_rank_has_room, known_accounts, take_over_accounts
from shardwright.memory.rank_estimate import peak_memory
from shardwright.planner.search import space
from shardwright.planner.search.adjacent_plans import (
    adjacent_blocks,
    with_even_stages,
    with_layout_kept,
    with_virtual_stages,
)
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.forked_copies import forked_copies, num_processes
from shardwright.planner.search.plan_block import Column, Columns, PlanBlock
from shardwright.planner.search.plan_price import fits, prices
from shardwright.planner.search.promising import THOROUGH, Effort, Promising, SimulatedBase, in_turns
from shardwright.planner.search.results import SimulatedPlan
from shardwright.planner.search.search_progress import tell_best
from shardwright.planner.search.step_times import KnownSteps, StepTimes, plan_key
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
SHORT_STEP = 2**9  # takes no time to simulate: such kinds get a thorough local search
_LONG_STEP = 2**10  # a longer one takes long to simulate
_LONGEST_STEP = 2**11  # a longer one takes a fifth of a second
LONG_STEP_KINDS = 2  # of kinds with longer steps than _LONGEST_STEP only these first ones are searched around


@dataclass
class KindPlans:
    """The simulated plans of a kind that may fit, by their fields.

    `simulated` are the keys of all plans that were simulated, `expanded` those whose adjacent plans were searched, with
    the effort, and `laid_out` those whose adjacent layouts were simulated.
    """

    plans: dict[str, SimulatedPlan] = field(default_factory=dict)
    simulated: set[str] = field(default_factory=set)
    expanded: set[tuple[str, Effort]] = field(default_factory=set)
    laid_out: set[str] = field(default_factory=set)

    @property
    def best(self) -> SimulatedPlan:
        """The fastest plan; there must be one."""
        return min(self.plans.values(), key=lambda plan: plan.token_s)


@dataclass(frozen=True)
class _Improved:
    """The result of a local search in a forked copy: its kinds, and everything that it has found out about plans."""

    kinds: Sequence[KindPlans]
    steps: KnownSteps
    judged: "Sequence[Judged]"


@dataclass(frozen=True)
class Judged:
    """A plan that was judged by its memory account: if it fits, and the account of each rank that was asked."""

    job: JobSpec
    fits: bool
    accounts: AccountsByRank


class AdjacentSearch:
    """Simulated steps of plans, which plans fit in `room` bytes of a device, and the search among adjacent plans.

    `rows` are the degrees of the space. `paying_layouts` has plans with their best layouts, if these pay, by the keys
    of the plans.
    """

    def __init__(
        self, job: JobSpec, constraints: Constraints, constants: Constants, rows: Columns, room: float, memo: Memo
    ) -> None:
        self.job, self.constraints, self.constants = job, constraints, constants
        self.rows, self.room, self.memo = rows, room, memo
        self.variants = space.variants_of(job, constraints, rows)
        self.may_lay_out = "layout" not in constraints.among
        self.host_room = host_room_bytes(job.cluster)
        self.times = StepTimes(constants, memo)
        self._judged: dict[str, Judged] = {}
        self.paying_layouts: dict[str, JobSpec | None] = {}
        self._recorded: tuple[JobSpec, bool] | None = None  # the best plan that was told last, and if it may not fit

    def improve(
        self,
        kinds: Sequence[KindPlans],
        effort: Effort,
        to_judge: Sequence[JobSpec] = (),
        *,
        efforts_of_first: Sequence[Effort] = (),
    ) -> None:
        """Improve each kind: add the plans adjacent to its fastest plan, until that fits and none of them is faster.

        Kinds with the longest steps are searched only if they are among the first. The first kind is improved before
        the others, with `efforts_of_first` beside `effort`, so that the plan that leads is told early. While this
        process would wait for its copies, it makes accounts of plans `to_judge`, which are needed later.
        """
        open_kinds = [
            kind
            for number, kind in enumerate(kinds)
            if number < LONG_STEP_KINDS or num_actions(kind.best.job) <= _LONGEST_STEP
        ]
        first, others = open_kinds[:1], open_kinds[1:]
        count = min(num_processes(), max(1, len(open_kinds)))
        *shares, own_share = [others[number::count] for number in range(count)]
        with forked_copies(partial(self._improved, effort=effort), [[share] for share in shares]) as copies:
            for effort_of_first in (effort, *efforts_of_first):
                self._improve(first, effort_of_first, kinds)
            self._improve(own_share, effort, kinds)
            for job in to_judge:
                if all(copy.has_sent() for copy in copies):
                    break
                self.judged(job)
            for share, copy in zip(shares, copies, strict=True):
                self._take_over(share, copy.result())
        self.tell_best(kinds)

    def _improved(self, kinds: Sequence[KindPlans], effort: Effort) -> _Improved:
        """Improve kinds, and return what to take over from this process."""
        known, num_judged = self.times.known(), len(self._judged)
        self._improve(kinds, effort, kinds)
        return _Improved(kinds, self.times.known().without(known), list(self._judged.values())[num_judged:])

    def _take_over(self, kinds: Sequence[KindPlans], improved: _Improved) -> None:
        """Take over kinds that a forked copy has improved."""
        for kind, improved_kind in zip(kinds, improved.kinds, strict=True):
            vars(kind).update(vars(improved_kind))
        self.times.take_over(improved.steps)
        for judged in improved.judged:
            self.remember(judged)

    def _improve(self, kinds: Sequence[KindPlans], effort: Effort, all_kinds: Sequence[KindPlans]) -> None:
        """Improve kinds; after each round the fastest plan of `all_kinds` is recorded."""
        open_kinds, num_rounds = [kind for kind in kinds if self._has_more_to_look_at(kind, effort)], 0
        while open_kinds and num_rounds < _MOST_ROUNDS:
            num_rounds += 1
            best = [kind.best for kind in open_kinds]
            adjacent = self._adjacent(best, effort)
            for kind, plan, tried in zip(open_kinds, best, adjacent, strict=True):
                kind.expanded.add((plan_key(plan.job), effort))
                self.add(kind, tried)
                if effort.equal_layouts:
                    self._lay_out_nearly_fastest(kind)
            self.tell_best(all_kinds)
            open_kinds = [kind for kind in open_kinds if self._has_more_to_look_at(kind, effort)]

    def tell_best(self, kinds: Iterable[KindPlans]) -> None:
        """Record the fastest plan of some kinds if it is another one than before, or if it is known by now to fit."""
        best = min((kind.best for kind in kinds if kind.plans), key=lambda plan: plan.token_s, default=None)
        if best is None:
            return
        recorded = best.job, self._may_not_fit(best.job)
        if recorded != self._recorded:
            self._recorded = recorded
            tell_best(lambda: best.job, best.token_s, may_not_fit=recorded[1])

    def _may_not_fit(self, job: JobSpec) -> bool:
        """True if the account of a plan is not made yet, and closed forms leave it little room to spare."""
        return not self.is_judged(job) and self._needs_share(job) >= _SURE_ROOM

    def _has_more_to_look_at(self, kind: KindPlans, effort: Effort) -> bool:
        """True if the plans adjacent to the fastest fitting plan of a kind were not searched yet.

        Plans that do not fit are dropped on the way. A plan with room to spare by closed forms is searched around
        before its account is made.
        """
        while kind.plans:
            best = kind.best
            is_open = (plan_key(best.job), effort) not in kind.expanded
            if is_open and self._needs_share(best.job) < _SURE_ROOM:
                return True
            if self.fits(best.job):
                return is_open
            self.drop(kind, best)
        return False

    def drop(self, kind: KindPlans, plan: SimulatedPlan) -> None:
        """Drop a plan that does not fit, and add it with a smaller microbatch, which may fit and be nearly as fast."""
        del kind.plans[plan_key(plan.job)]
        smaller = plan.job.plan.microbatch_size // 2
        if smaller and self.constraints.allows("microbatch_size", smaller):
            smaller_job = plan.job.model_copy(
                update={"plan": plan.job.plan.model_copy(update={"microbatch_size": smaller})}
            )
            if self.times.has_simulated(smaller_job) or _is_legal(smaller_job):
                self.add(kind, [smaller_job])

    def _needs_share(self, job: JobSpec) -> float:
        """The share of the room that a plan needs by closed forms."""
        return float(peak_memory(run_of(job), self.constants, self.memo).process) / self.room

    def add(self, kind: KindPlans, jobs: Iterable[JobSpec]) -> None:
        """Simulate plans, each with its own layout and, if its even layout may not be the best one, with that."""
        new_jobs = {key: job for job in jobs if (key := plan_key(job)) not in kind.simulated}
        kind.simulated.update(new_jobs)
        self.times.simulate(
            [*new_jobs.values(), *(with_even_stages(job) for job in new_jobs.values() if job.plan.layout)]
        )
        laid_out_jobs = {key: laid_out for key, job in new_jobs.items() if (laid_out := self._paying_layout(job))}
        self.times.simulate(laid_out_jobs.values())
        for key, job in new_jobs.items():
            self._keep(kind, job, with_even_stages(job) if job.plan.layout else None)
            if key in laid_out_jobs:
                self._keep(kind, laid_out_jobs[key], job)

    def _keep(self, kind: KindPlans, job: JobSpec, even_job: JobSpec | None) -> None:
        """Add a simulated plan to its kind, unless its account has shown that it does not fit. `even_job` is the plan
        with even stages, if its own are uneven."""
        key = plan_key(job)
        if key not in self._judged or self._judged[key].fits:
            time = self.times.simulated(job)
            even_s = None if even_job is None else float(self.times.simulated(even_job).total)
            kind.plans[key] = SimulatedPlan(job, float(time.total) / job.tokens_per_step, time, even_s)

    def _lay_out_nearly_fastest(self, kind: KindPlans) -> None:
        """Simulate nearly fastest plans with a layer of their slowest rank moved to another one, if steps are short.

        A step waits not only for its slowest rank, so such a layout may be faster though its bound is not.
        """
        plans = [
            plan
            for key, plan in kind.plans.items()
            if plan.job.plan.layout and 0 < num_actions(plan.job) <= SHORT_STEP and key not in kind.laid_out
        ]
        near = [plan for plan in plans if plan.token_s < _nearly_s(kind.best)]
        layouts = {plan_key(plan.job): list(self._adjacent_layouts(plan.job, THOROUGH)) for plan in near}
        # Most of these will be asked for, unless some are much faster; together they take a fraction of the time.
        self.times.simulate_ahead(chain.from_iterable(layouts.values()))
        for plan in plans:
            if plan.token_s < _nearly_s(kind.best):
                key = plan_key(plan.job)
                kind.laid_out.add(key)
                self.add(kind, layouts[key] if key in layouts else self._adjacent_layouts(plan.job, THOROUGH))

    def _paying_layout(self, job: JobSpec) -> JobSpec | None:
        """A simulated plan with its best layout, if its layers are spread evenly and that may not be the best."""
        if not self.may_lay_out or not is_simulated(job) or job.plan.layout:
            return None
        total_s, (_, spare_s) = self.times.simulated(job).total, self.times.closed(job)
        least_gain = LEAST_GAIN if is_long(job) else _LEAST_SHARE
        if spare_s <= max(_LEAST_SPARE, least_gain) * total_s:
            return None
        key = plan_key(job)
        if key not in self.paying_layouts:
            self.paying_layouts[key] = paying_layout(job, self.constants, least_gain, room=self.room, memo=self.memo)
        return self.paying_layouts[key]

    def _closed_even_s(self, job: JobSpec) -> float:
        """Seconds a token, by closed forms, of an uneven plan if its stages were even; 0 if they are even."""
        return self.times.closed_token_s(with_even_stages(job)) if job.plan.layout else 0.0

    def fits(self, job: JobSpec) -> bool:
        """True if a plan is legal, and fits by the account that every command uses."""
        return self.judged(job).fits

    def judged(self, job: JobSpec) -> Judged:
        """A plan with its account, made once."""
        key = plan_key(job)
        if key not in self._judged:
            # The space has legal plans alone. Rules that it does not know hold here.
            fitting = _is_legal(job) and every_rank_has_room(
                job, self.constants, lambda memory: bool(fits(job, memory, self.room)), self.memo
            )
            self._judged[key] = Judged(job, fitting, known_accounts(job))
        return self._judged[key]

    def is_judged(self, job: JobSpec) -> bool:
        """True if the account of a plan was made before."""
        return plan_key(job) in self._judged

    def remember(self, judged: Judged) -> None:
        """Take over an account that a forked copy has made."""
        self._judged[plan_key(judged.job)] = judged
        take_over_accounts(judged.job, judged.accounts)

    def _adjacent(self, plans: Sequence[SimulatedPlan], effort: Effort) -> list[list[JobSpec]]:
        """For each plan its adjacent plans that may be faster and fit."""
        promising: list[list[Promising]] = [[] for _ in plans]
        jobs = [plan.job for plan in plans]
        base = SimulatedBase.of(
            [self.times.simulated(job) for job in jobs],
            jobs,
            [plan.token_s for plan in plans],
            closed_s=[self.times.closed_token_s(job) for job in jobs],
            even_s=[self._closed_even_s(job) for job in jobs],
        )
        schedules = np.array([SCHEDULES.names.index(job.plan.schedule) for job in jobs])
        for block in adjacent_blocks(self.job, self.constraints, self.rows, jobs, variants=self.variants):
            base_of = block.columns["near"]
            for plan in self._promising(block, base.select(base_of), block.schedule == schedules[base_of], effort):
                promising[plan.near].append(plan)
        adjacent = []
        for job, promising_plans in zip(jobs, promising, strict=True):
            simulated = [plan.job for plan in promising_plans if self.times.has_simulated(plan.job)]
            not_simulated = [plan for plan in promising_plans if not self.times.has_simulated(plan.job)]
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
                    num_actions(other_job) <= _LONGEST_STEP
                    and self.constraints.allows("virtual_stages", virtual)
                    and self.constraints.allows("microbatch_size", size)
                    and (self.times.has_simulated(other_job) or _is_legal(other_job))
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


def is_long(job: JobSpec) -> bool:
    """True if a step takes long to simulate."""
    return num_actions(job) > _LONG_STEP


def num_actions(job: JobSpec) -> int:
    """Stages times microbatches of a step; 0 if it is not simulated."""
    return job.plan.num_stages * job.num_microbatches if is_simulated(job) else 0


def _nearly_s(best: SimulatedPlan) -> float:
    """Seconds a token below which a plan is nearly as fast as the fastest one of its kind."""
    layers_share = 1 - (best.time.optimizer + best.time.host) / best.time.total
    return best.token_s * float(1 + _NEARLY * layers_share)
