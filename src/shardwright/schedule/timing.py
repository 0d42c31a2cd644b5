"""The clock of programs: the start and the end of each action, from the costs of actions.

Every rank has resources that work side by side: compute, one outgoing link for each direction of the pipeline, and
collectives (reductions and gathers, in one queue). Actions on one resource run in the order of the program. So no
event queue is needed: an action starts when its resource is free and all its inputs have arrived, and one pass over
the actions in their `play_order` gives all times. Copies between a device and its host have no resource here, because
no action makes one.

Units of time are the caller's: F = 1 for a table of bubbles, seconds for a prediction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from shardwright.schedule.action import Action, Kind
from shardwright.schedule.play_order import ROWS, PlayOrder, play_order
from shardwright.schedule.schedule import Program, Schedule


@dataclass(frozen=True)
class Costs:
    """The costs of actions. Tuples are by stage.

    `transfer[s]` is how long a message over the border between stages s and s + 1 occupies its link. The message
    arrives `latency` later, and only its receiver waits for that. An overlapped pair takes `pair` times the sum of its
    parts, and the recompute of a stage takes as long as its forward. `reduce[s]` is the reduction of a stage's
    gradients, `gather[s]` the all-gather of its parameters, `step` the optimizer step.
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
        cls,
        num_stages: int,
        forward: float = 1.0,
        input_grad: float = 1.0,
        weight_grad: float = 1.0,
        latency: float = 0.0,
    ) -> "Costs":
        """Equal stages, messages without size."""
        return cls((forward,) * num_stages, (input_grad,) * num_stages, (weight_grad,) * num_stages, latency=latency)

    def compute(self, action: Action) -> float:
        """The cost of a compute action; an overlapped pair may cost less than its parts."""
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
    """Start and end of every action, by rank, in the order of the program's lists; the lists of steps are joined."""

    rows: tuple[tuple[Action, ...], ...]
    start: list[list[float]]
    end: list[list[float]]

    @property
    def makespan(self) -> float:
        """When the last action ends; the first begins at 0."""
        return max((max(row, default=0.0) for row in self.end), default=0.0)

    def num_steps(self, schedule: Schedule) -> int:
        """The number of steps that the schedule was played for."""
        return len(self.rows[0]) // len(schedule.ranks[0])


def play(program: Program, costs: Costs, num_steps: int = 1) -> Times:
    """Run a program `num_steps` times back to back. ValueError if some action can never run.

    No rank waits for all others at the end of a step: a rank begins the next one when its own is done.
    """
    return play_on(program, costs, num_steps, num_steps)[0]


def play_on(
    schedule: Schedule, costs: Costs, num_kept: int, num_steps: int, later: Schedule | None = None
) -> tuple[Times, list[float]]:
    """(times of the actions of the first `num_kept` steps, when each of all steps has ended on all ranks).

    In a schedule without messages, each message leaves when it is made, as in the program that the schedule is lowered
    to. So `later` may be the same schedule without messages, for the steps whose times are not kept.
    """
    order, seconds = play_order(schedule), _seconds(schedule, costs)
    carried, step_ends, latest = [0.0] * order.num_carried, list[float](), 0.0
    previous_offsets: list[float] = []
    starts, ends = ([list[float]() for _ in schedule.ranks] for _ in range(2))
    for step in range(num_steps):
        if step == num_kept and later is not None:
            order, seconds = play_order(later), _seconds(later, costs)
        moments = _moments(order, seconds, costs.latency, carried)
        carried, ended = list(order.carried(moments)), [read(moments) for read in order.ends]
        latest = max([latest, *(max(times, default=0.0) for times in ended)])
        step_ends.append(latest)
        if step < num_kept:
            for row, read, times, end_row in zip(starts, order.begins, ended, ends, strict=True):
                row += read(moments)
                end_row += times
        # If all ranks end a step just as they ended the previous one, only later, each further step takes as long.
        if step + 1 >= num_kept and _are_exact(costs, latest * num_steps):
            offsets = [moment - latest if moment else 0.0 for moment in carried]
            if offsets == previous_offsets:
                period = latest - step_ends[-2]
                step_ends += [latest + n * period for n in range(1, num_steps - step)]
                break
            previous_offsets = offsets
    return Times(tuple(row * num_kept for row in schedule.ranks), starts, ends), step_ends


def _seconds(schedule: Schedule, costs: Costs) -> list[float]:
    """The table of costs that the nodes of a schedule's order refer to."""
    backward = [i + w for i, w in zip(costs.input_grad, costs.weight_grad, strict=True)]
    rows: dict[Kind, Sequence[float]] = {
        Kind.FORWARD: costs.forward,
        Kind.RECOMPUTE: costs.forward,
        Kind.BACKWARD: backward,
        Kind.INPUT_GRAD: costs.input_grad,
        Kind.WEIGHT_GRAD: costs.weight_grad,
        Kind.REDUCE: costs.reduce,
        Kind.GATHER: costs.gather,
        Kind.SEND_FORWARD: costs.transfer,
    }
    zeros, num_stages = (0.0,) * schedule.num_stages, schedule.num_stages
    table = list(chain.from_iterable([*rows[kind], *zeros][:num_stages] for kind in ROWS))
    pairs = [costs.pair * (table[first] + table[second]) for first, second in play_order(schedule).pairs]
    return [*table, *pairs, costs.step]


def _moments(order: PlayOrder, seconds: list[float], latency: float, carried: list[float]) -> list[float]:
    """The ends of a step's actions, the arrivals of what they send, and their starts, as `PlayOrder` numbers them."""
    ends, starts = [0.0, *carried], [0.0] * (1 + len(carried))
    append_end, append_start, delays = ends.append, starts.append, (0.0, latency)
    for first, second, is_late, cost, further in order.nodes:
        start, other = ends[first], ends[second] + delays[is_late]
        if other > start:
            start = other
        if further:
            start = max(start, *(ends[number] + delays[late] for number, late in further))
        append_start(start)
        append_end(start + seconds[cost])
    moments = [0.0] * (3 * len(ends))
    moments[::3], moments[1::3], moments[2::3] = ends, [end + latency for end in ends], starts
    return moments


def _are_exact(costs: Costs, most: float) -> bool:
    """True if sums of such costs up to `most` have no rounding errors: multiples of 2^-16, of at most 53 bits."""
    by_stage = (costs.forward, costs.input_grad, costs.weight_grad, costs.transfer, costs.reduce, costs.gather)
    values = (value for group in (*by_stage, (costs.latency, costs.step)) for value in group)
    return most < 2**36 and costs.pair == 1 and all(float(value * 2**16).is_integer() for value in values)
