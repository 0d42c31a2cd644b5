"""The communication of one rank in a step: each collective, its axis, its calls, and its bytes over each link.

Calls and bytes are the account's (memory/step_collectives.py), which the ledger of a run has too: their sums here by
collective and axis are the account. A prediction gives the exposed seconds. For messages, and for the replicas'
collectives, it gives one number for all, which is split in proportion to the seconds; sums of a few numbers have none.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shardwright.config.job import JobSpec
from shardwright.cost.collective_time import all_to_all_s, message_s, ring_s
from shardwright.cost.group_links import group_at
from shardwright.cost.stage_time import Costing
from shardwright.cost.wire_bytes import RING_ROUNDS, SentBytes, all_to_all_sent, ring_sent
from shardwright.explain.operator_passes import Collective, PiecePass, total_s
from shardwright.explain.rank_groups import RankGroup, world_group
from shardwright.memory.step_collectives import PassCounts, PhaseCalls, PieceKind, pass_counts, rank_moves
from shardwright.schedule.action import SEND
from shardwright.schedule.schedule import Program
from shardwright.simulate.closed_form import StepTime


@dataclass(frozen=True)
class Crossing:
    """One kind of collective on one axis in a step. `full_bytes` is of all calls, as a ledger counts them; `sent` are
    the bytes that the rank sends; `seconds` and `exposed_s` are of all calls, None if unknown. A collective predicted
    only for other software has no calls."""

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
    """A prediction: the costs of the step's parts, and the time of the step."""

    costing: Costing
    step: StepTime


@dataclass(frozen=True)
class PipelineRank:
    """A pipeline rank of a job: its place in the program, and the number of pieces of each kind that it computes."""

    job: JobSpec
    program: Program
    rank: int
    pieces: Mapping[PieceKind, int]


def crossings(
    place: PipelineRank, passes: list[PiecePass], groups: list[RankGroup], priced: PricedGroups | None
) -> list[Crossing]:
    """All collectives of a step on the first rank of a pipeline rank."""
    job, program, rank = place.job, place.program, place.rank
    by_axis = {group.axis: group for group in [*groups, world_group(job)]}
    sizes = {axis: len(group.ranks) for axis, group in by_axis.items()}
    rank_calls = rank_moves(job, program, rank)
    messages = [entry for entry in rank_calls if entry.axis == "pp" and entry.kind in ("send", "recv")]
    sums = [entry for entry in rank_calls if entry not in messages]
    counts = pass_counts(job, program, rank)
    return [
        *layer_crossings(job, counts, place.pieces, passes, sizes=sizes),
        *_messages(place, messages, by_axis, priced),
        *_replicas(sums, by_axis, priced),
    ]


def layer_crossings(
    job: JobSpec,
    counts: Mapping[PieceKind, PassCounts],
    pieces: Mapping[PieceKind, int],
    passes: list[PiecePass],
    sizes: Mapping[str, int],
) -> Iterator[Crossing]:
    """Collectives of operators, those of a kind and phase together. `counts` say how often our runtime runs a piece,
    `pieces` how often a prediction has it for each microbatch; `sizes` are numbers of ranks by axis."""
    joined: dict[tuple[str, str, str], Crossing] = {}
    for piece in passes:
        piece_kind = piece.kind, piece.policy
        if (runs := counts.get(piece_kind)) is None:
            continue
        predicted = pieces[piece_kind] * job.num_microbatches / job.plan.num_copies
        for operator in piece.operators:
            for phase, times, share, collectives in (
                ("forward", runs.forwards, 1.0, operator.forward),
                ("forward", runs.backwards, 1.0, operator.with_graph),
                ("computed again", runs.again(operator.again_share), operator.repeated, operator.forward),
                ("backward", runs.backwards, 1.0, operator.backward),
            ):
                for collective in collectives if times or share else ():
                    crossing = _of_calls(phase, collective, times, share * predicted, num_ranks=sizes[collective.axis])
                    key = phase, collective.axis, collective.kind
                    joined[key] = _joined(joined[key], crossing) if key in joined else crossing
    yield from joined.values()


def _of_calls(phase: str, collective: Collective, times: int, predicted: float, num_ranks: int) -> Crossing:
    return Crossing(
        phase=phase,
        axis=collective.axis,
        kind=collective.kind,
        num_ranks=num_ranks,
        calls=times * collective.calls,
        full_bytes=times * collective.full_bytes,
        sent=collective.sent.times(times),
        seconds=None if collective.seconds is None else times * collective.seconds,
        exposed_s=None if collective.exposed_s is None else predicted * collective.exposed_s,
    )


def _joined(first: Crossing, second: Crossing) -> Crossing:
    return replace(
        first,
        calls=first.calls + second.calls,
        full_bytes=first.full_bytes + second.full_bytes,
        sent=first.sent + second.sent,
        seconds=total_s((first.seconds, second.seconds)),
        exposed_s=total_s((first.exposed_s, second.exposed_s)),
    )


def _messages(
    place: PipelineRank, messages: list[PhaseCalls], by_axis: Mapping[str, RankGroup], priced: PricedGroups | None
) -> Iterator[Crossing]:
    """The messages that the rank sends to its neighbours in the pipeline, and those that it receives."""
    rank, actions = place.rank, place.program.ranks[place.rank]
    for message in messages:
        line, is_sent, sent = by_axis["pp"], message.kind == "send", SentBytes()
        if is_sent:
            num_near = sum(line.nodes[a.peer] == line.nodes[rank] for a in actions if a.kind in SEND)
            size = message.num_bytes / message.calls
            sent = SentBytes(num_near * size, (message.calls - num_near) * size)
        seconds = exposed = None
        if priced is not None:
            rates, pipeline = priced.costing.rates, priced.costing.groups.pp
            seconds = message.calls * float(message_s(rates, pipeline, message.num_bytes / message.calls))
            exposed = priced.step.messages if is_sent else 0.0
        num_ranks, num_bytes = place.job.plan.pp, message.num_bytes
        yield Crossing(
            phase=message.phase,
            axis="pp",
            kind=message.kind,
            num_ranks=num_ranks,
            calls=message.calls,
            full_bytes=num_bytes,
            sent=sent,
            seconds=seconds,
            exposed_s=exposed,
        )


def _replicas(
    sums: list[PhaseCalls], by_axis: Mapping[str, RankGroup], priced: PricedGroups | None
) -> Iterator[Crossing]:
    """The replicas' gradients and parameters, a tied table's two gradients, and the sums at the end of a step."""
    group_crossings = [_of_group(collective, by_axis[collective.axis], priced) for collective in sums]
    if priced is None:
        yield from group_crossings
        return
    total = sum(crossing.seconds or 0.0 for crossing in group_crossings if _is_predicted(crossing))
    for crossing in group_crossings:  # a prediction gives the exposed seconds of all of them together
        share = (crossing.seconds or 0.0) / (total or 1.0) if _is_predicted(crossing) else 0.0
        yield replace(crossing, exposed_s=priced.step.data * share)


def _is_predicted(crossing: Crossing) -> bool:
    return crossing.phase in ("gradients", "parameters") and crossing.axis != "tp"


def _of_group(collective: PhaseCalls, rank_group: RankGroup, priced: PricedGroups | None) -> Crossing:
    group, is_direct = rank_group.as_priced, collective.kind in ("all_to_all", "all_to_all_v")
    rounds = 0 if is_direct else RING_ROUNDS[collective.kind]
    full_bytes = float(collective.num_bytes)
    if collective.kind == "all_to_all_v":  # the ledger counts only the bytes for other ranks
        full_bytes *= len(rank_group.ranks) / max(1, len(rank_group.ranks) - 1)
    sent = all_to_all_sent(group, full_bytes) if is_direct else ring_sent(group, full_bytes, rounds)
    seconds = None
    if priced is not None:
        run, rates = priced.costing.run, priced.costing.rates
        links = group_at(run, rank_group.layout)
        call_bytes = full_bytes / collective.calls
        seconds = all_to_all_s(rates, links, call_bytes) if is_direct else ring_s(rates, links, call_bytes, rounds)
    return Crossing(
        phase=collective.phase,
        axis=rank_group.axis,
        kind=collective.kind,
        num_ranks=len(rank_group.ranks),
        calls=collective.calls,
        full_bytes=float(collective.num_bytes),
        sent=sent,
        seconds=None if seconds is None else collective.calls * float(seconds),
        exposed_s=None,
    )
