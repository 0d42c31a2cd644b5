"""Step time of any plan: stage costs into the pipeline, with what communication nothing hides, and where time goes.

Bubbles are closed forms (cost/pipeline_bubble.py); schedules that have none, and only those, are played
(schedule/timing.py). Stages are not equal: the slowest rank sets the pace and the others are passed once. All of it is
elementwise: one plan, or as many as an array has entries.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from shardwright.config.layer_kind import has_experts
from shardwright.config.plan import STAGE_COPIES, STAGES_PER_RANK
from shardwright.config.software import SoftwareSpec
from shardwright.cost.calibration import Constants, Rates, peak_flops, rates_of, software_under
from shardwright.cost.collective_time import message_s
from shardwright.cost.data_parallel import DataParallel
from shardwright.cost.group_links import Groups
from shardwright.cost.pipeline_bubble import ALTERNATING, are_put_off, bubble, gathers_for_a_pass
from shardwright.cost.stage_time import Costing, PieceTime, Repeatable
from shardwright.schedule.registry import GENERATORS, PipelineShape, shape_program
from shardwright.schedule.timing import Costs, play
from shardwright.simulate.least_pace import MicrobatchPieces, least_pace_s
from shardwright.workload.arrays import Array, Numbers, only, stacked_rows
from shardwright.workload.memo import Memo, layer_columns, layer_words, plain_columns, shard_columns, shard_words
from shardwright.workload.query import PlanGrid, Run
from shardwright.workload.stage_contents import PipelineRanks, layers_by_kind


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


@dataclass(frozen=True)
class _Steps:
    """Plans in arrays, and what a microbatch costs on the rank that sets the pace and on all ranks together."""

    run: Run
    software: SoftwareSpec
    rates: Rates
    ranks: PipelineRanks
    groups: Groups
    pace: PieceTime
    whole: PieceTime
    spare_s: Numbers  # of a microbatch: what no layout of the layers makes the slowest rank faster by

    @property
    def cut(self) -> PlanGrid:
        """The plans."""
        return self.run.cut


def step_time(run: Run, constants: Constants, memo: Memo | None = None) -> StepTime:
    """Predict a step; arrays where the plan's numbers are. `memo` has what was computed before with these constants.

    KeyError says what is not known, ValueError what contradicts itself.
    """
    return step_time_and_spare(run, constants, memo)[0]


def step_time_and_spare(run: Run, constants: Constants, memo: Memo | None = None) -> tuple[StepTime, Numbers]:
    """(what `step_time` says, seconds by which no layout of the layers over the stages makes the step shorter)."""
    for name, _ in run.cut.schedules:
        if name not in GENERATORS:
            raise ValueError(f"schedule {name!r} is not known; there are {', '.join(GENERATORS)}")
    memo = memo or Memo()
    steps = _steps(replace(run, cut=run.cut.as_arrays()), constants, memo)
    cut, rates, pace, m = steps.cut, steps.rates, steps.pace, steps.cut.num_microbatches
    ranks = steps.ranks
    if not run.shape.experts:  # what replicas do takes longest where there is most
        ranks = ranks.fullest(memo.held(run.shape, cut)[0])
    ends = DataParallel.of(steps.run, steps.software, rates, steps.groups, ranks, pace)
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
    spare_s = m * steps.spare_s * (1 + rates.jitter * np.log2(nodes))
    return (only(found), float(spare_s[0])) if run.cut.is_single else (found, spare_s)


def pipeline_s(run: Run, constants: Constants, memo: Memo) -> Numbers:
    """Seconds of a step but for what replicas do at its ends and what is beside, and less what a layout might spare.

    Numbers of the run are arrays.
    """
    steps = _steps(run, constants, memo)
    return steps.cut.num_microbatches * (steps.pace.total - steps.spare_s) + _bubble(steps) + _messages(steps)


def microbatch_time(run: Run, constants: Constants, memo: Memo) -> PieceTime:
    """What one microbatch costs through all layers, the embedding and the head. Numbers of the run are arrays."""
    return PieceTime(*_of_microbatch(run, _piece_times(run, _rates(run, constants, memo), constants, memo)))


def _rates(run: Run, constants: Constants, memo: Memo) -> Rates:
    rates = memo.once(("rates", run.cut.precision, run.setting), lambda: rates_of(run, constants))
    return replace(rates, busy=run.cut.world)


def _steps(run: Run, constants: Constants, memo: Memo) -> _Steps:
    """What a microbatch costs: layers once for each that differs, ranks by what they hold. Numbers are arrays."""
    shape, cut = run.shape, run.cut
    ranks, rates = memo.ranks(shape, cut), _rates(run, constants, memo)
    times = _piece_times(run, rates, constants, memo)
    # Of a bidirectional pipeline's two copies a microbatch meets one.
    ends = ranks.embedding, ranks.head, *([ranks.head * shape.mtp] if shape.mtp else ())
    counts = [count / cut.num_copies for count in (*ranks.layers, *ends)]
    by_rank = sum(count * PieceTime(*of).total for count, of in zip(counts, times, strict=True))
    slowest = np.argmax(by_rank, axis=0), np.arange(len(cut.pp))
    pace: Numbers = sum(count[slowest] * of for count, of in zip(counts, times, strict=True))
    whole = PieceTime(*_of_microbatch(run, times))
    spare_s = np.max(by_rank, axis=0) - _least_pace_s(run, times, whole.total)
    return _Steps(
        run, software_under(run), rates, ranks, groups=Groups(run), pace=PieceTime(*pace), whole=whole,
        spare_s=np.where(cut.pp > 1, np.maximum(0.0, spare_s), 0.0),
    )  # fmt: skip


def _least_pace_s(run: Run, times: list[Array], whole_s: Numbers) -> Array:
    """What no layout of the layers over the stages makes the slowest rank faster than, for a microbatch."""
    cut, num_kinds = run.cut, len(layers_by_kind(run.shape, run.cut))
    *layers_s, embedding_s, head_s = (PieceTime(*piece).total for piece in times[: num_kinds + 2])
    pieces = MicrobatchPieces(
        np.min(np.broadcast_arrays(*layers_s), axis=0), embedding_s, head_s, whole_s, run.shape.layers
    )  # fmt: skip

    def has_ends_apart(name: str, at: Any) -> Numbers:
        return np.full(len(cut.pp[at]), float(name not in ALTERNATING and name not in STAGE_COPIES))

    is_apart = np.asarray(cut.by_schedule(has_ends_apart)) > 0
    return least_pace_s(cut.pp, cut.num_copies, pieces, is_apart & (not cut.is_vee))


def _of_microbatch(run: Run, times: list[Array]) -> Numbers:
    """The times of all layers, the embedding, the head and what predicts further tokens together."""
    mtp = run.shape.mtp
    counts = *layers_by_kind(run.shape, run.cut).values(), 1, 1, *([mtp] if mtp else ())
    found: Numbers = sum(count * of for count, of in zip(counts, times, strict=True))
    return found


_ENDS = ("embedding", "none"), ("head", "none")


def _piece_times(run: Run, rates: Rates, constants: Constants, memo: Memo) -> list[Array]:
    """The fields of each piece's PieceTime, in shape (fields, plans): kinds of layers, the embedding, the head."""
    cut = run.cut
    pieces = *layers_by_kind(run.shape, cut), *_ENDS, *([("mtp", "none")] if run.shape.mtp else ())
    # Of the schedule it matters whether another microbatch computes meanwhile.
    is_paired = run.shape.experts is not None and cut.is_paired
    words = is_paired, *layer_words(cut)
    kinds = tuple(dict.fromkeys(kind for kind, _ in pieces))

    def whole(run: Run) -> Array:
        costing, of_kinds, first = Costing.of(run, constants), {}, 0
        before = memo.rows("before experts", run, words, plain_columns, before_experts)
        for kind in kinds:
            end = first + Repeatable.num_values(len(costing.chain_before_experts(kind)))
            of_kinds[kind], first = Repeatable.of_values(before[first:end]), end
        for kind in filter(has_experts, kinds):
            of_kinds[kind] += Repeatable.of_values(memo.rows("experts", run, words, layer_columns, experts))
        times = [costing.repeating(kind, policy, of_kinds[kind]).values() for kind, policy in pieces]
        return _rows(run, times)

    def before_experts(run: Run) -> Array:
        costing = Costing.of(run, constants)
        return _rows(run, [costing.before_experts(kind).values() for kind in kinds])

    def experts(run: Run) -> Array:
        return _rows(run, [Costing.of(run, constants).experts().values()])

    def sharded(run: Run) -> Array:
        costing = Costing.of(run, constants)
        return _rows(run, [costing.shard_s(kind) for kind in kinds])

    rows = memo.rows("piece", run, (pieces, *words), layer_columns, whole).reshape(len(pieces), -1, len(cut.tp))
    times = list(rows)
    if software_under(run).sum_overlap:
        put_off = are_put_off(cut)
        times = [np.stack(PieceTime(*of).where_split(put_off).values()) for of in times]
    if not np.any(cut.zero == 3):
        return times
    shards = memo.rows("shard", run, shard_words(cut), shard_columns, sharded).reshape(len(kinds), 2, -1)
    software, often = software_under(run), gathers_for_a_pass(cut)
    return [
        np.stack(PieceTime(*of).gathered(rates, software, shards[kinds.index(kind)], often).values())
        for (kind, _), of in zip(pieces, times, strict=True)
    ]


def _rows(run: Run, values: list[tuple[Numbers, ...]]) -> Array:
    """All of some values, one below the other: (values, plans)."""
    return stacked_rows([value for of in values for value in of], len(run.cut.tp))


# Schedules whose bubble is that a microbatch passes all other ranks, and whose order is not made for equal stages.
_PASSING = ("sequential", "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs")
# Those without a formula.
_PLAYED = ("auto", "pipedream", "pipedream-2bw")


def _bubble(steps: _Steps) -> Numbers:
    """How long the pace-setting rank waits for others at the ends of a step."""
    whole, pace = ((of.forward + of.exposed_forward, of.weight_grad, of.total) for of in (steps.whole, steps.pace))
    numbers = steps.cut.pp, steps.cut.num_microbatches, steps.cut.virtual

    def waits(name: str, at: Any) -> Numbers:
        p, m, v = (number[at] for number in numbers)
        forward, weight, total = (seconds[at] for seconds in whole)
        count, step = p, m * total / p
        if name in _PASSING:
            forward, weight, total = (of_all[at] - mine[at] for of_all, mine in zip(whole, pace, strict=True))
            count = np.maximum(1, p - 1)
        forward, weight = forward / count, weight / count
        back = total / count - forward - weight
        if name not in _PLAYED:
            return np.where(p > 1, bubble(name, p, m, v, f=forward, i=back, w=weight), 0.0)
        played = np.vectorize(_played, otypes=[float])
        times = (np.round(seconds, 9) for seconds in (forward, back, weight))
        return np.where(p > 1, played(name, p, m, v, *times) - step, 0.0)

    return steps.cut.by_schedule(waits)


@lru_cache(maxsize=1024)
def _played(name: str, p: int, m: int, v: int, forward: float, back: float, weight: float) -> float:
    """Makespan of a schedule with equal stages: of a few microbatches, and more at the pace of a rank."""
    few = min(m, 4 * p)
    program = shape_program(name, PipelineShape(p, few, v))
    share = p / program.num_stages
    costs = Costs.uniform(program.num_stages, forward * share, back * share, weight * share)
    return play(program, costs).makespan + (m - few) * (forward + back + weight)


def border_bytes(run: Run, software: SoftwareSpec) -> Numbers:
    """What one rank sends a neighbour in the pipeline for a microbatch."""
    cut = run.cut
    size = cut.element_bytes * run.shape.sequence / cut.cp * cut.microbatch * run.shape.hidden
    return size / np.where(cut.sequence_parallel | software.message_split, cut.tp, 1)


def message_and_turn_s(run: Run, rates: Rates) -> tuple[Numbers, Numbers]:
    """(one message between neighbours in the pipeline, what messages add to a step for each stage that a rank has,
    where it has several)."""
    software = software_under(run)
    one = message_s(rates, Groups(run).pp, border_bytes(run, software))
    return one, 2 * one * run.cut.num_microbatches * (rates.leak if software.message_overlap else 1.0)


def _messages(steps: _Steps) -> Numbers:
    """What the pipeline's messages add, by how the schedule waits for them.

    A latency c that only the receiver waits for costs 1F1B 2c ((p - 1) m / p + p - 2), for it leaves no slack unless it
    has forwards to spare; an interleaved rank exchanges before each of its 2 v m chunks unless messages pass while it
    computes.
    """
    cut, rates = steps.cut, steps.rates
    p, m = cut.pp, cut.num_microbatches
    one, turn = message_and_turn_s(steps.run, rates)
    ends, turns = 2 * one * (p - 1), cut.virtual * turn
    exposed = np.where(cut.extra_warmup > 0, ends, 2 * one * ((p - 1) * m / p + np.maximum(0, p - 2)))

    def seconds(name: str, at: Any) -> Numbers:
        if name in STAGES_PER_RANK:
            return ends[at] + turns[at]
        return 2 * ends[at] if name.startswith("zb") or name == "gpipe" else exposed[at]

    return np.where(p > 1, cut.by_schedule(seconds), 0.0)
