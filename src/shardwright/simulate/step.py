"""Step time of any plan: stage costs into the pipeline, with what communication nothing hides, and where time goes.

Bubbles are closed forms (cost/pipeline.py); schedules that have none, and only those, are played (schedule/timing.py).
Stages are not equal: the slowest rank sets the pace and the others are passed once. All of it is elementwise: one plan,
or as many as an array has entries.
"""

from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import numpy as np

from shardwright.cost.calibration import Constants, Rates, peak_flops, rates_of, software_under
from shardwright.cost.collectives import message_s
from shardwright.cost.pipeline import bubble
from shardwright.cost.replicas import Replicas
from shardwright.cost.stage import Costing, Groups, PieceTime
from shardwright.schedule.generate import GENERATORS, training_program
from shardwright.schedule.timing import Costs, play
from shardwright.spec.plan import STAGES_PER_RANK
from shardwright.spec.software import SoftwareSpec
from shardwright.workload.arrays import Array, Numbers, only
from shardwright.workload.memo import Memo
from shardwright.workload.ranks import Ranks, layer_kinds
from shardwright.workload.shape import Cut, Run, layer_columns, shard_columns


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, and where they go on the rank that sets the pace. The parts add up to `total`;
    `slower` is the part of `other` that many nodes make everything slower by.

    `tensor`, `context`, `expert`, `data` and `messages` are communication that nothing hides, `host` is copies to host
    memory and back and updates there that nothing hides. `mfu` and `hfu` are by model FLOPs over the full sequence and
    by those executed, over the peak of the products' number type. Between `low` and `high` lay four of five measured
    steps of families of runs to which no constant was fitted.
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
    host: Numbers
    other: Numbers
    slower: Numbers
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
    ranks: Ranks
    groups: Groups
    pace: PieceTime
    whole: PieceTime

    @property
    def cut(self) -> Cut:
        """The plans."""
        return self.run.cut


def step_time(run: Run, constants: Constants, memo: Memo | None = None) -> StepTime:
    """Predict a step; arrays where the plan's numbers are. `memo` has what was computed before with these constants.

    KeyError says what is not known, ValueError what contradicts itself.
    """
    if run.cut.schedule not in GENERATORS:
        raise ValueError(f"schedule {run.cut.schedule!r} is not known; there are {', '.join(GENERATORS)}")
    steps = _steps(replace(run, cut=run.cut.as_arrays()), constants, memo or Memo())
    cut, rates, pace, m = steps.cut, steps.rates, steps.pace, steps.cut.num_microbatches
    ends = Replicas.of(steps.run, steps.software, rates, steps.groups, steps.ranks, pace)
    waits, messages, data = _bubble(steps), _messages(steps), ends.data_s()
    optimizer, host = ends.update_s()
    other = rates.step_s + rates.flush * pace.total * (cut.pp > 1)
    total = m * pace.total + waits + messages + data + optimizer + host + other
    nodes = np.maximum(1.0, cut.world / rates.domain)
    slower = rates.jitter * np.log2(nodes) * total
    total = total + slower
    available = peak_flops(run) * cut.world * total
    mfu = run.shape.flops_per_token() * cut.global_batch * run.shape.sequence / available
    hfu = mfu * (1.0 + steps.whole.flops_again / (3 * steps.whole.flops))
    found = StepTime(
        total=total, compute=m * (pace.forward + pace.input_grad + pace.weight_grad), again=m * pace.again,
        tensor=m * pace.tensor, context=m * pace.context, expert=m * pace.expert, data=data + m * pace.shard,
        messages=messages, bubble=waits, optimizer=optimizer, host=host + m * pace.host, other=other + slower,
        slower=slower, mfu=mfu, hfu=hfu, low=total * rates.low, high=total * rates.high,
    )  # fmt: skip
    return only(found) if run.cut.is_single else found


def _steps(run: Run, constants: Constants, memo: Memo) -> _Steps:
    """What a microbatch costs: layers once for each that differs, ranks by what they hold. Numbers are arrays."""
    shape, cut = run.shape, run.cut
    ranks = memo.ranks(shape, cut)
    tables = {("embedding", "none"): ranks.embedding, ("head", "none"): ranks.head}
    # Of a bidirectional pipeline's two copies a microbatch meets one.
    held = {
        piece: count / cut.num_copies
        for piece, count in (dict(zip(ranks.kinds, ranks.layers, strict=True)) | tables).items()
    }
    software, rates = software_under(run), rates_of(run, constants)
    times = _piece_times(run, constants, memo, tuple(held))
    by_rank = sum(count * PieceTime(*of).total for count, of in zip(held.values(), times, strict=True))
    slowest = np.argmax(by_rank, axis=0), np.arange(len(cut.pp))
    pace: Numbers = sum(count[slowest] * of for count, of in zip(held.values(), times, strict=True))
    counts = Counter([*layer_kinds(shape, cut), *tables])
    whole: Numbers = sum(counts[piece] * of for piece, of in zip(held, times, strict=True))
    if not shape.experts:  # what replicas do takes longest where there is most
        ranks = ranks.fullest(shape, cut)
    return _Steps(run, software, rates, ranks, Groups.of(run), PieceTime(*pace), PieceTime(*whole))


def _piece_times(run: Run, constants: Constants, memo: Memo, pieces: tuple[tuple[str, str], ...]) -> list[Array]:
    """The fields of each piece's PieceTime, in shape (fields, plans)."""
    cut = run.cut

    def whole(run: Run) -> Array:
        costing = Costing.of(run, constants)
        return _rows(run, [costing.whole_piece(*piece).values() for piece in pieces])

    # Of the schedule it matters whether another microbatch computes meanwhile.
    paired = "dualpipe" if run.shape.experts and cut.schedule.startswith("dualpipe") else "1f1b"
    words = replace(cut.words, schedule=paired)
    times = list(memo.rows("piece", run, words, layer_columns, whole).reshape(len(pieces), -1, len(cut.tp)))
    if not np.any(cut.zero == 3):
        return times

    kinds = tuple(dict.fromkeys(kind for kind, _ in pieces))

    def sharded(run: Run) -> Array:
        costing = Costing.of(run, constants)
        return _rows(run, [costing.shard_s(kind) for kind in kinds])

    copied = "dualpipe" if cut.num_copies == 2 else "1f1b"
    words = replace(words, schedule=copied, recompute="none", policies=(), cp_method="ring")
    shards = memo.rows("shard", run, words, shard_columns, sharded).reshape(len(kinds), 2, -1)
    software, rates = software_under(run), rates_of(run, constants)
    return [
        np.stack(PieceTime(*of).gathered(rates, software, *shards[kinds.index(kind)]).values())
        for (kind, _), of in zip(pieces, times, strict=True)
    ]


def _rows(run: Run, values: list[tuple[Numbers, ...]]) -> Array:
    """All of some values, one below the other: (values, plans)."""
    return np.stack([np.broadcast_to(value, run.cut.tp.shape) for of in values for value in of])


# Schedules whose bubble is that a microbatch passes all other ranks, and whose order is not made for equal stages.
_PASSING = ("sequential", "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs")
# Those without a formula.
_PLAYED = ("auto", "pipedream", "pipedream-2bw")


def _bubble(steps: _Steps) -> Numbers:
    """How long the pace-setting rank waits for others at the ends of a step."""
    cut, pace, whole = steps.cut, steps.pace, steps.whole
    p, v, m = cut.pp, cut.virtual, cut.num_microbatches
    others, count = whole, p
    if cut.schedule in _PASSING:
        others, count = whole + pace.times(-1), np.maximum(1, p - 1)
    forward = (others.forward + others.exposed_forward) / count
    weight = others.weight_grad / count
    back = others.total / count - forward - weight
    if cut.schedule not in _PLAYED:
        return np.where(p > 1, bubble(cut.schedule, p, m, v, forward, back, weight), 0.0)
    played = np.vectorize(_played, otypes=[float])
    times = (np.round(seconds, 9) for seconds in (forward, back, weight))
    return np.where(p > 1, played(cut.schedule, p, m, v, *times) - m * whole.total / p, 0.0)


@lru_cache(maxsize=1024)
def _played(name: str, p: int, m: int, v: int, forward: float, back: float, weight: float) -> float:
    """Makespan of a schedule with equal stages: of a few microbatches, and more at the pace of a rank."""
    few = min(m, 4 * p)
    program = training_program(name, p, few, v)
    share = p / program.num_stages
    costs = Costs.uniform(program.num_stages, forward * share, back * share, weight * share)
    return play(program, costs).makespan + (m - few) * (forward + back + weight)


def message_bytes(run: Run, software: SoftwareSpec) -> Numbers:
    """What one rank sends a neighbour in the pipeline for a microbatch."""
    cut = run.cut
    size = cut.element_bytes * run.shape.sequence / cut.cp * cut.microbatch * run.shape.hidden
    return size / np.where(cut.sequence_parallel | software.message_split, cut.tp, 1)


def _messages(steps: _Steps) -> Numbers:
    """What the pipeline's messages add, by how the schedule waits for them.

    A latency c that only the receiver waits for costs 1F1B 2c ((p - 1) m / p + p - 2), for it leaves no slack unless it
    has forwards to spare; an interleaved rank exchanges before each of its 2 v m chunks unless messages pass while it
    computes.
    """
    cut, rates = steps.cut, steps.rates
    p, v, m = cut.pp, cut.virtual, cut.num_microbatches
    one = message_s(rates, steps.groups.pp, message_bytes(steps.run, steps.software))
    ends = 2 * one * (p - 1)
    if cut.schedule in STAGES_PER_RANK:
        seconds = ends + 2 * one * v * m * (rates.leak if steps.software.message_overlap else 1.0)
    elif cut.schedule.startswith("zb") or cut.schedule == "gpipe":
        seconds = 2 * ends
    else:
        seconds = np.where(cut.extra_warmup > 0, ends, 2 * one * ((p - 1) * m / p + np.maximum(0, p - 2)))
    return np.where(p > 1, seconds, 0.0)
