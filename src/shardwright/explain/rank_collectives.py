"""All that one rank communicates in a step: which collective, on which axis, how often, how much over which link.

Calls and bytes are the account's (account/step_collectives.py), those that the ledger of a run has: their sums here by
collective and axis are the account. A prediction says which of the seconds nothing hides. Of messages, and of what
replicas exchange, it says that of all of it, which is shared by seconds; sums of a few numbers it leaves out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shardwright.account.step_collectives import PassCounts, PhaseCalls, PieceKind, pass_counts, rank_moves
from shardwright.config.job import JobSpec
from shardwright.cost.collective_time import all_to_all_s, message_s, ring_s
from shardwright.cost.group_links import group_at
from shardwright.cost.stage_time import Costing
from shardwright.cost.wire_bytes import SentBytes, all_to_all_sent, ring_sent
from shardwright.explain.operator_passes import Collective, PiecePass, total_s
from shardwright.explain.rank_groups import RankGroup, world_group
from shardwright.schedule.action import SEND
from shardwright.schedule.schedule import Program
from shardwright.simulate.closed_form import StepTime


@dataclass(frozen=True)
class Crossing:
    """One kind of collective on one axis in a step. `full_bytes` is of all calls, as a ledger counts them; `sent` is
    what the rank sends; `seconds` and `exposed_s` are of all calls, None where they are not known. What is predicted of
    other software alone has no calls."""

    phase: str
    axis: str
    kind: str
    num_ranks: int
    calls: int
    full_bytes: float
    sent: SentBytes
    seconds: float | None
    exposed_s: float | None


@dataclass(frozen=True)
class PricedGroups:
    """A prediction: what prices parts of the step, and the whole."""

    costing: Costing
    step: StepTime


def crossings(
    job: JobSpec, program: Program, rank: int, pieces: Mapping[PieceKind, int], passes: list[PiecePass],
    groups: list[RankGroup], priced: PricedGroups | None,
) -> list[Crossing]:  # fmt: skip
    """All collectives of a step on pipeline rank `rank`, of which it is the first, and which computes so many `pieces`
    of each kind."""
    by_axis = {group.axis: group for group in [*groups, world_group(job)]}
    sizes = {axis: len(group.ranks) for axis, group in by_axis.items()}
    rest = rank_moves(job, program, rank)
    messages = [moved for moved in rest if moved.axis == "pp" and moved.kind in ("send", "recv")]
    sums = [moved for moved in rest if moved not in messages]
    counts = pass_counts(job, program, rank)
    return [
        *layer_crossings(job, counts, pieces, passes, sizes=sizes),
        *_messages(job, program, rank, messages, by_axis, priced=priced),
        *_replicas(sums, by_axis, priced),
    ]


def layer_crossings(
    job: JobSpec, counts: Mapping[PieceKind, PassCounts], pieces: Mapping[PieceKind, int], passes: list[PiecePass],
    sizes: Mapping[str, int],
) -> Iterator[Crossing]:  # fmt: skip
    """Collectives of operators, all of a kind and phase together. `counts` say how often our runtime runs them, and
    `pieces` how many a prediction has them for each microbatch; `sizes` are numbers of ranks by axis."""
    found: dict[tuple[str, str, str], Crossing] = {}
    for piece in passes:
        key = piece.kind, piece.policy
        if (runs := counts.get(key)) is None:
            continue
        predicted = pieces[key] * job.num_microbatches / job.plan.num_copies
        for operator in piece.operators:
            for phase, times, share, collectives in (
                ("forward", runs.forwards, 1.0, operator.forward),
                ("forward", runs.backwards, 1.0, operator.with_graph),
                ("computed again", runs.again(operator.again_share), operator.repeated, operator.forward),
                ("backward", runs.backwards, 1.0, operator.backward),
            ):
                for of in collectives if times or share else ():
                    more = _of_calls(phase, of, times, share * predicted, num_ranks=sizes[of.axis])
                    place = phase, of.axis, of.kind
                    found[place] = _joined(found[place], more) if place in found else more
    yield from found.values()


def _of_calls(phase: str, of: Collective, times: int, predicted: float, num_ranks: int) -> Crossing:
    return Crossing(
        phase, of.axis, of.kind, num_ranks, times * of.calls, times * of.full_bytes, of.sent.times(times),
        None if of.seconds is None else times * of.seconds,
        None if of.exposed_s is None else predicted * of.exposed_s,
    )  # fmt: skip


def _joined(one: Crossing, more: Crossing) -> Crossing:
    return replace(
        one, calls=one.calls + more.calls, full_bytes=one.full_bytes + more.full_bytes, sent=one.sent + more.sent,
        seconds=total_s((one.seconds, more.seconds)), exposed_s=total_s((one.exposed_s, more.exposed_s)),
    )  # fmt: skip


def _messages(
    job: JobSpec, program: Program, rank: int, messages: list[PhaseCalls], by_axis: Mapping[str, RankGroup],
    priced: PricedGroups | None,
) -> Iterator[Crossing]:  # fmt: skip
    """The messages that the rank sends to its neighbours in the pipeline, and those that it receives."""
    for moved in messages:
        line, is_sent, sent = by_axis["pp"], moved.kind == "send", SentBytes()
        if is_sent:
            near = sum(line.nodes[a.peer] == line.nodes[rank] for a in program.ranks[rank] if a.kind in SEND)
            size = moved.num_bytes / moved.calls
            sent = SentBytes(near * size, (moved.calls - near) * size)
        seconds = exposed = None
        if priced is not None:
            rates, pipeline = priced.costing.rates, priced.costing.groups.pp
            seconds = moved.calls * float(message_s(rates, pipeline, moved.num_bytes / moved.calls))
            exposed = priced.step.messages if is_sent else 0.0
        yield Crossing(
            moved.phase, "pp", moved.kind, job.plan.pp, moved.calls, moved.num_bytes, sent, seconds, exposed
        )  # fmt: skip


def _replicas(
    sums: list[PhaseCalls], by_axis: Mapping[str, RankGroup], priced: PricedGroups | None
) -> Iterator[Crossing]:
    """Gradients and parameters over the replicas, a tied table's two gradients, and the sums that a step ends with."""
    found = [_of_group(moved, by_axis[moved.axis], priced) for moved in sums]
    if priced is None:
        yield from found
        return
    whole = sum(crossing.seconds or 0.0 for crossing in found if _is_predicted(crossing))
    for crossing in found:  # a prediction says what nothing hides of all of them together
        share = (crossing.seconds or 0.0) / (whole or 1.0) if _is_predicted(crossing) else 0.0
        yield replace(crossing, exposed_s=priced.step.data * share)


def _is_predicted(of: Crossing) -> bool:
    return of.phase in ("gradients", "parameters") and of.axis != "tp"


def _of_group(moved: PhaseCalls, of: RankGroup, priced: PricedGroups | None) -> Crossing:
    group, rounds = of.as_priced, 2 if moved.kind == "all_reduce" else 1
    is_direct = moved.kind in ("all_to_all", "all_to_all_v")
    full_bytes = float(moved.num_bytes)
    if moved.kind == "all_to_all_v":  # of which the ledger has what goes to others
        full_bytes *= len(of.ranks) / max(1, len(of.ranks) - 1)
    sent = all_to_all_sent(group, full_bytes) if is_direct else ring_sent(group, full_bytes, rounds)
    seconds = None
    if priced is not None:
        run, rates = priced.costing.run, priced.costing.rates
        links = group_at(run, of.lies)
        one = full_bytes / moved.calls
        seconds = all_to_all_s(rates, links, one) if is_direct else ring_s(rates, links, one, rounds)
    return Crossing(
        moved.phase, of.axis, moved.kind, len(of.ranks), moved.calls, float(moved.num_bytes), sent,
        None if seconds is None else moved.calls * float(seconds), None,
    )  # fmt: skip
