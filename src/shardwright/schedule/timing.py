"""When each action of a program runs, given what each one costs.

Every rank has resources that work side by side: compute, one outgoing link for each direction of the pipeline, and
collectives (reductions and gathers, in one queue). Actions on one resource run in the order of the program. So no
event queue is needed: the start of an action is the latest of its resource becoming free and its inputs being there,
and one pass over the actions in an order that respects both gives all times. Copies between a device and its host
have no resource here: no action makes any.

Units of time are the caller's: F = 1 for a table of bubbles, seconds for a prediction.
"""

from dataclasses import dataclass

from shardwright.schedule.action import COMPUTE, Action, Kind
from shardwright.schedule.gather import stages_needed
from shardwright.schedule.schedule import Program


@dataclass(frozen=True)
class Costs:
    """What actions take. Tuples are by stage.

    `transfer[s]` is how long a message over the border between stages s and s + 1 occupies its link; `latency` more
    passes until it is there, and holds up nobody but the receiver. An overlapped pair takes `pair` times the sum of
    its parts, and computing a stage again its forward. `reduce[s]` is a stage's gradient reduction, `gather[s]` the
    gathering of its parameters, `step` the optimizer's.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    transfer: tuple[float, ...] = ()
    latency: float = 0.0
    pair: float = 1.0
    reduce: tuple[float, ...] = ()
    step: float = 0.0
    gather: tuple[float, ...] = ()

    @classmethod
    def uniform(
        cls, num_stages: int, forward: float = 1.0, input_grad: float = 1.0, weight_grad: float = 1.0,
        latency: float = 0.0,
    ) -> "Costs":  # fmt: skip
        """Equal stages, messages without size."""
        return cls((forward,) * num_stages, (input_grad,) * num_stages, (weight_grad,) * num_stages, latency=latency)

    def compute(self, action: Action) -> float:
        """What a compute action takes; an overlapped pair less than its parts, maybe."""
        kind, stage = action.kind, action.stage
        if kind is Kind.FORWARD or kind is Kind.RECOMPUTE:
            return self.forward[stage]
        if kind is Kind.BACKWARD:
            return self.input_grad[stage] + self.weight_grad[stage]
        if kind is Kind.INPUT_GRAD:
            return self.input_grad[stage]
        if kind is Kind.WEIGHT_GRAD:
            return self.weight_grad[stage]
        assert kind is Kind.OVERLAP, f"{action} computes nothing"
        return self.pair * sum(self.compute(part) for part in action.parts)


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
_NUMBER = {kind: number for number, kind in enumerate(Kind)}
_STAGE = len(Kind)
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
    """A program as flat lists: node n is an action, with its resource, its cost and the nodes it needs.

    A rank's actions are consecutive nodes; `first_of_rank` says where they begin.
    """

    def __init__(self, program: Program, costs: Costs, num_steps: int) -> None:
        self._program = program
        self._num_steps = num_steps
        self.resource: list[int] = []
        self.cost: list[float] = []
        self.needs: list[tuple[int, ...]] = []
        self.first_of_rank = [0]
        for row in program.ranks:
            self.first_of_rank.append(self.first_of_rank[-1] + len(row) * num_steps)
        self.num_nodes = self.first_of_rank[-1]
        self._place()
        for rank, row in enumerate(program.ranks):
            for step in range(num_steps):
                self._add_row(rank, row, step, costs)

    def _base(self, action: Action, step: int) -> int:
        """A number for (step, microbatch, stage); plus a kind's number it is the key of a node.

        Far cheaper to look up than a tuple. The same microbatch one stage on is _STAGE higher.
        """
        program = self._program
        return ((step * program.num_microbatches + action.microbatch) * program.num_stages + action.stage) * _STAGE

    def _place(self) -> None:
        """Find the node of every action, and those that complete a gradient: on a rank in a step, for a reduction."""
        self._node_of: dict[int, int] = {}
        self._last_addition: dict[tuple[int, int, int], int] = {}
        self._added_before: dict[int, int] = {}  # by node of a reduction
        node_of, stages = self._node_of, self._program.num_stages
        for rank, row in enumerate(self._program.ranks):
            node = self.first_of_rank[rank]
            for step in range(self._num_steps):
                first = step * self._program.num_microbatches
                for action in row:
                    for part in action.parts or (action,):
                        kind = part.kind
                        # As _base does, but a call for every action would be a tenth of all time.
                        node_of[((first + part.microbatch) * stages + part.stage) * _STAGE + _NUMBER[kind]] = node
                        if kind is Kind.BACKWARD or kind is Kind.WEIGHT_GRAD:
                            self._last_addition[rank, part.stage, step] = node
                        elif kind is Kind.REDUCE:
                            self._added_before[node] = self._last_addition.get((rank, part.stage, step), node)
                    node += 1

    def _add_row(self, rank: int, row: tuple[Action, ...], step: int, costs: Costs) -> None:
        node_of, reductions = self._node_of, []
        append_resource, append_cost, append_needs = self.resource.append, self.cost.append, self.needs.append
        first = len(self.cost)
        gathered: dict[int, int] = {}  # by stage: the node of its latest gather
        at = first - 1 if step else -1  # the node that the rank computed last
        for node, action in enumerate(row, first):
            kind, stage = action.kind, action.stage
            resource, cost = 4 * rank + _COMPUTE, 0.0
            needs: tuple[int, ...] = ()
            if kind in COMPUTE:
                cost, needs = costs.compute(action), self._inputs(action, rank, step)
                at = node
                if gathered:
                    needs += tuple(gathered[stage] for stage in stages_needed(action) if stage in gathered)
            elif kind is Kind.RECV_FORWARD:
                resource, cost = -1, costs.latency
                needs = (node_of[self._base(action, step) - _STAGE + _NUMBER[Kind.SEND_FORWARD]],)
            elif kind is Kind.RECV_BACKWARD:
                resource, cost = -1, costs.latency
                needs = (node_of[self._base(action, step) + _STAGE + _NUMBER[Kind.SEND_BACKWARD]],)
            elif kind in _LINK:
                resource = 4 * rank + _LINK[kind]
                if costs.transfer:
                    cost = costs.transfer[stage if kind is Kind.SEND_FORWARD else stage - 1]
                made_by = Kind.FORWARD if kind is Kind.SEND_FORWARD else self._makes_gradient(stage, action.microbatch)
                needs = (node_of[self._base(action, step) + _NUMBER[made_by]],)
            elif kind is Kind.OVERLAP:
                cost = costs.compute(action)
                needs = tuple(need for part in action.parts for need in self._inputs(part, rank, step))
                at = node
                if gathered:
                    needs += tuple(gathered[stage] for stage in stages_needed(action) if stage in gathered)
            elif kind is Kind.REDUCE:
                resource = 4 * rank + _COLLECTIVES
                cost = costs.reduce[stage] if costs.reduce else 0.0
                if action.microbatch < 0 and self._program.placement.num_copies == 1:
                    needs = (self._added_before[node],)
                elif action.microbatch < 0:  # once a step: the gradients of every copy of the stage must be complete
                    holders = set(self._program.placement.replicas(stage))
                    needs = tuple(self._last_addition[holder, stage, step] for holder in holders)
                else:  # after an update of an asynchronous schedule: its own microbatch's
                    split = (stage, action.microbatch) in self._program.split_backwards
                    adds = Kind.WEIGHT_GRAD if split else Kind.BACKWARD
                    needs = (node_of[self._base(action, step) + _NUMBER[adds]],)
                reductions.append(node)
            elif kind is Kind.GATHER:  # issued when the rank has ended what stands before it
                resource, cost = 4 * rank + _COLLECTIVES, costs.gather[stage] if costs.gather else 0.0
                needs = (at,) if at >= 0 else ()
                gathered[stage] = node
            elif kind is Kind.RELEASE:
                resource, needs = -1, (at,) if at >= 0 else ()
            elif kind is Kind.STEP:
                cost, needs, reductions = costs.step, tuple(reductions), []
            append_resource(resource)
            append_cost(cost)
            append_needs(needs)

    def _makes_gradient(self, stage: int, microbatch: int) -> Kind:
        """Which action makes the input gradient of a stage."""
        return Kind.INPUT_GRAD if (stage, microbatch) in self._program.split_backwards else Kind.BACKWARD

    def _inputs(self, part: Action, rank: int, step: int) -> tuple[int, ...]:
        """The nodes that a compute action needs."""
        kind, stage, i = part.kind, part.stage, part.microbatch
        node_of, rank_of, base = self._node_of, self._program.placement.rank, self._base(part, step)
        if kind is Kind.FORWARD:
            if stage == 0:
                return ()
            if rank_of(stage - 1, i) != rank:
                return (node_of[base + _NUMBER[Kind.RECV_FORWARD]],)
            return (node_of[base - _STAGE + _NUMBER[Kind.FORWARD]],)
        if kind is Kind.WEIGHT_GRAD:
            return (node_of[base + _NUMBER[Kind.INPUT_GRAD]],)
        if kind is Kind.RECOMPUTE:
            return (node_of[base + _NUMBER[Kind.FORWARD]],)
        forward = node_of[base + _NUMBER[Kind.FORWARD]]
        if stage == self._program.num_stages - 1:
            return (forward,)
        if rank_of(stage + 1, i) != rank:
            return forward, node_of[base + _NUMBER[Kind.RECV_BACKWARD]]
        return forward, node_of[base + _STAGE + _NUMBER[self._makes_gradient(stage + 1, i)]]

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
