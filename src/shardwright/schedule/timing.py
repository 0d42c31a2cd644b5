"""When each action of a program runs, given what each one costs.

Every rank has resources that work side by side: compute, one outgoing link for each direction of the pipeline, and
collectives. Actions on one resource run in the order of the program. So no event queue is needed: the start of an
action is the latest of its resource becoming free and its inputs being there, and one pass over the actions in an
order that respects both gives all times.

Units of time are the caller's: F = 1 for a table of bubbles, seconds for a prediction.
"""

from dataclasses import dataclass

from shardwright.schedule.action import Action, Kind
from shardwright.schedule.schedule import Program


@dataclass(frozen=True)
class Costs:
    """What actions take. Tuples are by stage.

    `transfer[s]` is how long a message over the border between stages s and s + 1 occupies its link; `latency` more
    passes until it is there, and holds up nobody but the receiver. An overlapped pair takes `pair` times the sum of
    its parts. `reduce[s]` is a stage's gradient reduction, `step` the optimizer's.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    transfer: tuple[float, ...] = ()
    latency: float = 0.0
    pair: float = 1.0
    reduce: tuple[float, ...] = ()
    step: float = 0.0

    @classmethod
    def uniform(
        cls, num_stages: int, forward: float = 1.0, input_grad: float = 1.0, weight_grad: float = 1.0,
        latency: float = 0.0,
    ) -> "Costs":  # fmt: skip
        """Equal stages, messages without size."""
        return cls((forward,) * num_stages, (input_grad,) * num_stages, (weight_grad,) * num_stages, latency=latency)

    def compute(self, action: Action) -> float:
        """What a compute action takes; an overlapped pair less than its parts, maybe."""
        stage = action.stage
        match action.kind:
            case Kind.FORWARD:
                return self.forward[stage]
            case Kind.BACKWARD:
                return self.input_grad[stage] + self.weight_grad[stage]
            case Kind.INPUT_GRAD:
                return self.input_grad[stage]
            case Kind.WEIGHT_GRAD:
                return self.weight_grad[stage]
            case Kind.OVERLAP:
                return self.pair * sum(self.compute(part) for part in action.parts)
        raise ValueError(f"{action} computes nothing")


@dataclass(frozen=True)
class Times:
    """Start and end of every action, by rank, in the order of the program's lists (one after the other for steps)."""

    rows: tuple[tuple[Action, ...], ...]
    start: list[list[float]]
    end: list[list[float]]

    @property
    def makespan(self) -> float:
        """When the last action ends; the first begins at 0."""
        return max((max(row, default=0.0) for row in self.end), default=0.0)


_COMPUTE, _FORWARD_LINK, _BACKWARD_LINK, _COLLECTIVES = range(4)
_LINK = {Kind.SEND_FORWARD: _FORWARD_LINK, Kind.SEND_BACKWARD: _BACKWARD_LINK}


def play(program: Program, costs: Costs, num_steps: int = 1) -> Times:
    """Run a program `num_steps` times back to back. ValueError if some action can never run.

    No rank waits for all others at the end of a step: a rank begins the next one when its own is done.
    """
    graph = _Graph(program, costs, num_steps)
    start, end = graph.run()
    rows = tuple(row * num_steps for row in program.ranks)
    starts, ends, first = [], [], 0
    for row in rows:
        starts.append(start[first : first + len(row)])
        ends.append(end[first : first + len(row)])
        first += len(row)
    return Times(rows, starts, ends)


class _Graph:
    """A program as flat lists: node n is an action, with its resource, its cost and the nodes it needs."""

    def __init__(self, program: Program, costs: Costs, num_steps: int) -> None:
        self.resource: list[int] = []
        self.cost: list[float] = []
        self.needs: list[tuple[int, ...]] = []
        self.first_of_rank: list[int] = []
        self._program = program
        rows = [row * num_steps for row in program.ranks]
        made: dict[tuple[Kind, int, int, int], int] = {}  # (what, stage, microbatch, step) to its node
        node = 0
        for row in rows:
            self.first_of_rank.append(node)
            length = len(row) // num_steps
            for index, action in enumerate(row):
                for part in action.computes() or (action,):
                    made[part.kind, part.stage, part.microbatch, index // length] = node
                node += 1
        self.num_nodes = node
        self.first_of_rank.append(node)
        last_compute = self._last_computes(rows, num_steps)
        for rank, row in enumerate(rows):
            length = len(row) // num_steps
            reductions: list[int] = []
            for index, action in enumerate(row):
                self._add(rank, index // length, action, costs, made, last_compute, reductions)

    def _last_computes(self, rows: list[tuple[Action, ...]], num_steps: int) -> dict[tuple[int, int, int], int]:
        """(rank, stage, step) to the node of the last action that adds to the stage's gradient there."""
        found = {}
        for rank, row in enumerate(rows):
            length = len(row) // num_steps
            for index, action in enumerate(row):
                for part in action.computes():
                    if part.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
                        found[rank, part.stage, index // length] = self.first_of_rank[rank] + index
        return found

    def _add(
        self, rank: int, step: int, action: Action, costs: Costs, made: dict[tuple[Kind, int, int, int], int],
        last_compute: dict[tuple[int, int, int], int], reductions: list[int],
    ) -> None:  # fmt: skip
        kind, stage, i = action.kind, action.stage, action.microbatch
        node = len(self.cost)
        resource, cost, needs = 4 * rank + _COMPUTE, 0.0, []
        if parts := action.computes():
            cost = costs.compute(action)
            needs = [made[key] for part in parts for key in self._inputs(part, rank, step)]
        elif kind in _LINK:
            resource = 4 * rank + _LINK[kind]
            border = stage if kind is Kind.SEND_FORWARD else stage - 1
            cost = costs.transfer[border] if costs.transfer else 0.0
            needs = [made[self._producer(kind, stage, i), stage, i, step]]
        elif kind is Kind.RECV_FORWARD:
            resource, cost, needs = -1, costs.latency, [made[Kind.SEND_FORWARD, stage - 1, i, step]]
        elif kind is Kind.RECV_BACKWARD:
            resource, cost, needs = -1, costs.latency, [made[Kind.SEND_BACKWARD, stage + 1, i, step]]
        elif kind is Kind.REDUCE:
            resource = 4 * rank + _COLLECTIVES
            cost = costs.reduce[stage] if costs.reduce else 0.0
            if i < 0:  # the gradients of every copy of the stage are complete
                holders = set(self._program.placement.replicas(stage))
                needs = [last_compute[holder, stage, step] for holder in holders]
            else:
                needs = [node - 1]
            reductions.append(node)
        elif kind is Kind.STEP:
            cost, needs = costs.step, list(reductions)
            reductions.clear()
        self.resource.append(resource)
        self.cost.append(cost)
        self.needs.append(tuple(needs))

    def _producer(self, send: Kind, stage: int, microbatch: int) -> Kind:
        if send is Kind.SEND_FORWARD:
            return Kind.FORWARD
        split = (stage, microbatch) in self._program.split_backwards
        return Kind.INPUT_GRAD if split else Kind.BACKWARD

    def _inputs(self, part: Action, rank: int, step: int) -> list[tuple[Kind, int, int, int]]:
        """What a compute action needs, as keys of `made`."""
        stage, i, placement = part.stage, part.microbatch, self._program.placement
        if part.kind is Kind.FORWARD:
            if stage == 0:
                return []
            remote = placement.rank(stage - 1, i) != rank
            return [(Kind.RECV_FORWARD, stage, i, step) if remote else (Kind.FORWARD, stage - 1, i, step)]
        if part.kind is Kind.WEIGHT_GRAD:
            return [(Kind.INPUT_GRAD, stage, i, step)]
        needs = [(Kind.FORWARD, stage, i, step)]
        if stage < self._program.num_stages - 1:
            if placement.rank(stage + 1, i) != rank:
                needs.append((Kind.RECV_BACKWARD, stage, i, step))
            else:
                needs.append((self._producer(Kind.SEND_BACKWARD, stage + 1, i), stage + 1, i, step))
        return needs

    def run(self) -> tuple[list[float], list[float]]:
        """Start and end of each node."""
        start, end, cost, needs, resource = (
            [0.0] * self.num_nodes, [0.0] * self.num_nodes, self.cost, self.needs, self.resource,
        )  # fmt: skip
        free = [0.0] * (4 * len(self.first_of_rank))
        for node in self._order():
            begin = free[resource[node]] if resource[node] >= 0 else 0.0
            for need in needs[node]:
                if end[need] > begin:
                    begin = end[need]
            start[node] = begin
            end[node] = begin + cost[node]
            if resource[node] >= 0:
                free[resource[node]] = end[node]
        return start, end

    def _order(self) -> list[int]:
        """All nodes, each after what it needs and after what stands before it on its rank."""
        order: list[int] = []
        over = bytearray(self.num_nodes)
        waiters: dict[int, list[int]] = {}
        position = list(self.first_of_rank[:-1])
        runnable = list(range(len(position)))
        while runnable:
            rank = runnable.pop()
            node, stop = position[rank], self.first_of_rank[rank + 1]
            while node < stop:
                missing = next((need for need in self.needs[node] if not over[need]), -1)
                if missing >= 0:
                    waiters.setdefault(missing, []).append(rank)
                    break
                over[node] = 1
                order.append(node)
                if node in waiters:
                    runnable += waiters.pop(node)
                node += 1
            position[rank] = node
        if len(order) < self.num_nodes:
            raise ValueError(f"program {self._program.name} stops for ever: {self._stuck(position)}")
        return order

    def _stuck(self, position: list[int]) -> str:
        waits = []
        for rank, node in enumerate(position):
            if node < self.first_of_rank[rank + 1]:
                row = self._program.ranks[rank]
                index = (node - self.first_of_rank[rank]) % len(row)
                waits.append(f"rank {rank} waits at {row[index]} (its action {index})")
        return ", ".join(waits)
