"""Step time of any plan: stage costs into the pipeline, with the exposed communication, and its parts.

Bubbles are closed forms (cost/pipeline_bubble.py); only schedules that have none are simulated (schedule/timing.py).
Stages are not equal: the slowest rank sets the pace, and a step passes the others once. All of it is elementwise, for
one plan or for arrays of plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from shardwright.config.layer_kind import has_experts
from shardwright.config.phrase import say
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.software import SoftwareSpec
from shardwright.cost.calibration import Constants, Rates, peak_flops, rates_of, software_under
from shardwright.cost.collective_time import message_s
from shardwright.cost.data_parallel import DataParallel
from shardwright.cost.group_links import Groups
from shardwright.cost.piece_time import PieceTime, Repeatable
from shardwright.cost.pipeline_bubble import bubble
from shardwright.cost.prediction_range import range_ends, share_of_experts
from shardwright.cost.stage_time import Costing, with_shards
from shardwright.layers.arrays import Array, Numbers, only, stacked_rows
from shardwright.layers.memo import Memo, layer_columns, layer_words, plain_columns, shard_columns, shard_words
from shardwright.layers.query import PlanGrid, Run
from shardwright.layers.stage_contents import LayerKind, PipelineRanks, layers_by_kind
from shardwright.schedule.pipeline_shape import PipelineShape
from shardwright.schedule.shape_program import shape_program
from shardwright.schedule.timing import Costs, play
from shardwright.simulate.least_pace import MicrobatchPieces, least_pace_s


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, and its parts on the rank that sets the pace. The parts add up to `total`; `slower` is the
    part of `other` by which a large number of nodes makes everything slower.

    `tensor`, `context`, `expert`, `data` and `messages` are exposed communication; `host` is exposed copies to host
    memory and back, and exposed updates there. `mfu` counts model FLOPs over the full sequence and `hfu` executed
    FLOPs, over the peak of the products' number type. Four of five measured steps, of families of runs to which no
    constant was fitted, were between `low` and `high`.
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

    @property
    def host_share(self) -> Numbers:
        """The share of the step in which its host works alone: copies and updates there, and what a step has beside."""
        return (self.host + self.other - self.slower) / self.total


@dataclass(frozen=True)
class _Steps:
    """Plans in arrays, and the cost of a microbatch on the rank that sets the pace and on all ranks together."""

    run: Run
    software: SoftwareSpec
    rates: Rates
    ranks: PipelineRanks
    groups: Groups
    pace: PieceTime
    all_ranks: PieceTime
    spare_s: Numbers  # of a microbatch: no layout of the layers makes the slowest rank faster by more

    @property
    def grid(self) -> PlanGrid:
        """The plans."""
        return self.run.grid


def step_time(run: Run, constants: Constants, memo: Memo | None = None) -> StepTime:
    """Predict a step; arrays if the plan's numbers are arrays. `memo` has earlier results with the same constants.

    KeyError names an unknown input, ValueError a contradiction.
    """
    return step_time_and_spare(run, constants, memo)[0]


def step_time_and_spare(run: Run, constants: Constants, memo: Memo | None = None) -> tuple[StepTime, Numbers]:
    """(the result of `step_time`, seconds by which no layout of the layers over the stages makes the step shorter)."""
    for name, _ in run.grid.schedules:
        if name not in SCHEDULES:
            raise ValueError(
                say("schedule {name} is not known; there are {schedules}", name=repr(name), schedules=tuple(SCHEDULES))
            )
    memo = memo or Memo()
    steps = _steps(replace(run, grid=run.grid.as_arrays()), constants, memo)
    grid, rates, pace, m = steps.grid, steps.rates, steps.pace, steps.grid.num_microbatches
    ranks = _ranks_of_ends(steps.run, memo)
    ends = DataParallel.of(steps.run, steps.software, rates, steps.groups, ranks, pace)
    waits, messages, data = _bubble(steps), _messages(steps), ends.data_s()
    optimizer, host = ends.update_s()
    host = host + ends.accumulated_s()
    total = m * pace.total + waits + messages + data + optimizer + host + rates.step_s
    nodes = np.maximum(1.0, grid.world / rates.domain)
    slower = rates.jitter * np.log2(nodes) * total
    total = total + slower
    available = peak_flops(run) * grid.world * total
    mfu = run.shape.flops_per_token() * grid.global_batch * run.shape.sequence / available
    hfu = mfu * (1.0 + steps.all_ranks.flops_again / (run.shape.num_passes * steps.all_ranks.flops))
    computed, again, sent = m * (pace.forward + pace.input_grad + pace.weight_grad), m * pace.again, m * pace.expert
    expert_share = share_of_experts(run, sent_s=sent, computed_s=computed + again, total_s=total)
    step = StepTime(
        total=total, compute=computed, again=again,
        tensor=m * pace.tensor, context=m * pace.context, expert=sent, data=data + m * pace.shard,
        messages=messages, bubble=waits, optimizer=optimizer, host=host + m * pace.host, other=rates.step_s + slower,
        slower=slower, mfu=mfu, hfu=hfu, low=total, high=total,
    )  # fmt: skip
    low, high = range_ends(run, constants, expert_share=expert_share, host_share=step.host_share)
    step = replace(step, low=total * low, high=total * high)
    spare_s = m * steps.spare_s * (1 + rates.jitter * np.log2(nodes))
    return (only(step), float(spare_s[0])) if run.grid.is_single else (step, spare_s)


def pipeline_s(run: Run, constants: Constants, memo: Memo) -> Numbers:
    """Seconds of a step without the replicas' collectives at its ends and its constant parts, and without the time that
    a better layout might spare.

    Numbers of the run are arrays.
    """
    steps = _steps(run, constants, memo)
    return steps.grid.num_microbatches * (steps.pace.total - steps.spare_s) + _bubble(steps) + _messages(steps)


def update_s(run: Run, constants: Constants, memo: Memo) -> Numbers:
    """Seconds of the update in a step, with those that it waits for the host. Numbers of the run are arrays."""
    rates, ranks = _rates(run, constants, memo), _ranks_of_ends(run, memo)
    ends = DataParallel.of(run, software_under(run), rates, Groups(run), ranks, PieceTime())
    optimizer, host = ends.update_s()
    return optimizer + host


def _ranks_of_ends(run: Run, memo: Memo) -> PipelineRanks:
    """The pipeline ranks of which one takes longest at the ends of a step."""
    ranks = memo.ranks(run.shape, run.grid)
    if run.shape.experts:
        return ranks
    return ranks.fullest(memo.held(run.shape, run.grid)[0])  # it has the most to exchange and to update


def microbatch_time(run: Run, constants: Constants, memo: Memo) -> PieceTime:
    """The time of one microbatch through all layers, the embedding and the head. Numbers of the run are arrays."""
    return PieceTime(*_of_microbatch(run, _piece_times(run, _rates(run, constants, memo), constants, memo)))


def least_before_experts_s(run: Run, constants: Constants, memo: Memo) -> Numbers:
    """The least seconds of one microbatch through all layers, the embedding and the head: without experts and the
    operators behind them, nothing computed again, and a host that is never late. Numbers of the run are arrays.

    Many plans differ in their experts' groups alone, of which this does not depend.
    """
    pieces = _pieces(run)

    def least_s(run: Run) -> Array:
        costing = Costing.of(run, constants)
        times = [costing.before_experts(kind).once.without_dispatch for kind, _ in pieces]
        return stacked_rows([_of_microbatch(run, times)], len(run.grid.tp))

    return memo.rows("experts bounded", run, (pieces, *layer_words(run.grid)), plain_columns, least_s)[0]


def piece_times(run: Run, constants: Constants, memo: Memo) -> dict[LayerKind, PieceTime]:
    """The time of one microbatch by (piece, policy of recomputation): each kind of layer, the embedding, the head and a
    module that predicts further tokens. The run has one plan, and the times are arrays of one entry.

    They are computed once for all layouts of a plan's layers over its stages.
    """
    run = replace(run, grid=run.grid.having({"layout": ()}))

    def times_of_pieces() -> dict[LayerKind, PieceTime]:
        arrays = replace(run, grid=run.grid.as_arrays())
        times = _piece_times(arrays, _rates(arrays, constants, memo), constants, memo)
        return {piece: PieceTime(*fields) for piece, fields in zip(_pieces(arrays), times, strict=True)}

    return memo.once(("pieces", run.setting, run.grid), times_of_pieces)


def _rates(run: Run, constants: Constants, memo: Memo) -> Rates:
    rates = memo.once(("rates", run.grid.precision, run.grid.compute, run.setting), lambda: rates_of(run, constants))
    return replace(rates, busy=run.grid.world)


def _steps(run: Run, constants: Constants, memo: Memo) -> _Steps:
    """The costs of a microbatch: each distinct layer is priced once, and ranks by their layers. Numbers are arrays."""
    shape, grid = run.shape, run.grid
    ranks, rates = memo.ranks(shape, grid), _rates(run, constants, memo)
    times = _piece_times(run, rates, constants, memo)
    # A microbatch meets one of a bidirectional pipeline's two copies.
    ends = ranks.embedding, ranks.head, *([ranks.head * shape.mtp] if shape.mtp else ())
    counts = [count / grid.num_copies for count in (*ranks.layers, *ends)]
    totals = PieceTime(*times.swapaxes(0, 1)).total
    rank_totals = sum(count * total for count, total in zip(counts, totals, strict=True))
    slowest = np.argmax(rank_totals, axis=0), np.arange(len(grid.pp))
    pace: Numbers = sum(count[slowest] * fields for count, fields in zip(counts, times, strict=True))
    all_ranks = PieceTime(*_of_microbatch(run, times))
    spare_s = np.max(rank_totals, axis=0) - _least_pace_s(run, totals, all_ranks.total)
    return _Steps(
        run,
        software_under(run),
        rates,
        ranks,
        groups=Groups(run),
        pace=PieceTime(*pace),
        all_ranks=all_ranks,
        spare_s=np.where(grid.pp > 1, np.maximum(0.0, spare_s), 0.0),
    )


def _least_pace_s(run: Run, pieces_s: Array, whole_s: Numbers) -> Array:
    """A lower bound on the slowest rank's time for a microbatch, over all layouts of the layers. `pieces_s` are the
    seconds of each piece, (pieces, plans)."""
    grid, num_kinds = run.grid, len(layers_by_kind(run.shape, run.grid))
    embedding_s, head_s = pieces_s[num_kinds : num_kinds + 2]
    pieces = MicrobatchPieces(np.min(pieces_s[:num_kinds], axis=0), embedding_s, head_s, whole_s, run.shape.layers)
    is_apart = np.asarray(grid.of_schedules(lambda facts: facts.has_ends_apart))
    return least_pace_s(grid.pp, grid.num_copies, pieces, is_apart & (not grid.is_vee))


def _of_microbatch(run: Run, times: Array | Sequence[Numbers]) -> Numbers:
    """The sum of the times of all layers, the embedding, the head and the modules that predict further tokens."""
    mtp = run.shape.mtp
    counts = *layers_by_kind(run.shape, run.grid).values(), 1, 1, *([mtp] if mtp else ())
    total: Numbers = sum(count * piece_s for count, piece_s in zip(counts, times, strict=True))
    return total


_ENDS = ("embedding", "none"), ("head", "none")


def _pieces(run: Run) -> tuple[LayerKind, ...]:
    """The kinds of layers, the embedding, the head, and a module that predicts further tokens if there are any."""
    return *layers_by_kind(run.shape, run.grid), *_ENDS, *([("mtp", "none")] if run.shape.mtp else ())


def _piece_times(run: Run, rates: Rates, constants: Constants, memo: Memo) -> Array:
    """The fields of each piece's PieceTime, in shape (pieces, fields, plans), in the order of `_pieces`."""
    grid, pieces = run.grid, _pieces(run)
    # It matters only if the schedule computes another microbatch meanwhile.
    is_paired = run.shape.experts is not None and grid.is_paired
    words = is_paired, *layer_words(grid)
    kinds = tuple(dict.fromkeys(kind for kind, _ in pieces))

    def pieces_s(run: Run) -> Array:
        costing, costs_of_kinds, start = Costing.of(run, constants), {}, 0
        values = memo.rows("before experts", run, words, plain_columns, before_experts)
        for kind in kinds:
            end = start + Repeatable.num_values(len(costing.chain_before_experts(kind)))
            costs_of_kinds[kind], start = Repeatable.of_values(values[start:end]), end
        for kind in filter(has_experts, kinds):
            costs_of_kinds[kind] += Repeatable.of_values(memo.rows("experts", run, words, layer_columns, experts))
        times = [costing.repeating(kind, policy, costs_of_kinds[kind]).values() for kind, policy in pieces]
        return _rows(run, times)

    def before_experts(run: Run) -> Array:
        costing = Costing.of(run, constants)
        return _rows(run, [costing.before_experts(kind).values() for kind in kinds])

    def experts(run: Run) -> Array:
        return _rows(run, [Costing.of(run, constants).experts().values()])

    def sharded(run: Run) -> Array:
        costing = Costing.of(run, constants)
        return _rows(run, [costing.shard_s(kind) for kind in kinds])

    rows = memo.rows("piece", run, (pieces, *words), layer_columns, pieces_s).reshape(len(pieces), -1, len(grid.tp))

    def shard_s() -> Array:
        rows = memo.rows("shard", run, shard_words(grid), shard_columns, sharded)
        return rows.reshape(len(kinds), -1, rows.shape[-1])[[kinds.index(kind) for kind, _ in pieces]].swapaxes(0, 1)

    def hooks_s() -> tuple[Array, Array]:
        costing = Costing.of(run, constants)
        ahead_s, behind_s = np.stack([_rows(run, [costing.hooks_s(*piece)]) for piece in pieces], axis=1)
        return ahead_s, behind_s

    times = with_shards(run, rates, PieceTime(*rows.swapaxes(0, 1)), shard_s, hooks_s=hooks_s)  # of all pieces at once
    return np.stack(times.waiting_for_host().values(), axis=1)


def _rows(run: Run, values: list[tuple[Numbers, ...]]) -> Array:
    """All values, one below the other: (values, plans)."""
    return stacked_rows([value for row in values for value in row], len(run.grid.tp))


def _bubble(steps: _Steps) -> Numbers:
    """Seconds that the pace-setting rank waits for others at the ends of a step."""
    all_seconds, pace_seconds = (
        (time.forward + time.exposed_forward, time.weight_grad, time.total) for time in (steps.all_ranks, steps.pace)
    )
    numbers = steps.grid.pp, steps.grid.num_microbatches, steps.grid.virtual

    def waits(name: str, index: Any) -> Numbers:
        p, m, v = (number[index] for number in numbers)
        forward, weight, total = (seconds[index] for seconds in all_seconds)
        count, step = p, m * total / p
        if SCHEDULES[name].fills_and_drains:
            forward, weight, total = (
                all_rank_s[index] - pace_s[index] for all_rank_s, pace_s in zip(all_seconds, pace_seconds, strict=True)
            )
            count = np.maximum(1, p - 1)
        forward, weight = forward / count, weight / count
        input_grad = total / count - forward - weight
        if SCHEDULES[name].idle_s is not None:
            return np.where(p > 1, bubble(name, p, m, v, f=forward, i=input_grad, w=weight), 0.0)
        times = (np.round(seconds, 9).tolist() for seconds in (forward, input_grad, weight))
        shapes, passes_s = zip(p.tolist(), m.tolist(), v.tolist(), strict=True), zip(*times, strict=True)
        played = [_played(name, shape, pass_s) for shape, pass_s in zip(shapes, passes_s, strict=True)]
        return np.where(p > 1, played - step, 0.0)

    return steps.grid.by_schedule(waits)


@lru_cache(maxsize=1024)
def _played(name: str, shape: tuple[int, int, int], pass_s: tuple[float, float, float]) -> float:
    """Makespan of a schedule with equal stages: of a few microbatches, and more at the pace of a rank. `shape`: ranks,
    microbatches and stages a rank; `pass_s`: seconds of the forward, the input gradient and the weight gradient of a
    microbatch on a rank."""
    (p, m, v), (forward, input_grad, weight) = shape, pass_s
    few = min(m, 4 * p)
    program = shape_program(name, PipelineShape(p, few, v))
    share = p / program.num_stages
    costs = Costs.uniform(program.num_stages, forward * share, input_grad * share, weight * share)
    return play(program, costs).makespan + (m - few) * (forward + input_grad + weight)


def border_bytes(run: Run, software: SoftwareSpec) -> Numbers:
    """The bytes that one rank sends to a neighbour in the pipeline for a microbatch."""
    grid = run.grid
    size = grid.element_bytes * run.shape.sequence / grid.cp * grid.microbatch * run.shape.hidden
    return size / np.where(grid.sequence_parallel | software.message_split, grid.tp, 1)


def message_and_turn_s(run: Run, rates: Rates) -> tuple[Numbers, Numbers]:
    """(seconds of one message between neighbours in the pipeline, seconds that messages add to a step for each stage of
    a rank, if it has several)."""
    software = software_under(run)
    message = message_s(rates, Groups(run).pp, border_bytes(run, software))
    return message, 2 * message * run.grid.num_microbatches * (rates.leak if software.message_overlap else 1.0)


def _messages(steps: _Steps) -> Numbers:
    """The exposed time of the pipeline's messages: those that the schedule waits for, one after the other.

    A rank with several stages exchanges before each of its 2 v m chunks, too, unless messages travel while it computes.
    """
    grid = steps.grid
    message, turn = message_and_turn_s(steps.run, steps.rates)
    p, m, v, extra_warmup = grid.pp, grid.num_microbatches, grid.virtual, grid.extra_warmup
    num_waits = grid.by_schedule(lambda name, at: SCHEDULES[name].num_waits(p[at], m[at], v[at], extra_warmup[at]))
    return np.where(p > 1, num_waits * message + np.where(v > 1, v * turn, 0.0), 0.0)
