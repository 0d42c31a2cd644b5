"""The reasons why a plan is best, as inequalities: its adjacent plans are priced, and the decisive terms are named.

A term is a part of the step time (simulate/step.StepTime). A neighbour is slower because some terms grow by more than
others shrink, or it does not fit because it needs too many bytes.
"""

from collections.abc import Hashable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from shardwright.config.cluster_facts import host_room_bytes
from shardwright.config.job import JobSpec
from shardwright.config.link_words import link_words
from shardwright.config.phrase import fixed, say, summed
from shardwright.config.rank_order import order_words
from shardwright.config.recompute_facts import RECOMPUTES
from shardwright.config.units import GIB, number_text, seconds_text
from shardwright.cost.calibration import Constants, software_under
from shardwright.cost.from_job import run_of
from shardwright.cost.group_links import Groups
from shardwright.explain.operator_passes import piece_passes, rank_pieces
from shardwright.explain.rank_collectives import layer_crossings
from shardwright.layers.memo import Memo
from shardwright.layers.query import Run
from shardwright.memory.fit_chance import fit_chance
from shardwright.memory.job_memories import fullest
from shardwright.memory.rank_estimate import Memory
from shardwright.memory.step_collectives import PassCounts
from shardwright.planner.advice.neighbours import Neighbour, neighbours, recompute_words, stages_words
from shardwright.planner.search.adjacent_search import num_actions
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.forked_copies import shared
from shardwright.planner.search.plan_price import fits, plan_room_bytes, room_bytes
from shardwright.planner.search.step_times import KnownSteps, StepTimes
from shardwright.planner.stages.best_layout import LEAST_GAIN, paying_layout
from shardwright.sharding.mesh import MeshShape
from shardwright.simulate.batch_pricing import Price, prices
from shardwright.simulate.closed_form import StepTime
from shardwright.simulate.full_step import is_simulated, least_steps_s, simulated_orders

# Parts of a step, in words.
PARTS = {
    "compute": say("computing"),
    "again": say("recomputing"),
    "tensor": say("tensor-parallel communication"),
    "context": say("context-parallel communication"),
    "expert": say("expert-parallel communication"),
    "data": say("data-parallel communication"),
    "messages": say("pipeline messages"),
    "bubble": say("bubble"),
    "optimizer": say("optimizer"),
    "host": say("traffic with host memory"),
    "other": say("the rest"),
}
_AXIS_OF_PART = {"tensor": "tp", "context": "cp", "expert": "ep", "data": "dp"}
LEAST_SHARE = 5e-4  # share of a step: a smaller difference counts as none
_MAY_FIT = 1.2  # times the device's room: a plan that needs more by closed forms does not fit by its account
_LONG = 2**13  # computations of all orders of work; fewer are simulated before a copy could begin
_LEAST_TERM = 0.05  # share of a difference: smaller terms do not decide it


@dataclass(frozen=True)
class Reason:
    """The reason why a field has its value and not another: further seconds of a step with the other value, or bytes.

    `excess_bytes` are the bytes by which the other plan exceeds the device, or else the room in which the plan itself
    fits surely (`is_tight`), or else the device's share of its node's host memory (`is_host`); 0 if it fits. `decisive`
    is the part of `text` that decides most. `job` is the job under the other plan.
    """

    field: str
    value: object
    other: object
    slower_s: float
    excess_bytes: float
    is_host: bool
    text: str
    decisive: str
    job: JobSpec
    is_tight: bool = False


def reasons(
    job: JobSpec, schedules: tuple[str, ...], constants: Constants, times: StepTimes | None = None
) -> list[Reason]:
    """A reason for each neighbour that differs: degrees first; for each field, neighbours that fit first, the nearest
    in time first.

    Steps are simulated in full, each in its plan's order of work. `times` has those of earlier searches for the same
    model, cluster and constants.
    """
    times = times or StepTimes(constants, Memo())
    room = plan_room_bytes(job, fullest(job, constants))
    _, *adjacent = _priced(job, schedules, constants, room, times.memo)
    own_time, *other_times = _simulated([job, *(neighbour.job for neighbour, _ in adjacent)], constants, times)
    all_reasons = [
        _reason(
            job,
            own_time,
            neighbour,
            _with_exact_memory(replace(price, time=time), neighbour, own_time, constants),
            room,
        )
        for (neighbour, price), time in zip(adjacent, other_times, strict=True)
    ]
    order = list(dict.fromkeys(reason.field for reason in all_reasons))
    told_reasons = [
        reason
        for reason in all_reasons
        if reason.excess_bytes > 0 or abs(reason.slower_s) >= LEAST_SHARE * own_time.total
    ]
    return sorted(
        told_reasons, key=lambda reason: (order.index(reason.field), reason.excess_bytes > 0, reason.slower_s)
    )


def faster_adjacent(
    job: JobSpec,
    own_time: StepTime,
    schedules: tuple[str, ...],
    constraints: Constraints,
    constants: Constants,
    *,
    times: StepTimes | None = None,
) -> JobSpec | None:
    """The fastest neighbour that is faster, fits, and is in the search space; None if there is none. `own_time` is the
    simulated step of the plan.

    It is the one that the `reasons` of the plan show, but of neighbours that a bound says are slower, or that closed
    forms say are far too large, no step is simulated. `times` are as for `reasons`.
    """
    times, most_s = times or StepTimes(constants, Memo()), float(own_time.total) * (1 - LEAST_SHARE)
    room = plan_room_bytes(job, fullest(job, constants))
    _, *adjacent = _priced(job, schedules, constants, room, times.memo)
    allowed = [
        (neighbour, price)
        for neighbour, price in adjacent
        if all(constraints.allows(name, value) for name, value in neighbour.job.plan.model_dump().items())
        and fits(job, price.memory, _MAY_FIT * room)
    ]
    least_s = least_steps_s(
        [neighbour.job for neighbour, _ in allowed], [price.time for _, price in allowed], constants, times.memo
    )
    open_jobs = [neighbour.job for (neighbour, _), seconds in zip(allowed, least_s, strict=True) if seconds <= most_s]
    steps = zip(open_jobs, _simulated(open_jobs, constants, times), strict=True)
    for faster_job, step in sorted(steps, key=lambda job_and_step: float(job_and_step[1].total)):
        if step.total > most_s:
            break
        if fits(job, fullest(faster_job, constants), room):
            return faster_job
    return None


def _priced(
    job: JobSpec, schedules: tuple[str, ...], constants: Constants, room: float, memo: Memo
) -> list[tuple[Neighbour, Price]]:
    """The plan itself, as a neighbour, and its neighbours, with their prices by closed forms, if they have one. Their
    layouts fit in `room` bytes."""
    adjacent = neighbours(job, schedules)
    if job.plan.layout:  # neighbours get their best stages, too
        adjacent = [_laid_out(neighbour, constants, room, memo) for neighbour in adjacent]
    plans = [Neighbour("", None, job), *adjacent]
    answers = prices([run_of(plan.job) for plan in plans], constants, memo)
    assert isinstance(answers[0], Price), "the plan itself has been priced before"
    return [(plan, price) for plan, price in zip(plans, answers, strict=True) if isinstance(price, Price)]


def _simulated(jobs: Sequence[JobSpec], constants: Constants, times: StepTimes) -> list[StepTime]:
    """The simulated steps of some jobs. Plans with one order of work are simulated at once, and if orders are long,
    forked copies simulate a part of them."""
    jobs_of_order: dict[Hashable, list[JobSpec]] = {}
    for job in jobs:
        if not times.has_simulated(job):
            jobs_of_order.setdefault(simulated_orders(job) if is_simulated(job) else (), []).append(job)
    groups = sorted(jobs_of_order.values(), key=lambda alike: num_actions(alike[0]), reverse=True)
    if sum(num_actions(alike[0]) for alike in groups) < _LONG:
        groups = [[job for alike in groups for job in alike]]

    def steps_of(alike: Sequence[JobSpec]) -> KnownSteps:
        times.simulate_ahead(alike)
        return times.expected(alike)

    with closing(shared(groups, steps_of)) as answers:
        for alike, steps in answers:
            if steps is None:
                times.simulate_ahead(alike)
            else:
                times.expect(steps)
    return [times.simulated(job) for job in jobs]


def _with_exact_memory(price: Price, neighbour: Neighbour, own_time: StepTime, constants: Constants) -> Price:
    """The price of a neighbour; if it is faster, with the exact memory that every command shows."""
    if float(price.time.total) > float(own_time.total) * (1 - LEAST_SHARE):
        return price
    return replace(price, memory=fullest(neighbour.job, constants))


def _laid_out(neighbour: Neighbour, constants: Constants, room: float, memo: Memo) -> Neighbour:
    """The neighbour with its best layout in `room` bytes, if that pays and its plan has none."""
    plan = neighbour.job.plan
    if plan.pp == 1 or plan.layout:
        return neighbour
    laid_out = paying_layout(neighbour.job, constants, LEAST_GAIN, room=room, memo=memo)
    return replace(neighbour, job=laid_out) if laid_out else neighbour


def _reason(job: JobSpec, own_time: StepTime, neighbour: Neighbour, price: Price, room: float) -> Reason:
    time, memory = price.time, price.memory
    slower = float(time.total - own_time.total)
    excess = _excess(job, memory, room)
    text, decisive = _cause(job, neighbour.job, own_time, price, excess)
    if excess and slower <= -LEAST_SHARE * own_time.total:
        text = decisive = say("{text}; it would be {seconds} faster", text=text, seconds=seconds_text(-slower))
    values = neighbour.field, _value(job, neighbour.field), _neighbour_value(neighbour)
    return Reason(
        *values,
        slower_s=slower,
        excess_bytes=excess.num_bytes if excess else 0.0,
        is_host=excess is not None and excess.is_host,
        text=text,
        decisive=decisive,
        job=neighbour.job,
        is_tight=excess is not None and excess.is_tight,
    )


@dataclass(frozen=True)
class _Excess:
    """Bytes by which a plan exceeds the device; or else the room in which plans fit surely; or else its host."""

    num_bytes: float
    is_tight: bool = False
    is_host: bool = False


def _excess(job: JobSpec, memory: Memory, room: float) -> _Excess | None:
    """The excess of a plan that needs `memory`, where plans are compared in `room` bytes; None if it fits."""
    needed = float(memory.process)
    if (num_bytes := needed - room_bytes(job)) > 0:
        return _Excess(num_bytes)
    if needed > room:
        return _Excess(needed - room, is_tight=True)
    host_excess = float(memory.host) - host_room_bytes(job.cluster)
    return _Excess(host_excess, is_host=True) if host_excess > 0 else None


def _cause(
    job: JobSpec, other_job: JobSpec, own_time: StepTime, price: Price, excess: _Excess | None
) -> tuple[str, str]:
    """The reason why the other plan is slower or, with an excess of bytes, does not fit; and what decides most."""
    if excess is None:
        return _inequality(job, other_job, own_time, price.time)
    memory = price.memory
    if excess.is_host:
        text = say(
            "offloads {hosted:.1f} GiB, {excess:.1f} more than a device's share of its host",
            hosted=memory.host / GIB,
            excess=excess.num_bytes / GIB,
        )
        return text, text
    if excess.is_tight:
        text = say(
            "needs {needed:.1f} of {offered:.1f} GiB, so it fits with a chance of {chance:.0%} only",
            needed=memory.process / GIB,
            offered=room_bytes(job) / GIB,
            chance=fit_chance(float(memory.process), room_bytes(job)),
        )
        return text, text
    largest_bytes, kind = _largest_kind(memory)
    text = say(
        "needs {needed:.1f} GiB, {excess:.1f} more than the device has, of which {largest:.1f} are {kind}",
        needed=memory.process / GIB,
        excess=excess.num_bytes / GIB,
        largest=largest_bytes / GIB,
        kind=kind,
    )
    return text, text


def _value(job: JobSpec, field: str) -> object:
    """A field's value in the words of a neighbour."""
    if field == "schedule" and job.plan.virtual_stages > 1:
        return stages_words(job.plan.schedule, job.plan.virtual_stages)
    if field == "recompute":
        return recompute_words(job.plan)
    if field == "order":
        return order_words(job.plan)
    value = getattr(job.plan, field)
    if field == "zero_ranks":
        return value or say("all replicas")
    return f"{value:g}" if isinstance(value, float) else value


def _neighbour_value(neighbour: Neighbour) -> object:
    """A neighbour's value, in words for the fields whose value `_value` puts into words."""
    return (
        _value(neighbour.job, neighbour.field)
        if neighbour.field in ("recompute", "zero_ranks", "offload_optimizer")
        else neighbour.value
    )


def _largest_kind(memory: Memory) -> tuple[float, str]:
    """(bytes of the kind of memory that is the largest, the kind in words)."""
    kinds = ("parameters", "gradients", "optimizer", "activations", "working")
    return max(((float(getattr(memory, kind)), fixed(kind)) for kind in kinds), key=lambda part: part[0])


def _inequality(job: JobSpec, other_job: JobSpec, own_time: StepTime, other_time: StepTime) -> tuple[str, str]:
    """ "0.30 s more tensor-parallel communication (...) > 0.10 s less bubble", and its first term."""
    differences = {name: float(getattr(other_time, name) - getattr(own_time, name)) for name in PARTS}
    least = _LEAST_TERM * abs(float(other_time.total - own_time.total))
    grown_parts = [
        name for name in sorted(differences, key=lambda name: -differences[name]) if differences[name] > least
    ][:3]
    shrunk_parts = [
        name for name in sorted(differences, key=lambda name: differences[name]) if differences[name] < -least
    ][:3]
    is_slower = other_time.total >= own_time.total
    larger, smaller = (grown_parts, shrunk_parts) if is_slower else (shrunk_parts, grown_parts)
    left_terms, right_terms = ([_term(differences[name], name) for name in names] for names in (larger, smaller))
    text = summed(left_terms or right_terms) or say("the same time")
    if left_terms and right_terms:
        text = say("{larger} > {smaller}", larger=summed(left_terms), smaller=summed(right_terms))
    axis_parts = [name for name in grown_parts if name in _AXIS_OF_PART]
    decisive = next(iter(left_terms or right_terms), text)
    return _with_traffic(text, job, other_job, _AXIS_OF_PART[axis_parts[0]]) if axis_parts else text, decisive


def _term(difference_s: float, name: str) -> str:
    """ "0.30 s more bubble"."""
    if difference_s > 0:
        return say("{seconds} more {part}", seconds=seconds_text(difference_s), part=PARTS[name])
    return say("{seconds} less {part}", seconds=seconds_text(-difference_s), part=PARTS[name])


def _with_traffic(text: str, job: JobSpec, other_job: JobSpec, axis: str) -> str:
    """A text with the traffic of an axis under the other plan and under this one, if they differ."""
    before, after = (_traffic(plan_job, axis) for plan_job in (job, other_job))
    if before == after:
        return text
    return say("{text} ({axis}: {after}; before, {before})", text=text, axis=axis, after=after, before=before)


def _traffic(job: JobSpec, axis: str) -> str:
    """Text with the bytes that a rank in the middle of the pipeline sends over "tp", "cp", "ep" or "dp" in a step for
    its layers, forward and backward, and the stated bandwidth of the slowest link.

    Replicas (dp) communicate at the ends of a step, and send nothing for layers.
    """
    run = run_of(job)
    pieces, groups = rank_pieces(run)[job.plan.pp // 2], Groups(run)
    group = groups.shard if axis == "dp" else getattr(groups, axis)
    if group.size == 1:
        return say("nothing")
    links = _link_words(job, run, int(group.domains))
    sizes = MeshShape.of(job.plan).sizes | {"ep": job.plan.ep}
    passes = piece_passes(job, run, software_under(run), None, kinds=pieces)
    counts = {piece: _counts(job, number) for piece, number in pieces.items()}
    crossings = layer_crossings(job, counts, pieces, passes, sizes)
    sent_bytes = sum(crossing.sent.total for crossing in crossings if crossing.axis == axis)
    if not sent_bytes:
        return say("{ranks} ranks {links}", ranks=int(group.size), links=links)
    return say("{size} GB a device and step {links}", size=number_text(sent_bytes / 1e9), links=links)


def _link_words(job: JobSpec, run: Run, num_domains: int) -> str:
    """The links that a group on so many nodes uses, and their bandwidth."""
    words = link_words(job.cluster)
    if num_domains == 1:
        rate = f"{run.node_bytes_per_s / 1e9:,.3g}"
        return say("within a {domain} at {rate} GB/s", domain=fixed(words.domain), rate=rate)
    rate = f"{run.network_bytes_per_s / 1e9:,.3g}"
    return say("across {count} {domains} at {rate} GB/s", count=num_domains, domains=fixed(words.domains), rate=rate)


def _counts(job: JobSpec, num_pieces: int) -> PassCounts:
    """The number of times that a rank runs `num_pieces` of a kind, without the exceptions of schedules."""
    passes = num_pieces * job.num_microbatches // job.plan.num_copies
    return PassCounts(passes, passes if RECOMPUTES[job.plan.recompute].by_stage else 0, passes)
