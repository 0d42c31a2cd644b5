"""The end of a step with many microbatches from that of fewer, where a pipeline is in a steady state.

A pipeline repeats its work each period, which has as many microbatches as it has ranks, for each copy of its stages. If
every piece of work ends the same time after the same piece of the period before, on all ranks, then so does all that
follows: a piece begins at the latest of some earlier ends, and all of these are later by the same time (an eigenvector
of a max-plus matrix; Baccelli et al. 1992, "Synchronization and Linearity", section 3.2). Further periods between take
as long each. This is checked on a window of two periods, for the costs of each plan; where it does not hold, the whole
step is to be played.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from shardwright.config.schedule_facts import SCHEDULES
from shardwright.schedule.job_program import Order
from shardwright.schedule.timing import Costs
from shardwright.simulate.batched_timing import Bools, Floats, Rounds

_PLAYED = 8  # periods: three until a steady state, two of the window, one later than these, two in which work ends
_BEGIN = 5  # periods before the end: the begin of the window
_WORTH = 4  # periods: fewer that are left out do not pay for an attempt
_ROUNDING = 1e-12  # share of a step


class FewerMicrobatches(NamedTuple):
    """An order of work without `num_periods` periods, each of `period` microbatches of each copy of the stages."""

    order: Order
    period: int
    num_periods: int


def with_fewer(order: Order) -> FewerMicrobatches | None:
    """The order with fewer microbatches; None if it has few, or is not repeated by periods."""
    shape, facts = order.shape, SCHEDULES[order.schedule]
    period = shape.group or shape.num_ranks
    num_periods = shape.num_microbatches // (period * facts.num_copies) - _PLAYED
    if num_periods < _WORTH or facts.overlaps_steps or shape.costs is not None or shape.num_steps > 1:
        return None
    num_microbatches = shape.num_microbatches - num_periods * period * facts.num_copies
    return FewerMicrobatches(
        replace(order, shape=replace(shape, num_microbatches=num_microbatches)), period, num_periods
    )


def continued(rounds: Rounds, costs: Sequence[Costs], fewer: FewerMicrobatches) -> tuple[Floats, Floats, Bools]:
    """(the ends of steps with all microbatches, the compute time of the rank that computes longest, if both hold), by
    costs. `rounds` are those of the order with fewer microbatches."""
    (end_s,), ended = rounds.played(costs)
    period, heads, num_turns = fewer.period, rounds.begins[rounds.order], int(rounds.turns.max()) + 1
    begin, turns = num_turns - _BEGIN * period, rounds.turns[heads]
    ranks = np.searchsorted(rounds.ranks, heads, side="right")
    # A rank does the work of a row of costs once for each microbatch of a copy.
    keys = (ranks * (rounds.rows.max() + 1) + rounds.rows[heads]) * (num_turns + period) + turns
    window = np.flatnonzero((turns >= begin) & (turns < begin + 2 * period))
    by_key = np.argsort(keys)
    later = by_key[np.searchsorted(keys, keys[window] + period, sorter=by_key).clip(max=len(keys) - 1)]
    issued_behind = [piece for round_ in rounds.rounds for issued in round_.issued for piece in issued.behind.tolist()]
    is_repeated = np.array_equal(keys[later], keys[window] + period)
    # Collectives have queues of their own, which may grow faster than the work: all are to come after the periods.
    if not is_repeated or np.any(turns[issued_behind] < begin + 3 * period):
        return end_s, end_s, np.zeros(len(costs), dtype=bool)
    shifts_s = ended[later] - ended[window]
    period_s = shifts_s.max(axis=0)
    in_period = (rounds.turns >= begin) & (rounds.turns < begin + period)
    busy_s, period_busy_s = rounds.busy_by_rank(costs), rounds.busy_by_rank(costs, in_period)
    is_steady = period_s - shifts_s.min(axis=0) <= _ROUNDING * end_s
    # A schedule whose forwards and backwards have periods apart computes for longer in both than one of them takes.
    is_steady &= period_busy_s.max(axis=0) <= period_s * (1 + _ROUNDING)
    whole_busy_s = (busy_s + fewer.num_periods * period_busy_s).max(axis=0)
    return end_s + fewer.num_periods * period_s, whole_busy_s, is_steady
