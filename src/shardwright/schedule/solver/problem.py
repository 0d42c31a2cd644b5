"""The problem that the search for a schedule solves: actions as integers, and a fast clock for them.

An operation is a number, (kind * S + stage) * m + microbatch, with kind 0 for F, 1 for I and 2 for W, S stages and m
microbatches. Its line is kind * S + stage, so operation // m. An order is a list of operations for each rank. Each line
keeps the order of the microbatches: they are alike, so no better order is lost, and gradients are summed in the order
in which one rank would sum them.

The clock is that of timing.play, for one copy of the parameters, and sends and receives are not actions: an operation
starts when its rank is free and the one product that it awaits has arrived. Tests hold the two clocks equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.schedule.action import Action, Kind
from shardwright.schedule.dependencies import MAKES, NEEDS, TRAVELS, Need
from shardwright.schedule.schedule import Order, Schedule
from shardwright.schedule.timing import Costs
from shardwright.sharding.stage_placement import StagePlacement

KINDS = (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
F, I, W = range(3)  # noqa: E741
NONE = -1
TINY = 1e-9

Rows = list[list[int]]


@dataclass(frozen=True, slots=True)
class Clock:
    """The times of one step. `free` and `links` are the state with which the next step begins."""

    end: list[float]  # by operation
    arrival: list[float]  # by operation: when its product arrives at its consumer
    order: list[int]  # the operations, each after all that it waited for
    free: list[float]  # by rank: when its optimizer step is over
    links: list[float]  # when each link is free: of each rank, the link down the pipeline and the link up


class Problem:
    """Microbatches through a placement: the costs and activations of its stages, and the memory limits of its ranks."""

    def __init__(
        self,
        placement: StagePlacement,
        num_microbatches: int,
        costs: Costs,
        sizes: Sequence[float],
        limits: Sequence[float],
    ) -> None:
        """Costs and sizes (of one microbatch's activations) by stage, limits by rank."""
        self.placement, self.costs, self.num_microbatches = placement, costs, num_microbatches
        self.num_ranks, self.num_stages = placement.num_ranks, placement.num_stages
        self.sizes, self.limits = tuple(sizes), tuple(limit * (1 + TINY) for limit in limits)
        self.stages_of = [placement.stages_of(rank) for rank in range(self.num_ranks)]
        self.times = (costs.forward, costs.input_grad, costs.weight_grad)
        stages, m = range(self.num_stages), num_microbatches
        self.rank_of = [placement.holders[0][stage] for _ in range(3) for stage in stages]  # by line
        work = [sum(times[stage] for times in self.times for stage in stages) for stages in self.stages_of]
        self.period = max(work)  # of the busiest rank, for one microbatch
        self.time_tolerance = TINY * self.period  # times that differ by less count as equal
        self.cost = [self.times[kind][stage] for kind in range(3) for stage in stages for _ in range(m)]
        # By operation: the operation that makes its input, and the operation that uses its product.
        self.producer = [NONE] * len(self.cost)
        self.consumer = [NONE] * len(self.cost)
        # By line: the link of its product, NONE if it stays on its rank; and how long the product occupies the link.
        self.link = [NONE] * (3 * self.num_stages)
        self.transfer = [0.0] * (3 * self.num_stages)
        for number, kind in enumerate(KINDS):
            if kind not in MAKES:
                continue
            product, travels = MAKES[kind], TRAVELS[MAKES[kind]]
            assert Need(product, -travels) in NEEDS[kind], "what a stage makes, the next one needs for the same"
            for stage in stages:
                if 0 <= stage + travels < self.num_stages:
                    border = stage + min(travels, 0)
                    self._connect(self.line(number, stage), self.line(number, stage + travels), product, border)
        self._connect(self.line(F, stages[-1]), self.line(I, stages[-1]), 0, 0)  # the loss
        self._walk_chain()

    def line(self, kind: int, stage: int) -> int:
        """The number of the line of a kind and a stage."""
        return kind * self.num_stages + stage

    def _connect(self, producer: int, consumer: int, direction: int, border: int) -> None:
        m = self.num_microbatches
        self.consumer[producer * m : (producer + 1) * m] = range(consumer * m, (consumer + 1) * m)
        self.producer[consumer * m : (consumer + 1) * m] = range(producer * m, (producer + 1) * m)
        if self.rank_of[producer] != self.rank_of[consumer]:
            self.link[producer] = 2 * self.rank_of[producer] + direction
            self.transfer[producer] = self.costs.transfer[border] if self.costs.transfer else 0.0

    def delay(self, line: int) -> float:
        """The least time that a product of a line travels."""
        return 0.0 if self.link[line] == NONE else self.transfer[line] + self.costs.latency

    def _walk_chain(self) -> None:
        """Time one microbatch alone, forward and back: the earliest start of F (`forward_start`) and of I
        (`backward_start`) on each stage."""
        now = 0.0
        self.forward_start, self.backward_start = [0.0] * self.num_stages, [0.0] * self.num_stages
        for stage in range(self.num_stages):
            self.forward_start[stage] = now
            now += self.costs.forward[stage] + self.delay(self.line(F, stage))
        for stage in reversed(range(self.num_stages)):
            self.backward_start[stage] = now
            now += self.costs.input_grad[stage] + self.delay(self.line(I, stage))

    def run(self, rows: Rows, begin: Sequence[float] = (), links: Sequence[float] = ()) -> Clock | None:
        """Simulate an order, with ranks and links free from the given times on. None if it deadlocks."""
        free = list(begin) or [0.0] * self.num_ranks
        links = list(links) or [0.0] * (2 * self.num_ranks)
        cost, producer, consumer, link_of, transfer = self.cost, self.producer, self.consumer, self.link, self.transfer
        m, latency = self.num_microbatches, self.costs.latency
        end, arrival = [0.0] * len(cost), [-1.0] * len(cost)
        waiter = [NONE] * len(cost)
        position = [0] * self.num_ranks
        order: list[int] = []
        runnable = list(range(self.num_ranks))
        while runnable:
            rank = runnable.pop()
            row, now, index = rows[rank], free[rank], position[rank]
            while index < len(row):
                op = row[index]
                needed = producer[op]
                if needed >= 0:
                    arrived = arrival[needed]
                    if arrived < 0.0:
                        waiter[needed] = rank
                        break
                    if arrived > now:
                        now = arrived
                now += cost[op]
                end[op] = now
                order.append(op)
                if consumer[op] >= 0:
                    link = link_of[op // m]
                    if link < 0:
                        arrival[op] = now
                    else:
                        links[link] = (links[link] if links[link] > now else now) + transfer[op // m]
                        arrival[op] = links[link] + latency
                    if waiter[op] >= 0:
                        runnable.append(waiter[op])
                index += 1
            position[rank], free[rank] = index, now
        if len(order) < sum(map(len, rows)):
            return None
        free = [self._after_step(rank, now, end) for rank, now in enumerate(free)]
        return Clock(end, arrival, order, free, links=links)

    def _after_step(self, rank: int, now: float, end: list[float]) -> float:
        """When a rank has reduced its gradients, in the order in which they are complete, and has taken its step."""
        if self.costs.reduce:
            m, reduced = self.num_microbatches, 0.0
            complete = [(end[self.line(W, stage) * m + m - 1], stage) for stage in self.stages_of[rank]]
            for time, stage in sorted(complete):
                reduced = max(reduced, time) + self.costs.reduce[stage]
            now = max(now, reduced)
        return now + self.costs.step

    def fits(self, rank: int, row: Sequence[int]) -> bool:
        """True if a rank's order keeps within its memory."""
        m, num_stages, limit, alive = self.num_microbatches, self.num_stages, self.limits[rank], 0.0
        for op in row:
            line = op // m
            if line < num_stages:
                alive += self.sizes[line]
                if alive > limit:
                    return False
            elif line >= 2 * num_stages:
                alive -= self.sizes[line - 2 * num_stages]
        return True

    def schedule(self, name: str, rows: Rows) -> Schedule:
        """The schedule of an order."""
        m, num_stages = self.num_microbatches, self.num_stages
        ranks: Order = tuple(
            tuple(Action(KINDS[op // m // num_stages], op // m % num_stages, op % m) for op in row) for row in rows
        )
        return Schedule(name, m, self.placement, ranks)

    def rows(self, schedule: Schedule) -> Rows | None:
        """The order of a schedule, with backwards split and pairs apart. None if a line has its microbatches out of
        order."""
        m, seen, rows = self.num_microbatches, [0] * (3 * self.num_stages), []
        for actions in schedule.ranks:
            row = []
            for part in (part for action in actions for part in action.computes()):
                for kind in (I, W) if part.kind is Kind.BACKWARD else (KINDS.index(part.kind),):
                    line = self.line(kind, part.stage)
                    if seen[line] != part.microbatch:
                        return None
                    seen[line] += 1
                    row.append(line * m + part.microbatch)
            rows.append(row)
        return rows
