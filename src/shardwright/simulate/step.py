"""Step time of any plan: stage costs into the pipeline, with what communication nothing hides, and where time goes.

Closed forms for 1F1B, interleaved 1F1B and GPipe, which are exact for equal stages, and for the zero-bubble schedules
of their papers; any other schedule is played (schedule/timing.py). Stages are not equal: the slowest rank sets the pace
and the others are passed once. All of it is elementwise: one plan, or as many as an array has entries.
"""

from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import numpy as np

from shardwright.cost.calibration import Constants, Rates, peak_flops
from shardwright.cost.collectives import Group, message_s, ring_s
from shardwright.cost.stage import Costing, Groups, PieceTime, beside
from shardwright.schedule.generate import GENERATORS, training_program
from shardwright.schedule.timing import Costs, play
from shardwright.spec.plan import STAGES_PER_RANK
from shardwright.spec.software import SoftwareSpec
from shardwright.workload.arrays import Array, Numbers, only
from shardwright.workload.operators import HALF
from shardwright.workload.ranks import Ranks, different_ranks, layer_kinds
from shardwright.workload.shape import Cut, Run, local_cuts


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, and where they go on the rank that sets the pace. The parts add up to `total`.

    `tensor`, `context`, `expert`, `data` and `messages` are communication that nothing hides. `mfu` and `hfu` are by
    model FLOPs over the full sequence and by those executed, over the peak of the products' number type. Between `low`
    and `high` lay four of five measured steps of families of runs to which no constant was fitted.
    """

    total: Numbers
    compute: Numbers
    again: Numbers
    tensor: Numbers
    context: Numbers
    expert: Numbers
    data: Numbers
    messages: Numbers
    bubble: Numbers
    optimizer: Numbers
    other: Numbers
    mfu: Numbers
    hfu: Numbers
    low: Numbers
    high: Numbers

    def as_dict(self) -> dict[str, Numbers]:
        """By name."""
        return asdict(self)


@dataclass(frozen=True)
class _Steps:
    """Plans in arrays, and what a microbatch costs on the rank that sets the pace and on all ranks together."""

    run: Run
    software: SoftwareSpec
    rates: Rates
    groups: Groups
    ranks: Ranks
    pace: PieceTime
    whole: PieceTime

    @property
    def cut(self) -> Cut:
        """The plans."""
        return self.run.cut


def step_time(run: Run, constants: Constants) -> StepTime:
    """Predict a step; arrays where the plan's numbers are.

    KeyError says what is not known, ValueError what contradicts itself.
    """
    steps = _steps(replace(run, cut=run.cut.as_arrays()), constants)
    cut, rates, pace, m = steps.cut, steps.rates, steps.pace, steps.cut.num_microbatches
    bubble = _bubble(steps)
    messages = _messages(steps)
    data = _data(steps)
    optimizer = _optimizer(steps)
    other = rates.step_s + rates.flush_s * (cut.pp > 1)
    total = m * pace.total + bubble + messages + data + optimizer + other
    nodes = np.maximum(1.0, cut.world / rates.domain)
    slower = rates.jitter * np.log2(nodes) * total
    total = total + slower
    available = peak_flops(run) * cut.world * total
    mfu = run.shape.flops_per_token() * cut.global_batch * run.shape.sequence / available
    hfu = mfu * (1.0 + steps.whole.flops_again / (3 * steps.whole.flops))
    found = StepTime(
        total=total, compute=m * (pace.forward + pace.input_grad + pace.weight_grad), again=m * pace.again,
        tensor=m * pace.tensor, context=m * pace.context, expert=m * pace.expert, data=data + m * pace.shard,
        messages=messages, bubble=bubble, optimizer=optimizer, other=other + slower, mfu=mfu, hfu=hfu,
        low=total * rates.low, high=total * rates.high,
    )  # fmt: skip
    return only(found) if run.cut.is_single else found


def _steps(run: Run, constants: Constants) -> _Steps:
    """What a microbatch costs: layers once for each that differs, ranks by what they hold. Numbers are arrays."""
    shape, cut = run.shape, run.cut
    local, which = local_cuts(cut)
    costing = Costing.of(replace(run, cut=local), constants)
    ranks = different_ranks(shape, cut)
    tables = {("embedding", "none"): ranks.embedding, ("head", "none"): ranks.head}
    held = dict(zip(ranks.kinds, ranks.layers, strict=True)) | tables
    pieces = {piece: costing.piece(*piece) for piece in held}
    counts = Counter([*layer_kinds(shape, cut), *tables])
    whole = _together([pieces[piece].times(count) for piece, count in counts.items()]).at(which)
    totals = {piece: np.asarray(of.total)[which] for piece, of in pieces.items()}
    by_rank = sum(count * totals[piece] for piece, count in held.items())
    slowest = np.argmax(by_rank, axis=0), np.arange(len(which))
    pace = _together([pieces[piece].at(which).times(count[slowest]) for piece, count in held.items()])
    groups = Groups.of(cut, costing.rates.domain)
    return _Steps(run, costing.software, costing.rates, groups, ranks, pace, whole)


def _together(pieces: list[PieceTime]) -> PieceTime:
    return sum(pieces, start=PieceTime())


def _bubble(steps: _Steps) -> Numbers:
    """How long the pace-setting rank waits for others at the ends of a step."""
    cut, pace, whole = steps.cut, steps.pace, steps.whole
    p, v, m = cut.pp, cut.virtual, cut.num_microbatches
    forward = (whole.forward + whole.exposed_forward) / p
    weight = whole.weight_grad / p
    back = whole.total / p - forward - weight
    if cut.schedule in ("1f1b", "sequential", "gpipe", "interleaved-1f1b"):
        bubble = (whole.total - pace.total) / v
    elif cut.schedule == "zb-h1":
        bubble = (p - 1) * np.maximum(0.0, forward + back - weight)
    elif cut.schedule == "zb-h2":
        bubble = (p - 1) * np.maximum(0.0, forward + back - 2 * weight)
    else:
        played = np.vectorize(_played, otypes=[float])
        times = (np.round(seconds, 9) for seconds in (forward, back, weight))
        bubble = played(cut.schedule, p, m, v, *times) - m * pace.total
    return np.where(p > 1, bubble, 0.0)


@lru_cache(maxsize=1024)
def _played(name: str, p: int, m: int, v: int, forward: float, back: float, weight: float) -> float:
    """Makespan of a schedule with equal stages: of a few microbatches, and more at the pace of a rank."""
    if name not in GENERATORS:
        raise ValueError(f"schedule {name!r} is not known; there are {', '.join(GENERATORS)}")
    few = min(m, 4 * p)
    program = training_program(name, p, few, v)
    share = p / program.num_stages
    costs = Costs.uniform(program.num_stages, forward * share, back * share, weight * share)
    return play(program, costs).makespan + (m - few) * (forward + back + weight)


def _messages(steps: _Steps) -> Numbers:
    """What the pipeline's messages add, by how the schedule waits for them.

    A latency c that only the receiver waits for costs 1F1B 2c ((p - 1) m / p + p - 2), for it leaves no slack; an
    interleaved rank exchanges before each of its 2 v m chunks unless messages pass while it computes.
    """
    run, cut, rates = steps.run, steps.cut, steps.rates
    p, v, m = cut.pp, cut.virtual, cut.num_microbatches
    size = HALF * run.shape.sequence / cut.cp * cut.microbatch * run.shape.hidden
    size = size / np.where(cut.sequence_parallel | steps.software.message_split, cut.tp, 1)
    one = message_s(rates, size, cut.world <= rates.domain)
    ends = 2 * one * (p - 1)
    if cut.schedule in STAGES_PER_RANK:
        seconds = ends + 2 * one * v * m * (rates.leak if steps.software.message_overlap else 1.0)
    elif cut.schedule.startswith("zb") or cut.schedule == "gpipe":
        seconds = 2 * ends
    else:
        seconds = 2 * one * ((p - 1) * m / p + np.maximum(0, p - 2))
    return np.where(p > 1, seconds, 0.0)


def _data(steps: _Steps) -> Numbers:
    """Replicas' communication that nothing hides, at the ends of a step: gradients, and updated parameters."""
    cut, software, rates, groups, pace = steps.cut, steps.software, steps.rates, steps.groups, steps.pace
    common, routed = steps.ranks.parameters(steps.run.shape, cut)
    reduce_s, gather_s = _exchanged(steps, groups.shard, groups.copies, common)
    more = _exchanged(steps, groups.expert_shard, groups.expert_copies, routed)
    reduce_s, gather_s = reduce_s + more[0], gather_s + more[1]
    gather_s = gather_s + rates.turn_s * groups.shard.size * (cut.zero > 0)
    if software.reduce_overlap:
        reduce_s = beside(rates, reduce_s, pace.input_grad + pace.weight_grad + pace.again)
    if software.gather_overlap:
        gather_s = beside(rates, gather_s, pace.forward)
    seconds = np.max(reduce_s + gather_s, axis=0) + _tied(steps)
    return np.where((cut.zero == 3) & (cut.replicas > 1), 0.0, seconds)


def _exchanged(steps: _Steps, shard: Group, copies: Group, parameters: Array) -> tuple[Numbers, Numbers]:
    """(seconds of reducing gradients, seconds of gathering parameters) of one kind of parameters."""
    cut, software, rates = steps.cut, steps.software, steps.rates
    size = software.reduce_bytes * parameters
    is_whole = (cut.zero == 0) | (software.reduce_whole & (copies.size == 1))
    # A shard's gradients are also summed over its copies.
    reduce_s = ring_s(rates, shard, size, np.where(is_whole, 2, 1)) + ring_s(rates, copies, size / shard.size, 2)
    return reduce_s, ring_s(rates, shard, HALF * parameters * (cut.zero > 0))


def _tied(steps: _Steps) -> Numbers:
    """The two gradients of a table that the first and the last rank share are summed."""
    run, cut = steps.run, steps.cut
    size = steps.software.reduce_bytes * run.shape.vocab * run.shape.hidden / cut.tp
    pair = Group(2, np.where(cut.world <= steps.rates.domain, 2, 1))
    return ring_s(steps.rates, pair, size * (run.shape.tied & (cut.pp > 1)), 2)


# Bytes by element of an update: Adam reads a gradient and reads and writes two moments and the master weight, all in
# float32, and writes the weight in 16 bits; the norm of the gradients reads them once more.
_UPDATE_BYTES = 4 + 4 * 6 + 2 + 4


def _optimizer(steps: _Steps) -> Numbers:
    """The update of the rank that holds most."""
    cut = steps.cut
    common, routed = steps.ranks.parameters(steps.run.shape, cut)
    is_sharded = cut.zero > 0
    mine = common / np.where(is_sharded, cut.shard_ranks, 1) + routed / np.where(is_sharded, cut.expert_shard_ranks, 1)
    return np.max(mine, axis=0) * _UPDATE_BYTES / steps.rates.memory
