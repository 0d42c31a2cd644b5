"""The plans that a search finds, simulated in full: closed forms find several of each kind, and here one is chosen.

A step is simulated in the plan's own order of work, with layers spread evenly over its stages and, where that is
faster, with uneven stages. The plans beside the fastest one of a kind are looked at, and those beside the fastest of
these, until none is faster. Of this runtime the account then says whether that one fits; where it does not, the next
one is taken, and what is beside it looked at.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.config.checks.check import job_faults
from shardwright.config.host_memory import host_room_bytes
from shardwright.config.job import JobSpec
from shardwright.config.plan import STAGES_PER_RANK
from shardwright.cost.calibration import Constants
from shardwright.cost.from_job import run_of
from shardwright.cost.job_memories import every_rank_has_room
from shardwright.cost.memory import peak_memory
from shardwright.planner.search.beside import blocks_beside, same_stages
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.plan_block import Column, Columns, PlanBlock
from shardwright.planner.search.plan_price import fits, prices
from shardwright.planner.search.promising import QUICK, THOROUGH, UNEVEN, InSight, Look, Promising, by_turns
from shardwright.planner.search.results import FoundPlace, PlayedPlan
from shardwright.planner.stages.best_layout import LEAST_GAIN, layouts_beside, paying_layout
from shardwright.schedule.job_program import plan_faults
from shardwright.simulate.closed_form import StepTime, step_time_and_spare
from shardwright.simulate.full_step import is_played, played_steps
from shardwright.workload.memo import Memo
from shardwright.workload.query import SCHEDULE_NAMES

_MORE = 1e-6  # share of a step: a smaller gain counts as none
_SPARE = 1e-3  # share of a step that uneven stages must be able to save
_LEAST_RATIO = 0.9  # of a simulated step to closed forms: the search relies on no lower one
_FIRST_RATIO = 0.99  # of the same, before any plan was simulated
_LOOKED_AROUND = 3  # kinds whose fastest plan is looked around thoroughly, once it is known, though its step is long
_FEW_ACTIONS = 2**9  # stages times microbatches with which a simulation takes no time: all such are looked around
_SURE_ROOM = (
    0.9  # share of a device that a plan may need by closed forms and be taken to fit, until its account is known
)
_NEARLY = 1.03  # times the fastest plan of a kind: so near layouts beside are simulated too
_MOST_ROUNDS = 24  # of looks beside the fastest plans, where one after another is found not to fit
_AROUND = 2  # kinds with long steps for which plans beside the fastest are looked at
_MANY_ACTIONS = 2**10  # stages times microbatches above which a simulation takes long
_MOST_ACTIONS = 2**11  # above which it takes a fifth of a second


@dataclass
class _Kind:
    """The plans of a kind by their fields: those that may fit of all that were simulated; and of which those beside
    them were looked at, and how, and which were laid out otherwise."""

    plans: dict[str, PlayedPlan] = field(default_factory=dict)
    simulated: set[str] = field(default_factory=set)
    expanded: set[tuple[str, Look]] = field(default_factory=set)
    laid_out: set[str] = field(default_factory=set)


class PlayedPlans:
    """Steps of plans that were simulated, and plans that were found to fit or not, in `room` bytes of a device.

    `rows` are the degrees of the space, and `least_ratio` is that of a simulated step to what closed forms say of it,
    the least so far.
    """

    def __init__(
        self, job: JobSpec, constraints: Constraints, constants: Constants, rows: Columns, room: float, memo: Memo
    ) -> None:
        self.job, self.constraints, self.constants = job, constraints, constants
        self.rows, self.room, self.memo = rows, room, memo
        self.may_lay_out = "layout" not in constraints.among
        self.host_room = host_room_bytes(job.cluster)
        self.least_ratio = _FIRST_RATIO
        self.refuted: dict[str, JobSpec] = {}
        self._fits: dict[str, bool] = {}
        self._times: dict[str, tuple[StepTime, float]] = {}
        self._closed_s: dict[str, float] = {}

    @property
    def num_played(self) -> int:
        """Plans that were simulated."""
        return len(self._times)

    def fastest(self, kinds: Sequence[Sequence[FoundPlace]], num_shown: int) -> list[PlayedPlan]:
        """The fastest plan of each kind that fits, of `num_shown` kinds, fastest first.

        Kinds are given by what their plans take at least. Those of which none fits are left out, and their fastest plan
        is put to `refuted`.
        """
        chosen: list[tuple[Sequence[FoundPlace], _Kind]] = []
        for places in kinds:
            best_s = sorted(self._best(kind).token_s for _, kind in chosen)
            if len(best_s) >= num_shown and self.least_ratio * places[0].token_s >= best_s[num_shown - 1]:
                break
            kind = self._kind_of(places, len(chosen) < _AROUND)
            if kind.plans:
                chosen.append((places, kind))
            else:  # an earlier call has seen that none of them fits
                self._refute(places)
        chosen.sort(key=lambda one: self._best(one[1]).token_s)
        kinds_shown = [kind for _, kind in chosen[:num_shown]]
        self._improve(kinds_shown, QUICK)
        with_plans = sorted((kind for kind in kinds_shown if kind.plans), key=lambda kind: self._best(kind).token_s)
        first = [
            kind
            for n, kind in enumerate(with_plans)
            if n < _LOOKED_AROUND or _actions(self._best(kind).job) <= _FEW_ACTIONS
        ]
        self._improve(first, THOROUGH)
        uneven = [kind for kind in first if kind.plans and self._best(kind).job.plan.layout]
        self._improve([kind for kind in uneven if not _has_many_actions(self._best(kind).job)], UNEVEN)
        shown = []
        for places, kind in chosen:
            if self._has_fitting(kind):
                shown.append(self._best(kind))
            else:
                self._refute(places)
        return sorted(shown, key=_seconds)[:num_shown]

    def _refute(self, places: Sequence[FoundPlace]) -> None:
        job = places[0].block.plan(places[0].index, self.job)
        self.refuted[_key(job)] = job

    def _kind_of(self, places: Sequence[FoundPlace], is_among_first: bool) -> _Kind:
        """A kind with those of its plans that may be the fastest; of long steps fewer."""
        kind, is_long = _Kind(), _has_many_actions(places[0].block.plan(places[0].index, self.job))
        for place in places[: 1 + is_among_first if is_long else None]:
            if kind.plans and self.least_ratio * place.token_s >= self._best(kind).token_s:
                break
            self._add(kind, [place.block.plan(place.index, self.job)])
        return kind

    def _best(self, kind: _Kind) -> PlayedPlan:
        return min(kind.plans.values(), key=_seconds)

    def _improve(self, kinds: Sequence[_Kind], look: Look) -> None:
        """Add the plans beside the fastest one of each kind, until that one is known to fit and none is faster."""
        # Of the longest steps only the first kinds are looked around.
        open_kinds = [
            kind for n, kind in enumerate(kinds) if n < _AROUND or _actions(self._best(kind).job) <= _MOST_ACTIONS
        ]
        open_kinds, num_rounds = [kind for kind in open_kinds if self._is_open(kind, look)], 0
        while open_kinds and num_rounds < _MOST_ROUNDS:
            num_rounds += 1
            best = [self._best(kind) for kind in open_kinds]
            beside = self._beside(best, look)
            for kind, plan, tried in zip(open_kinds, best, beside, strict=True):
                kind.expanded.add((_key(plan.job), look))
                self._add(kind, tried)
                if look.equal_layouts:
                    self._lay_out_nearly_fastest(kind)
            open_kinds = [kind for kind in open_kinds if self._is_open(kind, look)]

    def _is_open(self, kind: _Kind, look: Look) -> bool:
        """Whether what is beside the fastest plan of a kind that fits was not looked at yet. Those that do not fit are
        taken out of it; one with room to spare by closed forms is looked around before its account is asked for."""
        while kind.plans:
            best = self._best(kind)
            is_open = (_key(best.job), look) not in kind.expanded
            if is_open and self._needs_share(best.job) < _SURE_ROOM:
                return True
            if self.fits(best.job):
                return is_open
            self._leave_out(kind, best)
        return False

    def _leave_out(self, kind: _Kind, plan: PlayedPlan) -> None:
        """Take a plan that does not fit out of a kind; with a smaller microbatch it may fit, and be nearly as fast."""
        del kind.plans[_key(plan.job)]
        smaller = plan.job.plan.microbatch_size // 2
        if smaller and self.constraints.allows("microbatch_size", smaller):
            other = plan.job.model_copy(update={"plan": plan.job.plan.model_copy(update={"microbatch_size": smaller})})
            if _key(other) in self._times or not (job_faults(other) or plan_faults(other)):
                self._add(kind, [other])

    def _needs_share(self, job: JobSpec) -> float:
        """Share of the room that a plan needs, as closed forms say."""
        return float(peak_memory(run_of(job), self.constants, self.memo).process) / self.room

    def _has_fitting(self, kind: _Kind) -> bool:
        """Whether some plan of a kind fits. Faster ones that do not are taken out of it."""
        while kind.plans and not self.fits((best := self._best(kind)).job):
            self._leave_out(kind, best)
        return bool(kind.plans)

    def _add(self, kind: _Kind, jobs: Iterable[JobSpec]) -> None:
        """Simulate plans, each with layers as they are and as they are best."""
        for job in jobs:
            if (mine := _key(job)) in kind.simulated:
                continue
            kind.simulated.add(mine)
            for plan in self._played(job):
                key = _key(plan.job)
                if self._fits.get(key, True):
                    kind.plans[key] = plan

    def _lay_out_nearly_fastest(self, kind: _Kind) -> None:
        """Simulate the plans of a kind that are nearly the fastest with a layer of their slowest rank elsewhere, where
        steps are short: the slowest rank is not all that a step waits for."""
        for plan in list(kind.plans.values()):
            is_short = 0 < _actions(plan.job) <= _FEW_ACTIONS
            if not (plan.job.plan.layout and is_short and plan.token_s < _NEARLY * self._best(kind).token_s):
                continue
            if (key := _key(plan.job)) not in kind.laid_out:
                kind.laid_out.add(key)
                self._add(kind, self._layouts_beside(plan.job, THOROUGH))

    def _played(self, job: JobSpec) -> Iterator[PlayedPlan]:
        """A plan and, where its layers are spread evenly and that may not be best, the same with its best layout."""
        time, spare_s = self._time(job)
        even_s = self._even_s(job) if job.plan.layout else None
        yield PlayedPlan(job, float(time.total) / job.tokens_per_step, time, even_s)
        least_gain = LEAST_GAIN if _has_many_actions(job) else _MORE
        least_spare = max(_SPARE, least_gain) * time.total
        if self.may_lay_out and is_played(job) and not job.plan.layout and spare_s > least_spare:
            laid = paying_layout(job, self.constants, least_gain, self.memo)
            if laid is not None:
                laid_time, _ = self._time(laid)
                token_s = float(laid_time.total) / job.tokens_per_step
                yield PlayedPlan(laid, token_s, laid_time, even_s=float(time.total))

    def _even_s(self, job: JobSpec) -> float:
        return float(self._time(_even(job))[0].total)

    def _closed_even_s(self, job: JobSpec) -> float:
        """Seconds by token that closed forms say of an uneven plan with even stages; 0 of an even one."""
        if not job.plan.layout:
            return 0.0
        even = _even(job)
        self._time(even)
        return self._closed_s[_key(even)] / job.tokens_per_step

    def _time(self, job: JobSpec) -> tuple[StepTime, float]:
        """(a step, simulated in full, and what no layout makes it shorter by as closed forms say)."""
        key = _key(job)
        if key not in self._times:
            time, spare_s = step_time_and_spare(run_of(job), self.constants, self.memo)
            (played,) = played_steps([job], [time], self.constants)
            self._times[key] = played, float(spare_s)
            self._closed_s[key] = float(time.total)
            ratio = float(played.total / time.total)
            self.least_ratio = min(self.least_ratio, max(_LEAST_RATIO, ratio))
        return self._times[key]

    def fits(self, job: JobSpec) -> bool:
        """Whether a plan fits, as every command says."""
        key = _key(job)
        if key not in self._fits:
            self._fits[key] = every_rank_has_room(
                job, self.constants, lambda memory: bool(fits(job, memory, self.room)), self.memo
            )
        return self._fits[key]

    def _beside(self, plans: Sequence[PlayedPlan], look: Look) -> list[list[JobSpec]]:
        """The plans beside each of some that may be faster and fit."""
        promising: list[list[Promising]] = [[] for _ in plans]
        jobs = [plan.job for plan in plans]
        now = InSight.of(
            [self._time(job)[0] for job in jobs], jobs, [plan.token_s for plan in plans],
            closed_s=[self._closed_s[_key(job)] / job.tokens_per_step for job in jobs],
            even_s=[self._closed_even_s(job) for job in jobs],
        )  # fmt: skip
        schedules = np.array([SCHEDULE_NAMES.index(job.plan.schedule) for job in jobs])
        for block in blocks_beside(self.job, self.constraints, self.rows, jobs):
            beside_of = block.columns["near"]
            for plan in self._promising(block, now.taken(beside_of), block.schedule == schedules[beside_of], look):
                promising[plan.near].append(plan)
        beside = []
        for job, near in zip(jobs, promising, strict=True):
            known = [plan.job for plan in near if _key(plan.job) in self._times]
            unknown = [plan for plan in near if _key(plan.job) not in self._times]
            tried = [*known, *by_turns(unknown)[: look.most_like(job)]]
            laid_out = [same for other in tried for same in _with_layout_kept(other, job)]
            beside.append([*tried, *laid_out, *self._layouts_beside(job, look), *self._virtual_beside(job)])
        return beside

    def _layouts_beside(self, job: JobSpec, look: Look) -> Iterator[JobSpec]:
        if self.may_lay_out and is_played(job):
            yield from layouts_beside(job, self.constants, self.memo, may_be_equal=look.equal_layouts)

    def _virtual_beside(self, job: JobSpec) -> Iterator[JobSpec]:
        """The plan with other numbers of stages a rank, where it may have any: closed forms do not say which of them
        hides its messages."""
        plan = job.plan
        if STAGES_PER_RANK.get(plan.schedule, 1) or plan.pp == 1 or plan.layout:
            return
        most = job.model.layers // plan.pp
        for virtual in sorted({2, most, plan.virtual_stages * 2, plan.virtual_stages // 2, plan.virtual_stages + 1}):
            changes = {"virtual_stages": virtual, "extra_warmup": 0, "most_alive": 0.0}
            other = job.model_copy(update={"plan": plan.model_copy(update=changes)})
            if (
                _actions(other) <= _MOST_ACTIONS
                and self.constraints.allows("virtual_stages", virtual)
                and (_key(other) in self._times or not (job_faults(other) or plan_faults(other)))
            ):
                yield other

    def _promising(self, block: PlanBlock, now: InSight, is_alike: Column, look: Look) -> Iterator[Promising]:
        """The plans of a block that may be faster than those beside which they are, and fit; some of the same
        schedule."""
        priced = prices(self.job, block, self.constants, self.memo)
        host, process = (np.broadcast_to(of, now.token_s.shape) for of in (priced.memory.host, priced.memory.process))
        tokens = block.columns["global_batch_size"] * self.job.model.sequence
        hoped_s = now.hoped_s(priced.laid_out_s, priced.time, tokens, is_alike, look)
        may_fit = (process <= look.room * self.room) & (host <= self.host_room)
        for index in np.flatnonzero(may_fit & (hoped_s * (1 + _MORE) < now.token_s)).tolist():
            near, job = int(block.columns["near"][index]), block.plan(index, self.job)
            yield Promising(near, float(hoped_s[index]), float(priced.laid_out_s[index]), job)


def _with_layout_kept(job: JobSpec, beside: JobSpec) -> list[JobSpec]:
    """A plan with the layout of one beside it, where that has one and stages lie as there."""
    plan, other = job.plan, beside.plan
    if not other.layout or not same_stages(other, plan):
        return []
    return [job.model_copy(update={"plan": plan.model_copy(update={"layout": list(other.layout)})})]


def _even(job: JobSpec) -> JobSpec:
    return job.model_copy(update={"plan": job.plan.model_copy(update={"layout": []})})


def _has_many_actions(job: JobSpec) -> bool:
    """Whether a step takes long to simulate."""
    return _actions(job) > _MANY_ACTIONS


def _actions(job: JobSpec) -> int:
    """Stages times microbatches of a step that is simulated."""
    return job.plan.num_stages * job.num_microbatches if is_played(job) else 0


def _key(job: JobSpec) -> str:
    return job.model_dump_json(include={"plan", "batch", "precision"})


def _seconds(plan: PlayedPlan) -> float:
    return plan.token_s
