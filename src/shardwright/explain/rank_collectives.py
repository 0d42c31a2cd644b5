"""All that one rank communicates in a step: which collective, on which axis, how often, how much over which link.

Collectives within layers come from the pieces that the rank computes. Those of the replicas are the ones that our
runtime issues, exact in number and bytes (account/replica_traffic.py), and messages of the pipeline are those of its
program. A prediction says of each of these two only what nothing hides of all of it; that is shared by seconds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shardwright.account.replica_traffic import replica_traffic
from shardwright.config.job import JobSpec
from shardwright.cost.collective_time import all_to_all_s, message_s, ring_s
from shardwright.cost.group_links import group_at
from shardwright.cost.stage_time import Costing
from shardwright.cost.wire_bytes import SentBytes, all_to_all_sent, ring_sent
from shardwright.explain.operator_passes import Collective, PieceKind, PiecePass, total_s
from shardwright.explain.rank_groups import RankGroup
from shardwright.schedule.action import SEND
from shardwright.schedule.schedule import Program
from shardwright.simulate.closed_form import StepTime


@dataclass(frozen=True)
class Crossing:
    """One kind of collective on one axis in a step. `full_bytes` is of all calls, as a ledger counts them; `sent` is
    what the rank sends; `seconds` and `exposed_s` are of all calls, None where they are not known."""

    phase: str
    axis: str
    kind: str
    num_ranks: int
    calls: float
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
    """All collectives of a step on pipeline rank `rank`, which computes so many `pieces` of each kind."""
    sizes = {group.axis: len(group.ranks) for group in groups}
    return [
        *layer_crossings(job, pieces, passes, sizes),
        *_messages(job, program, rank, groups, priced),
        *_replicas(job, program, rank, groups, priced),
    ]


def layer_crossings(
    job: JobSpec, pieces: Mapping[PieceKind, int], passes: list[PiecePass], sizes: Mapping[str, int]
) -> Iterator[Crossing]:
    """Collectives of operators, all of a kind and phase together; `sizes` are numbers of ranks by axis."""
    found: dict[tuple[str, str, str], Crossing] = {}
    for piece in passes:
        times = pieces.get((piece.kind, piece.policy), 0) * job.num_microbatches
        for operator in piece.operators:
            for phase, share, collectives in (
                ("forward", 1.0, operator.forward),
                ("computed again", operator.repeated, operator.forward),
                ("backward", 1.0, operator.backward),
            ):
                for of in collectives if share * times else ():
                    key = (phase, of.axis, of.kind)
                    more = _of_calls(phase, of, times * share, sizes[of.axis])
                    found[key] = _joined(found[key], more) if key in found else more
    yield from found.values()


def _of_calls(phase: str, of: Collective, calls: float, num_ranks: int) -> Crossing:
    return Crossing(
        phase, of.axis, of.kind, num_ranks, calls, calls * of.full_bytes, of.sent.times(calls),
        None if of.seconds is None else calls * of.seconds,
        None if of.exposed_s is None else calls * of.exposed_s,
    )  # fmt: skip


def _joined(one: Crossing, more: Crossing) -> Crossing:
    return replace(
        one, calls=one.calls + more.calls, full_bytes=one.full_bytes + more.full_bytes, sent=one.sent + more.sent,
        seconds=total_s((one.seconds, more.seconds)), exposed_s=total_s((one.exposed_s, more.exposed_s)),
    )  # fmt: skip


def _messages(
    job: JobSpec, program: Program, rank: int, groups: list[RankGroup], priced: PricedGroups | None
) -> Iterator[Crossing]:
    """What the rank sends to its neighbours in the pipeline."""
    sends = [action for action in program.ranks[rank] if action.kind in SEND]
    line = next((group for group in groups if group.axis == "pp"), None)
    if line is None or program.sizes is None or not sends:
        return
    size = float(program.sizes.message)
    near = sum(line.nodes[action.peer] == line.nodes[rank] for action in sends)
    sent = SentBytes(near * size, (len(sends) - near) * size)
    seconds = exposed = None
    if priced is not None:
        seconds = len(sends) * float(message_s(priced.costing.rates, priced.costing.groups.pp, size))
        exposed = priced.step.messages
    yield Crossing("between stages", "pp", "send", job.plan.pp, len(sends), len(sends) * size, sent, seconds, exposed)


def _replicas(
    job: JobSpec, program: Program, rank: int, groups: list[RankGroup], priced: PricedGroups | None
) -> Iterator[Crossing]:
    """Gradients and parameters over the replicas; and a tied table's two gradients."""
    if program.weights != "current":
        return  # each stage updates on its own, again and again: no step has a fixed account
    by_axis = {group.axis: group for group in groups}
    found = []
    for name, moved in replica_traffic(job, program, rank).items():
        kind, axis = name.split(" ", 1)
        if axis in by_axis:
            phase = "parameters" if kind == "all_gather" and job.plan.zero else "gradients"
            found.append(_of_group(phase, kind, by_axis[axis], moved.calls, float(moved.payload_bytes), priced))
    if "ends" in by_axis and by_axis["pp"].ranks[rank] in by_axis["ends"].ranks:
        size = float(job.precision.reduce_bytes * -(-job.model.vocab // job.plan.tp) * job.model.hidden)
        found.append(_of_group("gradients", "all_reduce", by_axis["ends"], 1, size, priced))
    if priced is None:
        yield from found
        return
    whole = sum(crossing.seconds or 0.0 for crossing in found)
    for crossing in found:  # a prediction says what nothing hides of all of them together
        yield replace(crossing, exposed_s=priced.step.data * (crossing.seconds or 0.0) / (whole or 1.0))


def _of_group(
    phase: str, kind: str, of: RankGroup, calls: int, full_bytes: float, priced: PricedGroups | None
) -> Crossing:
    group, rounds = of.as_priced, 2 if kind == "all_reduce" else 1
    is_direct = kind == "all_to_all"
    sent = all_to_all_sent(group, full_bytes) if is_direct else ring_sent(group, full_bytes, rounds)
    seconds = None
    if priced is not None:
        run, rates = priced.costing.run, priced.costing.rates
        links = group_at(run, of.lies)
        one = full_bytes / calls
        seconds = all_to_all_s(rates, links, one) if is_direct else ring_s(rates, links, one, rounds)
    return Crossing(
        phase, of.axis, kind, len(of.ranks), calls, full_bytes, sent,
        None if seconds is None else calls * float(seconds), None,
    )  # fmt: skip
