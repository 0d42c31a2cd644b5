"""Why a plan is best, as inequalities: its adjacent plans are priced, and the terms that decide are named.

A term is a part of the step time (simulate/step.StepTime). A neighbour loses by terms that grow more than others
shrink; one that does not fit loses by bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright.account.step_collectives import PassCounts
from shardwright.config.host_memory import host_room_bytes
from shardwright.config.job import JobSpec
from shardwright.config.link_words import link_words
from shardwright.config.rank_order import order_words
from shardwright.config.units import GIB, number_text, seconds_text
from shardwright.cost.calibration import Constants, software_under
from shardwright.cost.from_job import run_of
from shardwright.cost.group_links import Groups
from shardwright.cost.job_memories import fullest
from shardwright.cost.memory import Memory
from shardwright.explain.operator_passes import piece_passes, rank_pieces
from shardwright.explain.rank_collectives import layer_crossings
from shardwright.planner.advice.neighbours import Neighbour, neighbours, recompute_words
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.plan_price import room_bytes
from shardwright.planner.stages.best_layout import LEAST_GAIN, paying_layout
from shardwright.sharding.mesh import MeshShape
from shardwright.simulate.batch_pricing import Price, prices
from shardwright.simulate.closed_form import StepTime
from shardwright.simulate.full_step import simulated_steps

# Parts of a step, as they are told.
PARTS = {
    "compute": "computing", "again": "recomputing", "tensor": "tensor-parallel communication",
    "context": "context-parallel communication", "expert": "expert-parallel communication",
    "data": "data-parallel communication", "messages": "pipeline messages", "bubble": "bubble",
    "optimizer": "optimizer", "host": "traffic with host memory", "other": "the rest",
}  # fmt: skip
_AXIS_OF_PART = {"tensor": "tp", "context": "cp", "expert": "ep", "data": "dp"}
_TOLD = 5e-4  # share of a step: what differs by less is the same
_TERM = 0.05  # share of a difference: smaller terms do not decide it


@dataclass(frozen=True)
class Reason:
    """Why a field has its value and not another: seconds of a step that the other would take more, or bytes.

    `excess_bytes` are those that the other has too much: of the device, or if it fits there, of the device's share of
    its node's host memory (`is_host`). Zero where it fits. `job` is the job under the other plan.
    """

    field: str
    value: object
    other: object
    slower_s: float
    excess_bytes: float
    is_host: bool
    text: str
    job: JobSpec


def reasons(job: JobSpec, schedules: tuple[str, ...], constants: Constants) -> list[Reason]:
    """One for each neighbour that differs: degrees first, of each field those that fit, the nearest in time first.

    Steps are simulated in full, each plan's in its own order of work.
    """
    near = neighbours(job, schedules)
    if job.plan.layout:  # adjacent to a plan with its best stages, others have theirs too
        near = [_laid_out(one, constants) for one in near]
    priced = prices([run_of(job), *(run_of(neighbour.job) for neighbour in near)], constants)
    jobs = [job, *(neighbour.job for neighbour in near)]
    known = [(place, price) for place, price in enumerate(priced) if isinstance(price, Price)]
    assert known[0][0] == 0, "the plan itself has been priced before"
    mine, *times = simulated_steps([jobs[place] for place, _ in known], [price.time for _, price in known], constants)
    beside = [
        _reason(job, mine, near[place - 1], _counted(replace(price, time=time), near[place - 1], mine, constants))
        for (place, price), time in zip(known[1:], times, strict=True)
    ]
    order = list(dict.fromkeys(one.field for one in beside))
    told = [one for one in beside if one.excess_bytes > 0 or abs(one.slower_s) >= _TOLD * mine.total]
    return sorted(told, key=lambda r: (order.index(r.field), r.excess_bytes > 0, r.slower_s))


def faster_adjacent(why: Sequence[Reason], constraints: Constraints) -> JobSpec | None:
    """The fastest adjacent plan that is faster, fits, and is in the search space; None if there is none.

    `why` is what `reasons` says of the one.
    """
    faster = [
        one for one in why
        if one.slower_s < 0 and one.excess_bytes == 0
        and all(constraints.allows(name, value) for name, value in one.job.plan.model_dump().items())
    ]  # fmt: skip
    return min(faster, key=lambda one: one.slower_s).job if faster else None


def _counted(price: Price, near: Neighbour, mine: StepTime, constants: Constants) -> Price:
    """The price of a neighbour, where it is faster with the memory that every command tells of it."""
    if float(price.time.total) > float(mine.total) * (1 - _TOLD):
        return price
    return replace(price, memory=fullest(near.job, constants))


def _laid_out(near: Neighbour, constants: Constants) -> Neighbour:
    """The neighbour with the layers of its stages chosen, where that pays and its plan says nothing of them."""
    plan = near.job.plan
    laid = paying_layout(near.job, constants, LEAST_GAIN) if plan.pp > 1 and not plan.layout else None
    return replace(near, job=laid) if laid else near


def _reason(job: JobSpec, mine: StepTime, near: Neighbour, price: Price) -> Reason:
    time, memory = price.time, price.memory
    excess, host_excess = float(memory.process) - room_bytes(job), float(memory.host) - host_room_bytes(job.cluster)
    slower = float(time.total - mine.total)
    is_host = excess <= 0 < host_excess
    if is_host:
        excess = host_excess
        text = f"offloads {memory.host / GIB:.1f} GiB, {excess / GIB:.1f} more than a device's share of its host"
    elif excess > 0:
        text = f"needs {memory.process / GIB:.1f} GiB, {excess / GIB:.1f} more than the device has, {_most(memory)}"
    else:
        text = _inequality(job, near.job, mine, time)
    if excess > 0 and slower <= -_TOLD * mine.total:
        text += f"; it would be {seconds_text(-slower)} faster"
    values = near.field, _value(job, near.field), _other(near)
    return Reason(*values, slower_s=slower, excess_bytes=max(0.0, excess), is_host=is_host, text=text, job=near.job)


def _value(job: JobSpec, field: str) -> object:
    """A field's value in the words of a neighbour."""
    if field == "schedule" and job.plan.virtual_stages > 1:
        return f"{job.plan.schedule} with virtual_stages {job.plan.virtual_stages}"
    if field == "recompute":
        return recompute_words(job.plan)
    if field == "order":
        return order_words(job.plan)
    value = getattr(job.plan, field)
    if field == "zero_ranks":
        return value or "all replicas"
    return f"{value:g}" if isinstance(value, float) else value


def _other(near: Neighbour) -> object:
    """A neighbour's value, in words where the plan's is."""
    return (
        _value(near.job, near.field) if near.field in ("recompute", "zero_ranks", "offload_optimizer") else near.value
    )


def _most(memory: Memory) -> str:
    kinds = ("parameters", "gradients", "optimizer", "activations", "working")
    num_bytes, kind = max(((float(getattr(memory, kind)), kind) for kind in kinds), key=lambda part: part[0])
    return f"of which {num_bytes / GIB:.1f} are {kind}"


def _inequality(job: JobSpec, other: JobSpec, own_time: StepTime, other_time: StepTime) -> str:
    """ "0.30 s more tensor-parallel communication (...) > 0.10 s less bubble"."""
    differences = {name: float(getattr(other_time, name) - getattr(own_time, name)) for name in PARTS}
    least = _TERM * abs(float(other_time.total - own_time.total))
    more = [n for n in sorted(differences, key=lambda n: -differences[n]) if differences[n] > least][:3]
    less = [n for n in sorted(differences, key=lambda n: differences[n]) if differences[n] < -least][:3]
    is_slower = other_time.total >= own_time.total
    first, second = (more, less) if is_slower else (less, more)
    word = {True: "more", False: "less"}
    left = " + ".join(f"{seconds_text(abs(differences[n]))} {word[is_slower]} {PARTS[n]}" for n in first)
    right = " + ".join(f"{seconds_text(abs(differences[n]))} {word[not is_slower]} {PARTS[n]}" for n in second)
    text = f"{left} > {right}" if left and right else left or right or "the same time"
    grown = [name for name in more if name in _AXIS_OF_PART]
    return text + (_moved(job, other, _AXIS_OF_PART[grown[0]]) if grown else "")


def _moved(job: JobSpec, other: JobSpec, axis: str) -> str:
    """The traffic of the axis under the other plan and under this one, if they differ."""
    before, after = (_traffic(either, axis) for either in (job, other))
    return "" if before == after else f" ({axis}: {after}; before, {before})"


def _traffic(job: JobSpec, axis: str) -> str:
    """The bytes that a rank in the middle of the pipeline sends over "tp", "cp", "ep" or "dp" in a step for its layers,
    in both passes, and the stated bandwidth of the slowest link.

    Replicas (dp) exchange at the ends of a step, and send nothing for layers.
    """
    run = run_of(job)
    pieces, groups = rank_pieces(run)[job.plan.pp // 2], Groups(run)
    group = groups.shard if axis == "dp" else getattr(groups, axis)
    if group.size == 1:
        return "nothing"
    num_domains = int(group.domains)
    words = link_words(job.cluster)
    where, bytes_per_s = f"across {num_domains} {words.domains}", run.network_bytes_per_s
    if num_domains == 1:
        where, bytes_per_s = f"within a {words.domain}", run.node_bytes_per_s
    links = f"{where} at {bytes_per_s / 1e9:,.3g} GB/s"
    sizes = MeshShape.of(job.plan).sizes | {"ep": job.plan.ep}
    passes = piece_passes(job, run, software_under(run), None, kinds=pieces)
    counts = {piece: _counts(job, number) for piece, number in pieces.items()}
    moved = layer_crossings(job, counts, pieces, passes, sizes)
    sent_bytes = sum(crossing.sent.total for crossing in moved if crossing.axis == axis)
    if not sent_bytes:
        return f"{int(group.size)} ranks {links}"
    return f"{number_text(sent_bytes / 1e9)} GB a device and step {links}"


def _counts(job: JobSpec, num_pieces: int) -> PassCounts:
    """How often a rank runs so many pieces of a kind, if none of the schedule's own exceptions is."""
    passes = num_pieces * job.num_microbatches // job.plan.num_copies
    return PassCounts(passes, passes if job.plan.recompute == "stage" else 0, passes)


def binding(time: StepTime, memory: Memory, job: JobSpec, why: list[Reason]) -> str:
    """The limit of a plan, in words: memory, if something faster does not fit; or the largest part of the step besides
    computing."""
    shares = {name: float(getattr(time, name) / time.total) for name in PARTS}
    room = room_bytes(job)
    faster = [reason for reason in why if reason.excess_bytes > 0 and reason.slower_s <= -_TOLD * time.total]
    waste = max((name for name in PARTS if name != "compute"), key=lambda name: shares[name])
    loss = f"{PARTS[waste]}, {shares[waste]:.1%}"
    parts = [f"computing is {shares['compute']:.0%} of the step; the largest loss is {loss}"]
    if faster:
        best = min(faster, key=lambda reason: reason.slower_s)
        parts.append(
            f"memory binds: {best.field} {best.other} would be {seconds_text(-best.slower_s)} faster and needs "
            f"{best.excess_bytes / GIB:.1f} GiB more than {'its share of the host' if best.is_host else 'there is'}"
        )
    else:
        parts.append(
            f"memory does not bind: {float(memory.process) / room:.0%} of {room / GIB:.0f} GiB is used, and no plan "
            "beside this one that needs more is faster"
        )
    return "; ".join(parts)
