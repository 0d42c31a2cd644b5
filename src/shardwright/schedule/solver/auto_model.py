"""The input of the solver, as a problem for each placement, and the named schedules that compete with its result."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from shardwright.config.phrase import each, say
from shardwright.config.schedule_facts import SCHEDULES, ScheduleFacts
from shardwright.schedule.action import Kind
from shardwright.schedule.lowering.lower import lower
from shardwright.schedule.pipeline_shape import PipelineShape
from shardwright.schedule.schedule import Schedule
from shardwright.schedule.solver.lower_bound import Objective
from shardwright.schedule.solver.problem import TINY, Problem
from shardwright.schedule.timing import Costs, play
from shardwright.sharding.stage_placement import StagePlacement, in_line, looped, vee

STEPS = 4  # number of steps simulated for a period, which is the mean of the last two


@dataclass(frozen=True)
class Model:
    """The pieces of a model, the ranks that share them, the microbatches that pass them, and the room of each rank.

    `costs` are by piece; None stands for 2 equal pieces per rank, F = I = W. `most_alive` is the memory of each rank,
    or one number for all ranks. Its unit is microbatches of a full rank's layers, or the unit of `activations` if these
    are given: the memory of one microbatch in each piece. A microbatch is alive from its F to the end of its W.
    `stages_per_rank` and `placement` are free if None, else fixed. ValueError if lengths don't fit, or memory is too
    small for one microbatch.
    """

    num_ranks: int
    num_microbatches: int
    costs: Costs | None = None
    most_alive: float | tuple[float, ...] | None = None
    activations: tuple[float, ...] = ()
    stages_per_rank: int | None = None
    placement: StagePlacement | None = None

    def __post_init__(self) -> None:
        costs, num_ranks = self.piece_costs, self.num_ranks
        pieces, shares = len(costs.forward), (self.stages_per_rank or 1) * num_ranks
        if pieces == 0 or pieces % shares:
            each_has = say(" with {stages} stages each", stages=self.stages_per_rank) if self.stages_per_rank else ""
            raise ValueError(
                say(
                    "costs are of {pieces} pieces of the model, which {ranks} ranks{stages} can't share equally; give "
                    "those of {shares} pieces, or of a multiple",
                    pieces=pieces,
                    ranks=num_ranks,
                    stages=each_has,
                    shares=shares,
                )
            )
        for name, values, lengths in (
            ("input_grad", costs.input_grad, (pieces,)),
            ("weight_grad", costs.weight_grad, (pieces,)),
            ("transfer", costs.transfer, (0, pieces - 1)),
            ("reduce", costs.reduce, (0, pieces)),
            ("activations", self.activations, (0, pieces)),
        ):
            if len(values) not in lengths:
                raise ValueError(
                    say(
                        "{name} has {count} values; {pieces} pieces need {needed}",
                        name=name,
                        count=len(values),
                        pieces=pieces,
                        needed=lengths[-1],
                    )
                )
        if len(self.limits) != num_ranks:
            raise ValueError(
                say(
                    "most_alive has {count} values; give one number, or one for each of {ranks}",
                    count=len(self.limits),
                    ranks=num_ranks,
                )
            )
        if not self.placements():
            raise ValueError(
                say("{lacks}; allow more, or make microbatches smaller", lacks=each(self._lacks(self._cuts()[0])))
            )

    @cached_property
    def piece_costs(self) -> Costs:
        """The costs of each piece."""
        return self.costs or Costs.uniform((self.stages_per_rank or 2) * self.num_ranks)

    @property
    def sizes(self) -> tuple[float, ...]:
        """The memory of one microbatch's activations, by piece."""
        pieces = len(self.piece_costs.forward)
        return self.activations or (self.num_ranks / pieces,) * pieces

    @property
    def limits(self) -> tuple[float, ...]:
        """The memory for activations, by rank."""
        most = inf if self.most_alive is None else self.most_alive
        return most if isinstance(most, tuple) else (most,) * self.num_ranks

    def _cuts(self) -> list[StagePlacement]:
        """All ways to lay equally long runs of pieces on the ranks."""
        p, pieces, placements = self.num_ranks, len(self.sizes), list[StagePlacement]()
        for v in range(1, pieces // p + 1):
            if pieces % (p * v) == 0 and self.stages_per_rank in (None, v):
                placements += [in_line(p)] if v == 1 else [vee(p), looped(p, v)] if v == 2 else [looped(p, v)]
        return placements

    def _lacks(self, placement: StagePlacement) -> list[str]:
        """Faults of the ranks that can't hold a single microbatch."""
        sizes = runs(self.sizes, placement.num_stages)
        needs = [sum(sizes[stage] for stage in placement.stages_of(rank)) for rank in range(self.num_ranks)]
        return [
            say(
                "rank {rank} keeps {need:g} for one microbatch, and may keep {limit:g}",
                rank=rank,
                need=need,
                limit=limit,
            )
            for rank, (need, limit) in enumerate(zip(needs, self.limits, strict=True))
            if need > limit * (1 + TINY)
        ]

    def placements(self) -> list[StagePlacement]:
        """The placements on which every rank can hold at least one microbatch."""
        candidates = [placement for placement in self._cuts() if self.placement in (None, placement)]
        return [placement for placement in candidates if not self._lacks(placement)]

    def problem(self, placement: StagePlacement) -> Problem:
        """The problem on one placement."""
        num_stages = placement.num_stages
        costs, sizes = by_stage(self.piece_costs, num_stages), runs(self.sizes, num_stages)
        return Problem(placement, self.num_microbatches, costs, sizes, limits=self.limits)


def by_stage(costs: Costs, num_stages: int) -> Costs:
    """Costs by stage from costs by piece; stages are equally long runs of pieces."""
    length = len(costs.forward) // num_stages
    return replace(
        costs,
        forward=runs(costs.forward, num_stages),
        input_grad=runs(costs.input_grad, num_stages),
        weight_grad=runs(costs.weight_grad, num_stages),
        transfer=costs.transfer[length - 1 :: length],
        reduce=runs(costs.reduce, num_stages) if costs.reduce else (),
    )


def runs(values: Sequence[float], num_runs: int) -> tuple[float, ...]:
    """Sums of values over equally long runs."""
    length = len(values) // num_runs
    return tuple(sum(values[n * length : (n + 1) * length]) for n in range(num_runs))


def named_schedules(
    num_ranks: int, num_microbatches: int, num_pieces: int, stages_per_rank: int | None = None
) -> Iterator[tuple[str, Schedule]]:
    """The named schedules that a solver's schedule competes with: those that update once a step and hold the parameters
    once."""
    p, m = num_ranks, num_microbatches
    for v in range(1, num_pieces // p + 1):
        if num_pieces % (p * v) or stages_per_rank not in (None, v):
            continue
        for facts in SCHEDULES.values():
            is_rival = facts.drains and facts.num_copies == 1 and facts.name != "auto"
            if is_rival and (facts.stages_per_rank or max(v, 2)) == v:  # 0 stages per rank means 2 or more
                yield from (
                    (name, facts.make(shape)) for name, shape in _shapes(facts, p, m, v) if not facts.faults(shape)
                )


def _shapes(facts: ScheduleFacts, p: int, m: int, v: int) -> Iterator[tuple[str, PipelineShape]]:
    """A schedule's shapes for v stages per rank, each with its name."""
    name, shape = facts.name, PipelineShape(p, m, v)
    if facts.stages_per_rank == 0:
        name += f", {v} stages"
    if "group" in facts.understands:
        yield from ((f"{name}, groups of {group}", replace(shape, group=group)) for group in (p, 2 * p))
        return
    yield name, shape
    if "extra_warmup" in facts.understands:
        yield f"{name}, doubled warm-up", replace(shape, extra_warmup=p - 1)


def step_time(schedule: Schedule, costs: Costs, objective: Objective = "makespan") -> float:
    """Makespan or period of a schedule; costs are by stage.

    The period is the mean of the last two of four steps back to back, in which a rank begins a step as soon as it has
    ended the step before.
    """
    program = lower(schedule)
    if objective == "makespan":
        return play(program, costs).makespan
    times = play(program, costs, STEPS)
    return (times.makespan - max(row[len(row) // 2 - 1] for row in times.end)) / (STEPS - STEPS // 2)


def fits(schedule: Schedule, sizes: Sequence[float], limits: Sequence[float]) -> bool:
    """True if each rank keeps within its limit; `sizes` are one microbatch's activations, by stage."""
    for row, limit in zip(schedule.ranks, limits, strict=True):
        alive = 0.0
        for action in row:
            parts = action.computes()
            alive += sum(sizes[part.stage] for part in parts if part.kind is Kind.FORWARD)
            if alive > limit * (1 + TINY):
                return False
            alive -= sum(
                sizes[part.stage]
                for part in parts
                if part.kind is Kind.WEIGHT_GRAD
                or (part.kind is Kind.BACKWARD and (part.stage, part.microbatch) not in schedule.split_backwards)
            )
    return True
