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
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.software import SoftwareSpec
from shardwright.cost.calibration import Constants, Rates, peak_flops, rates_of, software_under
from shardwright.cost.collective_time import message_s
from shardwright.cost.data_parallel import DataParallel
from shardwright.cost.group_links import Groups
from shardwright.cost.pipeline_bubble import are_put_off, bubble, gathers_for_a_pass
from shardwright.cost.stage_time import Costing, PieceTime, Repeatable
from shardwright.schedule.pipeline_shape import PipelineShape
from shardwright.schedule.shape_program import shape_program
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
    def grid(self) -> PlanGrid:
        """The plans."""
        return self.run.grid


def step_time(run: Run, constants: Constants, memo: Memo | None = None) -> StepTime:
    """Predict a step; arrays where the plan's numbers are. `memo` has what was computed before with these constants.

    KeyError says what is not known, ValueError what contradicts itself.
    """
    return step_time_and_spare(run, constants, memo)[0]


def step_time_and_spare(run: Run, constants: Constants, memo: Memo | None = None) -> tuple[StepTime, Numbers]:
    """(what `step_time` says, seconds by which no layout of the layers over the stages makes the step shorter)."""
    for name, _ in run.grid.schedules:
        if name not in SCHEDULES:
            raise ValueError(f"schedule {name!r} is not known; there are {', '.join(SCHEDULES)}")
    memo = memo or Memo()
    steps = _steps(replace(run, grid=run.grid.as_arrays()), constants, memo)
    grid, rates, pace, m = steps.grid, steps.rates, steps.pace, steps.grid.num_microbatches
    ranks = steps.ranks
    if not run.shape.experts:  # what replicas do takes longest where there is most
        ranks = ranks.fullest(memo.held(run.shape, grid)[0])
    ends = DataParallel.of(steps.run, steps.software, rates, steps.groups, ranks, pace)
    waits, messages, data = _bubble(steps), _messages(steps), ends.data_s()
    optimizer, host = ends.update_s()
    other = rates.step_s + rates.flush * pace.total * (grid.pp > 1)
    total = m * pace.total + waits + messages + data + optimizer + host + other
    nodes = np.maximum(1.0, grid.world / rates.domain)
    slower = rates.jitter * np.log2(nodes) * total
    total = total + slower
    available = peak_flops(run) * grid.world * total
    mfu = run.shape.flops_per_token() * grid.global_batch * run.shape.sequence / available
    hfu = mfu * (1.0 + steps.whole.flops_again / (3 * steps.whole.flops))
    step = StepTime(
        total=total, compute=m * (pace.forward + pace.input_grad + pace.weight_grad), again=m * pace.again,
        tensor=m * pace.tensor, context=m * pace.context, expert=m * pace.expert, data=data + m * pace.shard,
        messages=messages, bubble=waits, optimizer=optimizer, host=host + m * pace.host, other=other + slower,
        slower=slower, mfu=mfu, hfu=hfu, low=total * rates.low, high=total * rates.high,
    )  # fmt: skip
    spare_s = m * steps.spare_s * (1 + rates.jitter * np.log2(nodes))
    return (only(step), float(spare_s[0])) if run.grid.is_single else (step, spare_s)


def pipeline_s(run: Run, constants: Constants, memo: Memo) -> Numbers:
    """Seconds of a step but for what replicas do at its ends and what is beside, and less what a layout might spare.

    Numbers of the run are arrays.
    """
    steps = _steps(run, constants, memo)
    return steps.grid.num_microbatches * (steps.pace.total - steps.spare_s) + _bubble(steps) + _messages(steps)


def microbatch_time(run: Run, constants: Constants, memo: Memo) -> PieceTime:
    """The time of one microbatch through all layers, the embedding and the head. Numbers of the run are arrays."""
    return PieceTime(*_of_microbatch(run, _piece_times(run, _rates(run, constants, memo), constants, memo)))


def _rates(run: Run, constants: Constants, memo: Memo) -> Rates:
    rates = memo.once(("rates", run.grid.precision, run.setting), lambda: rates_of(run, constants))
    return replace(rates, busy=run.grid.world)


def _steps(run: Run, constants: Constants, memo: Memo) -> _Steps:
    """The costs of a microbatch: layers once for each that differs, ranks by the layers that they hold. Numbers are
    arrays."""
    shape, grid = run.shape, run.grid
    ranks, rates = memo.ranks(shape, grid), _rates(run, constants, memo)
    times = _piece_times(run, rates, constants, memo)
    # Of a bidirectional pipeline's two copies a microbatch meets one.
    ends = ranks.embedding, ranks.head, *([ranks.head * shape.mtp] if shape.mtp else ())
    counts = [count / grid.num_copies for count in (*ranks.layers, *ends)]
    by_rank = sum(count * PieceTime(*fields).total for count, fields in zip(counts, times, strict=True))
    slowest = np.argmax(by_rank, axis=0), np.arange(len(grid.pp))
    pace: Numbers = sum(count[slowest] * fields for count, fields in zip(counts, times, strict=True))
    whole = PieceTime(*_of_microbatch(run, times))
    spare_s = np.max(by_rank, axis=0) - _least_pace_s(run, times, whole.total)
    return _Steps(
        run, software_under(run), rates, ranks, groups=Groups(run), pace=PieceTime(*pace), whole=whole,
        spare_s=np.where(grid.pp > 1, np.maximum(0.0, spare_s), 0.0),
    )  # fmt: skip


def _least_pace_s(run: Run, times: list[Array], whole_s: Numbers) -> Array:
    """A lower bound on the slowest rank's time for a microbatch, over all layouts of the layers."""
    grid, num_kinds = run.grid, len(layers_by_kind(run.shape, run.grid))
    *layers_s, embedding_s, head_s = (PieceTime(*piece).total for piece in times[: num_kinds + 2])
    pieces = MicrobatchPieces(
        np.min(np.broadcast_arrays(*layers_s), axis=0), embedding_s, head_s, whole_s, run.shape.layers
    )  # fmt: skip

    is_apart = np.asarray(grid.of_schedules(lambda facts: facts.has_ends_apart))
    return least_pace_s(grid.pp, grid.num_copies, pieces, is_apart & (not grid.is_vee))


def _of_microbatch(run: Run, times: list[Array]) -> Numbers:
    """The times of all layers, the embedding, the head and what predicts further tokens together."""
    mtp = run.shape.mtp
    counts = *layers_by_kind(run.shape, run.grid).values(), 1, 1, *([mtp] if mtp else ())
    total: Numbers = sum(count * piece_s for count, piece_s in zip(counts, times, strict=True))
    return total


_ENDS = ("embedding", "none"), ("head", "none")


def _piece_times(run: Run, rates: Rates, constants: Constants, memo: Memo) -> list[Array]:
    """The fields of each piece's PieceTime, in shape (fields, plans): kinds of layers, the embedding, the head."""
    grid = run.grid
    pieces = *layers_by_kind(run.shape, grid), *_ENDS, *([("mtp", "none")] if run.shape.mtp else ())
    # Of the schedule it matters whether another microbatch computes meanwhile.
    is_paired = run.shape.experts is not None and grid.is_paired
    words = is_paired, *layer_words(grid)
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

    rows = memo.rows("piece", run, (pieces, *words), layer_columns, whole).reshape(len(pieces), -1, len(grid.tp))
    times = list(rows)
    if software_under(run).sum_overlap:
        put_off = are_put_off(grid)
        times = [np.stack(PieceTime(*fields).where_split(put_off).values()) for fields in times]
    if not np.any(grid.zero == 3):
        return times
    shards = memo.rows("shard", run, shard_words(grid), shard_columns, sharded).reshape(len(kinds), 2, -1)
    software, often = software_under(run), gathers_for_a_pass(grid)
    return [
        np.stack(PieceTime(*fields).gathered(rates, software, shards[kinds.index(kind)], often).values())
        for (kind, _), fields in zip(pieces, times, strict=True)
    ]


def _rows(run: Run, values: list[tuple[Numbers, ...]]) -> Array:
    """All of some values, one below the other: (values, plans)."""
    return stacked_rows([value for row in values for value in row], len(run.grid.tp))


def _bubble(steps: _Steps) -> Numbers:
    """How long the pace-setting rank waits for others at the ends of a step."""
    whole, pace = ((one.forward + one.exposed_forward, one.weight_grad, one.total) for one in (steps.whole, steps.pace))
    numbers = steps.grid.pp, steps.grid.num_microbatches, steps.grid.virtual

    def waits(name: str, at: Any) -> Numbers:
        p, m, v = (number[at] for number in numbers)
        forward, weight, total = (seconds[at] for seconds in whole)
        count, step = p, m * total / p
        if SCHEDULES[name].fills_and_drains:
            forward, weight, total = (of_all[at] - mine[at] for of_all, mine in zip(whole, pace, strict=True))
            count = np.maximum(1, p - 1)
        forward, weight = forward / count, weight / count
        back = total / count - forward - weight
        if SCHEDULES[name].idle_s is not None:
            return np.where(p > 1, bubble(name, p, m, v, f=forward, i=back, w=weight), 0.0)
        played = np.vectorize(_played, otypes=[float])
        times = (np.round(seconds, 9) for seconds in (forward, back, weight))
        return np.where(p > 1, played(name, p, m, v, *times) - step, 0.0)

    return steps.grid.by_schedule(waits)


@lru_cache(maxsize=1024)
def _played(name: str, p: int, m: int, v: int, forward: float, back: float, weight: float) -> float:
    """Makespan of a schedule with equal stages: of a few microbatches, and more at the pace of a rank."""
    few = min(m, 4 * p)
    program = shape_program(name, PipelineShape(p, few, v))
    share = p / program.num_stages
    costs = Costs.uniform(program.num_stages, forward * share, back * share, weight * share)
    return play(program, costs).makespan + (m - few) * (forward + back + weight)


def border_bytes(run: Run, software: SoftwareSpec) -> Numbers:
    """The bytes that one rank sends a neighbour in the pipeline for a microbatch."""
    grid = run.grid
    size = grid.element_bytes * run.shape.sequence / grid.cp * grid.microbatch * run.shape.hidden
    return size / np.where(grid.sequence_parallel | software.message_split, grid.tp, 1)


def message_and_turn_s(run: Run, rates: Rates) -> tuple[Numbers, Numbers]:
    """(one message between neighbours in the pipeline, what messages add to a step for each stage that a rank has,
    where it has several)."""
    software = software_under(run)
    one = message_s(rates, Groups(run).pp, border_bytes(run, software))
    return one, 2 * one * run.grid.num_microbatches * (rates.leak if software.message_overlap else 1.0)


def _messages(steps: _Steps) -> Numbers:
    """The exposed time of the pipeline's messages, by how the schedule waits for them.

    A latency c that only the receiver waits for costs 1F1B 2c ((p - 1) m / p + p - 2), for it leaves no slack unless it
    has forwards to spare; an interleaved rank exchanges before each of its 2 v m chunks unless messages pass while it
    computes.
    """
    grid, rates = steps.grid, steps.rates
    p, m = grid.pp, grid.num_microbatches
    one, turn = message_and_turn_s(steps.run, rates)
    ends, turns = 2 * one * (p - 1), grid.virtual * turn
    exposed = np.where(grid.extra_warmup > 0, ends, 2 * one * ((p - 1) * m / p + np.maximum(0, p - 2)))

    def seconds(name: str, at: Any) -> Numbers:
        return (exposed[at], ends[at] + turns[at], 2 * ends[at])[SCHEDULES[name].message_waits]

    return np.where(p > 1, grid.by_schedule(seconds), 0.0)
