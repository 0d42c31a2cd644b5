"""A schedule made by search for the real costs of the stages, within a given memory.

Named schedules assume equal stages and, mostly, F = I = W. If an embedding or a head makes a stage heavier, if W is
cheaper than I, or if messages are slow, their order is no longer the best. Qi et al. 2023 (arXiv 2401.10241, section
3.1) build one by rule for given costs and a memory limit; Qi et al. 2024 (arXiv 2405.15362) show how much less memory a
V of two stages per rank needs. Here both placements compete:

1. every named schedule that fits is timed;
2. orders are built forward in time by several policies (greedy.py);
3. the best of both are improved by local search (local_search.py);
4. the best of all is returned, with I and W joined to one B where no rank waits for the I.

So the result is never worse than a named schedule in the same memory. `lower_bound` bounds its distance from the
optimum.

The model is given as pieces, in order, equally many for each rank. In every placement the stages are equally long runs
of pieces: of 2p pieces, rank r holds pieces 2r and 2r + 1 in line, and r and 2p - 1 - r in a V. So all placements have
the same work to do, and the caller decides how finely the model can be cut.

Pairs of a forward and a backward that run as one are not built, but named schedules that have them do compete.

The result depends only on the arguments, so all ranks that ask get the same one. It is cached, because a job asks
several times.
"""

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import inf
from operator import attrgetter

from shardwright.schedule.action import Action, Kind
from shardwright.schedule.schedule import Schedule
from shardwright.schedule.solver.auto_model import STEPS, Model, fits, named_schedules, step_time
from shardwright.schedule.solver.greedy import construct_best
from shardwright.schedule.solver.local_search import improve
from shardwright.schedule.solver.lower_bound import Objective, placement_bound
from shardwright.schedule.solver.problem import KINDS, NONE, TINY, Clock, I, Problem, Rows
from shardwright.sharding.stage_placement import StagePlacement

_SIMULATED_OPERATIONS = 2_500_000  # in local search, at effort 1
_MOST_SIMULATIONS = 1500
_STARTS = 6  # orders that local search starts from
_STARTS_OF_A_PLACEMENT = (1, 2)  # the best of each placement, then the second


@lru_cache(maxsize=32)
def auto(model: Model, objective: Objective = "makespan", effort: float = 1.0) -> Schedule:
    """The shortest schedule found for a model. The objective is the end of one step, or the period of steps back to
    back. `effort` scales the time for local search."""
    contest = _Contest(model, objective)
    contest.enter_named()
    contest.enter_built()
    contest.improve(effort)
    return contest.winner()


def lower_bound(model: Model, objective: Objective = "makespan") -> float:
    """The time below which no schedule on any of the placements is possible (see lower_bound.py)."""
    return min(placement_bound(model.problem(placement), objective) for placement in model.placements())


@dataclass(frozen=True, slots=True)
class _Entry:
    """An order on a placement, and its time."""

    time: float
    problem: Problem
    rows: Rows


class _Contest:
    """The candidates on all placements."""

    def __init__(self, model: Model, objective: Objective) -> None:
        self._model, self._objective = model, objective
        self._problems = {placement: model.problem(placement) for placement in model.placements()}
        self._bounds = {placement: placement_bound(problem, objective) for placement, problem in self._problems.items()}
        self._named: tuple[float, Schedule] | None = None  # the best named schedule and its time
        self._entries: list[_Entry] = []

    def enter_named(self) -> None:
        """Enter every named schedule that fits."""
        model = self._model
        names = named_schedules(model.num_ranks, model.num_microbatches, len(model.sizes), model.stages_per_rank)
        for _, schedule in names:
            problem = self._problems.get(schedule.placement)
            if problem is None or not fits(schedule, problem.sizes, model.limits):
                continue
            time = step_time(schedule, problem.costs, self._objective)
            if self._named is None or time < self._named[0]:
                self._named = time, schedule
            rows = problem.rows(schedule)
            if rows is not None and all(problem.fits(rank, row) for rank, row in enumerate(rows)):
                self._enter(problem, rows)

    def enter_built(self) -> None:
        """Enter the orders of the policies, on the placements with one or two stages per rank, and on the placement of
        the best named schedule."""
        for placement in sorted(self._problems, key=self._bounds.__getitem__):
            problem, is_small = self._problems[placement], placement.num_stages <= 2 * self._model.num_ranks
            leads = self._named is not None and placement == self._named[1].placement
            if (is_small or leads or len(self._problems) == 1) and self._is_open(placement):
                score = partial(self._time, problem)
                built = construct_best(problem, score, self._bounds[placement])
                self._entries += [_Entry(time, problem, rows) for time, rows in built]

    def improve(self, effort: float) -> None:
        """Improve several different orders by local search, then the best of all for longer."""
        starts: list[_Entry] = []
        for most in _STARTS_OF_A_PLACEMENT:
            for entry in sorted(self._entries, key=attrgetter("time")):
                same = [start.time for start in starts if start.problem is entry.problem]
                if len(same) < most and all(entry.time > time * (1 + TINY) for time in same):
                    starts.append(entry)
        for seed, start in enumerate(starts[:_STARTS]):
            self._improve(start, effort / (2 * _STARTS), seed)
        if self._entries:
            self._improve(min(self._entries, key=attrgetter("time")), effort / 2, _STARTS)

    def winner(self) -> Schedule:
        """The best of all; a named one if nothing beats it."""
        time, best = self._named or (inf, None)
        if self._entries:
            entry = min(self._entries, key=attrgetter("time"))
            split = entry.problem.schedule("auto", entry.rows)
            for candidate in (_fused(entry.problem, entry.rows, self._clocks(entry.problem, entry.rows)[-1]), split):
                candidate_time = step_time(candidate, entry.problem.costs, self._objective)
                if candidate_time < time * (1 - TINY):
                    time, best = candidate_time, candidate
        assert best is not None, "a placement has room, and nothing was built on it"
        return replace(best, name="auto")

    def _enter(self, problem: Problem, rows: Rows) -> None:
        self._entries.append(_Entry(self._time(problem, rows), problem, rows))

    def _time(self, problem: Problem, rows: Rows) -> float:
        """The result of `step_time`, computed by the fast clock."""
        clocks = self._clocks(problem, rows)
        if self._objective == "makespan":
            return max(clocks[0].free)
        return (max(clocks[-1].free) - max(clocks[STEPS // 2 - 1].free)) / (STEPS - STEPS // 2)

    def _clocks(self, problem: Problem, rows: Rows) -> list[Clock]:
        """Clocks of one step, or of several steps back to back if the objective is the period."""
        clocks: list[Clock] = []
        for _ in range(1 if self._objective == "makespan" else STEPS):
            clock = problem.run(rows, *((clocks[-1].free, clocks[-1].links) if clocks else ()))
            assert clock is not None, "an order that stops for ever"
            clocks.append(clock)
        return clocks

    def _is_open(self, placement: StagePlacement) -> bool:
        """True if a placement can still win."""
        times = [entry.time for entry in self._entries] + ([self._named[0]] if self._named else [])
        return self._bounds[placement] < min(times, default=inf) * (1 - TINY)

    def _improve(self, entry: _Entry, effort: float, seed: int) -> None:
        problem, rows = entry.problem, entry.rows
        if not self._is_open(problem.placement):
            return
        goal = self._bounds[problem.placement]
        simulations = int(effort * min(_MOST_SIMULATIONS, _SIMULATED_OPERATIONS / len(problem.cost)))
        if self._objective == "makespan":
            self._enter(problem, improve(problem, rows, simulations, goal, seed=seed))
            return
        # Ranks begin a step at the times when they ended the step before. If each ends sooner after its own beginning,
        # the period is shorter. But that also changes the beginnings of the next step, so search twice.
        for turn in range(2):
            begin = self._clocks(problem, rows)[-2].free
            rows = improve(
                problem, rows, simulations // 2, goal, [time - min(begin) for time in begin], 2 * seed + turn
            )
            self._enter(problem, rows)


def _fused(problem: Problem, rows: Rows, clock: Clock) -> Schedule:
    """The schedule of an order, with I and W joined to one B if they are neighbours and no rank needs the product of I
    before W is done.

    One backward is simpler to run than its two halves. Every action keeps its time, so all these joins are valid
    together, if no message is delayed by another that now leaves later.
    """
    m, num_stages = problem.num_microbatches, problem.num_stages
    ranks = []
    for row in rows:
        actions: list[Action] = []
        next_leaves = inf  # when the gradient of this rank's next I leaves
        for position in reversed(range(len(row))):
            op = row[position]
            line, after = op // m, row[position + 1] if position + 1 < len(row) else NONE
            kind, stage = divmod(line, num_stages)
            if (
                kind == I
                and after == op + num_stages * m
                and _can_leave(problem, clock, op, clock.end[after], next_leaves=next_leaves)
            ):
                actions[-1] = Action(Kind.BACKWARD, stage, op % m)
            else:
                actions.append(Action(KINDS[kind], stage, op % m))
            next_leaves = clock.end[op] if kind == I else next_leaves
        ranks.append(tuple(reversed(actions)))
    return Schedule("auto", m, problem.placement, tuple(ranks))


def _can_leave(problem: Problem, clock: Clock, op: int, time: float, next_leaves: float) -> bool:
    """True if the product of an operation may leave as late as `time`."""
    line, consumer, slack = op // problem.num_microbatches, problem.consumer[op], problem.time_tolerance
    if consumer == NONE:
        return True
    in_time = time + problem.delay(line) <= clock.end[consumer] - problem.cost[consumer] + slack
    return in_time and (problem.transfer[line] == 0.0 or time + problem.transfer[line] <= next_leaves + slack)
