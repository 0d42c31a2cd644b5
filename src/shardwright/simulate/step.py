"""Step time of any plan: stage costs into the pipeline, with what communication nothing hides, and where time goes.

Closed forms for 1F1B, interleaved 1F1B and GPipe, which are exact for equal stages, and for the zero-bubble schedules
of their papers; any other schedule is played (schedule/timing.py). Stages are not equal: the slowest rank sets the pace
and the others are passed once.
"""

import math
from dataclasses import asdict, dataclass
from functools import lru_cache

from shardwright.cost.calibration import Constants, peak_flops
from shardwright.cost.collectives import Group, message_s, ring_s
from shardwright.cost.stage import Costing, PieceTime
from shardwright.schedule.generate import GENERATORS, training_program
from shardwright.schedule.timing import Costs, play
from shardwright.workload.operators import HALF
from shardwright.workload.shape import Run


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, and where they go on the rank that sets the pace. The parts add up to `total`.

    `tensor`, `context`, `expert`, `data` and `messages` are communication that nothing hides. `mfu` and `hfu` are by
    model FLOPs over the full sequence and by those executed, over the peak of the products' number type. Between `low`
    and `high` lay four of five measured steps of families of runs to which no constant was fitted.
    """

    total: float
    compute: float
    again: float
    tensor: float
    context: float
    expert: float
    data: float
    messages: float
    bubble: float
    optimizer: float
    other: float
    mfu: float
    hfu: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """By name."""
        return asdict(self)


def step_time(run: Run, constants: Constants) -> StepTime:
    """Predict a step. KeyError says what is not known, ValueError what contradicts itself."""
    costing = Costing.of(run, constants)
    cut, rates = run.cut, costing.rates
    ranks = _rank_times(costing)
    pace = max(ranks, key=lambda piece: piece.total)
    m = cut.num_microbatches
    bubble = _bubble(costing, ranks, pace)
    messages = _messages(costing)
    data = _data(costing, pace)
    optimizer = _optimizer(costing)
    other = rates.step_s + rates.flush_s
    total = m * pace.total + bubble + messages + data + optimizer + other
    nodes = max(1.0, cut.world / max(1, run.devices_per_node))
    slower = rates.jitter * math.log2(nodes) * total
    total += slower
    return StepTime(
        total=total, compute=m * (pace.forward + pace.input_grad + pace.weight_grad), again=m * pace.again,
        tensor=m * pace.tensor, context=m * pace.context, expert=m * pace.expert, data=data + m * pace.shard,
        messages=messages, bubble=bubble, optimizer=optimizer, other=other + slower,
        **_utilisation(costing, total, ranks), low=total * rates.low, high=total * rates.high,
    )  # fmt: skip


def _rank_times(costing: Costing) -> list[PieceTime]:
    """What one microbatch costs on each pipeline rank, through all its stages."""
    run = costing.run
    shape, cut = run.shape, run.cut
    layers = cut.stage_layers(shape.layers)
    sharded = cut.zero == 3 and cut.replicas > 1
    of_kind: dict[str, PieceTime] = {}
    for kind in costing.pieces:
        of_kind[kind] = costing.piece(kind)
        if sharded:
            of_kind[kind] = costing.sharded(of_kind[kind], _piece_parameters(run, kind), costing.groups.shard)
    ranks = [PieceTime() for _ in range(cut.pp)]
    if cut.recompute_layers:  # the others keep everything; spread over the ranks
        some = cut.recompute_layers / shape.layers
        of_kind["dense"] = of_kind["dense"].with_again(some)
    first = 0
    for stage, count in enumerate(layers):
        dense = sum(shape.is_dense(layer) for layer in range(first, first + count))
        first += count
        found = of_kind["dense"].times(dense)
        if count > dense:
            found += of_kind["experts"].times(count - dense)
        if stage == 0:
            found += of_kind["embedding"]
        if stage == len(layers) - 1:
            found += of_kind["head"]
        ranks[stage % cut.pp] += found
    return ranks


def _piece_parameters(run: Run, kind: str) -> float:
    """Elements of a piece on a tensor-parallel rank."""
    shape, cut = run.shape, run.cut
    if kind in ("embedding", "head"):
        return shape.vocab * shape.hidden / cut.tp
    common, routed = shape.layer_parameters(0 if kind == "dense" else shape.layers - 1)
    return common / cut.tp + routed / (cut.ep * cut.expert_tp)


@lru_cache(maxsize=4096)
def rank_parameters(run: Run) -> list[tuple[float, float]]:
    """(elements that all tokens use, elements of routed experts) that each pipeline rank holds."""
    shape, cut = run.shape, run.cut
    layers = cut.stage_layers(shape.layers)
    held = [(0.0, 0.0)] * cut.pp
    first = 0
    for stage, count in enumerate(layers):
        common = routed = 0.0
        for layer in range(first, first + count):
            mine, theirs = shape.layer_parameters(layer)
            common, routed = common + mine / cut.tp, routed + theirs / (cut.ep * cut.expert_tp)
        first += count
        table = shape.vocab * shape.hidden / cut.tp
        alone = cut.pp == 1 and shape.tied
        common += table * ((stage == 0) + (stage == len(layers) - 1 and not alone))
        before = held[stage % cut.pp]
        held[stage % cut.pp] = before[0] + common, before[1] + routed
    return held


def _bubble(costing: Costing, ranks: list[PieceTime], pace: PieceTime) -> float:
    """How long the pace-setting rank waits for others at the ends of a step."""
    cut = costing.run.cut
    p, v, m = cut.pp, cut.virtual, cut.num_microbatches
    if p == 1:
        return 0.0
    others = sum(rank.total for rank in ranks) - pace.total
    if cut.schedule in ("1f1b", "none", "gpipe", "interleaved", ""):
        return others / v
    forward = sum(r.forward + r.exposed_forward for r in ranks) / p
    weight = sum(r.weight_grad for r in ranks) / p
    back = sum(r.total for r in ranks) / p - forward - weight
    if cut.schedule in ("zb-1p", "zb-h1"):
        return (p - 1) * max(0.0, forward + back - weight)
    if cut.schedule in ("zb-2p", "zb-h2"):
        return (p - 1) * max(0.0, forward + back - 2 * weight)
    return _played(cut.schedule, p, m, v, round(forward, 9), round(back, 9), round(weight, 9)) - m * pace.total


@lru_cache(maxsize=1024)
def _played(name: str, p: int, m: int, v: int, forward: float, back: float, weight: float) -> float:
    """Makespan of a schedule with equal stages: of a few microbatches, and more at the pace of a rank."""
    if name not in GENERATORS:
        raise ValueError(
            f"schedule {name!r} is not known; there are {', '.join(GENERATORS)}, interleaved, zb-1p, zb-2p"
        )
    few = min(m, 4 * p)
    program = training_program(name, p, few, v)
    share = p / program.num_stages
    costs = Costs.uniform(program.num_stages, forward * share, back * share, weight * share)
    return play(program, costs).makespan + (m - few) * (forward + back + weight)


def _messages(costing: Costing) -> float:
    """What the pipeline's messages add, by how the schedule waits for them.

    A latency c that only the receiver waits for costs 1F1B 2c ((p - 1) m / p + p - 2), for it leaves no slack; an
    interleaved rank exchanges before each of its 2 v m chunks unless messages pass while it computes.
    """
    run = costing.run
    cut, p, m = run.cut, run.cut.pp, run.cut.num_microbatches
    if p == 1:
        return 0.0
    shape = run.shape
    size = HALF * shape.sequence / cut.cp * cut.microbatch * shape.hidden
    if cut.sequence_parallel or costing.software.message_split:
        size /= cut.tp
    stride = cut.dp * cut.cp * cut.tp
    within = stride * p <= max(1, run.devices_per_node)
    one = message_s(costing.rates, size, within)
    ends = 2 * one * (p - 1)
    if cut.schedule == "interleaved" or cut.virtual > 1:
        return ends + 2 * one * cut.virtual * m * (costing.rates.leak if costing.software.message_overlap else 1.0)
    if cut.schedule.startswith("zb") or cut.schedule == "gpipe":
        return 2 * ends
    return 2 * one * ((p - 1) * m / p + max(0, p - 2))


def _reduction(costing: Costing, group: Group, parameters: float) -> tuple[float, float]:
    """(seconds of reducing gradients, seconds of gathering parameters) of one kind of parameters."""
    cut, software, rates = costing.run.cut, costing.software, costing.rates
    if group.size == 1 or parameters == 0:
        return 0.0, 0.0
    size = software.reduce_bytes * parameters
    if cut.zero == 0:
        return ring_s(rates, group, size, 2), 0.0
    if 0 < cut.zero_ranks < cut.replicas:
        shard, copies = costing.groups.shard, costing.groups.copies
        # Each shard's gradients are also summed over its copies.
        both = ring_s(rates, shard, size) + ring_s(rates, copies, size / shard.size, 2)
        return both, ring_s(rates, shard, HALF * parameters)
    rounds = 2 if software.reduce_whole else 1
    return ring_s(rates, group, size, rounds), ring_s(rates, group, HALF * parameters)


def _data(costing: Costing, pace: PieceTime) -> float:
    """Replicas' communication that nothing hides, at the ends of a step: gradients, and updated parameters."""
    run = costing.run
    cut, software, rates = run.cut, costing.software, costing.rates
    if cut.zero == 3 and cut.replicas > 1:
        return 0.0
    most = 0.0
    behind = pace.input_grad + pace.weight_grad + pace.again
    for common, routed in rank_parameters(run):
        reduce, gather = _reduction(costing, costing.groups.replicas, common)
        more = _reduction(costing, costing.groups.expert_replicas, routed)
        reduce, gather = reduce + more[0], gather + more[1]
        if cut.zero:
            gather += rates.turn_s * costing.groups.shard.size
        if software.reduce_overlap:
            reduce = max(0.0, reduce - behind) + rates.leak * min(reduce, behind)
        if software.gather_overlap:
            gather = max(0.0, gather - pace.forward) + rates.leak * min(gather, pace.forward)
        most = max(most, reduce + gather)
    if run.shape.tied and cut.pp > 1:  # the table's two gradients, on the first and the last rank
        size = software.reduce_bytes * run.shape.vocab * run.shape.hidden / cut.tp
        within = cut.world <= run.devices_per_node
        most += ring_s(rates, Group(2, 2 if within else 1), size, 2)
    return most


# Bytes by element of an update: Adam reads a gradient and reads and writes two moments and the master weight, all in
# float32, and writes the weight in 16 bits; the norm of the gradients reads them once more.
_UPDATE_BYTES = 4 + 4 * 6 + 2 + 4


def _optimizer(costing: Costing) -> float:
    """The update of the rank that holds most."""
    cut = costing.run.cut
    most = 0.0
    for common, routed in rank_parameters(costing.run):
        shared = cut.zero_ranks if 0 < cut.zero_ranks < cut.replicas else cut.replicas
        mine = common / shared + routed / cut.expert_replicas if cut.zero else common + routed
        most = max(most, mine * _UPDATE_BYTES / costing.rates.memory)
    return most


def _utilisation(costing: Costing, total_s: float, ranks: list[PieceTime]) -> dict[str, float]:
    run = costing.run
    shape, cut = run.shape, run.cut
    peak = peak_flops(run)
    tokens = cut.global_batch * shape.sequence
    model = shape.flops_per_token() * tokens
    forward = sum(rank.flops for rank in ranks)
    again = sum(rank.flops_again for rank in ranks)
    share = 1.0 + again / (3 * forward)
    available = peak * cut.world * total_s
    return {"mfu": model / available, "hfu": model * share / available}
