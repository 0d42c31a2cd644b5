"""PipeDream: 1F1B that never stops. Narayanan et al. 2019 (SOSP '19; arXiv 1806.03377), section 3.

Each stage updates its weights after each backward, and no rank waits at the end of a batch: in the steady state there
is no bubble. But a microbatch's forward and backward must see the same weights (else its gradient is not the gradient
of any function), so the weights of each forward are stashed for its backward. Stage s has p - s microbatches in
flight, each with its own version: p - s copies of its weights, and gradients as old as p - 1 - s updates.

It is asynchronous: unlike the schedules that flush the pipeline, it does not compute what one rank would.
"""

from shardwright.config.schedule_facts import ScheduleFacts
from shardwright.schedule.action import Action, Kind
from shardwright.schedule.generators.one_f_one_b import alive, one_f_one_b
from shardwright.schedule.schedule import Order, Schedule
from shardwright.sharding.stage_placement import looped


def pipedream(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with an update of the stage after each backward. A longer stream has more microbatches."""
    inner = one_f_one_b(num_ranks, num_microbatches)
    ranks = with_updates(inner.ranks, every=1)
    return Schedule("pipedream", num_microbatches, inner.placement, ranks, weights="stashed")


def with_updates(ranks: Order, every: int) -> Order:
    """The lists, with a reduction and a step of the stage after each `every` backwards."""
    rows = []
    for row in ranks:
        updated: list[Action] = []
        for action in row:
            updated.append(action)
            if action.kind is Kind.BACKWARD and (action.microbatch + 1) % every == 0:
                updated += [Action(kind, action.stage, action.microbatch) for kind in (Kind.REDUCE, Kind.STEP)]
        rows.append(tuple(updated))
    return tuple(rows)


FACTS = ScheduleFacts(
    name="pipedream",
    place=130,
    make=lambda shape: pipedream(shape.num_ranks, shape.num_microbatches * shape.num_steps),
    understands=("num_steps",),
    placement=looped,
    drains=False,
    bubble="(p - 1) * (F + B)",
    repeated="0",
    alive=alive,
    not_searched="it computes other numbers than one rank does",
)
