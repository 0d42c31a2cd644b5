"""The generators by name: what each makes, the bubble that its paper gives it, and which shapes it admits."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from shardwright.config import largest
from shardwright.config.base import PlanError
from shardwright.config.plan import STAGES_PER_RANK, Recompute
from shardwright.schedule.action import Kind
from shardwright.schedule.generators.dualpipe import dualpipe, dualpipe_faults
from shardwright.schedule.generators.dualpipev import dualpipev, dualpipev_faults
from shardwright.schedule.generators.gpipe import gpipe
from shardwright.schedule.generators.interleaved import interleaved, interleaved_faults
from shardwright.schedule.generators.looped_bfs import looped_bfs
from shardwright.schedule.generators.one_f_one_b import one_f_one_b
from shardwright.schedule.generators.pipedream import pipedream
from shardwright.schedule.generators.pipedream_2bw import pipedream_2bw, pipedream_2bw_faults
from shardwright.schedule.generators.sequential import sequential
from shardwright.schedule.generators.v_half import v_half
from shardwright.schedule.generators.v_min import v_min
from shardwright.schedule.generators.zb_h1 import zb_h1
from shardwright.schedule.generators.zb_h2 import zb_h2
from shardwright.schedule.generators.zb_v import zb_v
from shardwright.schedule.lowering.lower import lower, with_step
from shardwright.schedule.lowering.stage_recompute import add_recompute
from shardwright.schedule.lowering.zero3_gathers import add_gathers
from shardwright.schedule.schedule import AnySchedule, Program, Schedule
from shardwright.schedule.timing import Costs
from shardwright.sharding.stage_placement import StagePlacement


@dataclass(frozen=True)
class PipelineShape:
    """What a schedule is made for. What follows the virtual stages is each understood by some schedules only."""

    num_ranks: int
    num_microbatches: int  # of one optimizer step
    virtual_stages: int = 1
    extra_warmup: int = 0  # 1f1b: more forwards before the first backward
    group: int = 0  # interleaved-1f1b: microbatches that take turns on a chunk; 0 is p
    num_steps: int = 1  # asynchronous schedules: optimizer steps in one stream, with no flush between
    most_alive: float = 0.0  # auto: microbatches whose activations a rank may keep; 0 is any number
    costs: Costs | None = None  # auto: what it is made for, by stage; none is F = I = W
    placement: StagePlacement | None = None  # auto: where the stages lie already; none is where that is best


@dataclass(frozen=True)
class Entry:
    """A schedule by name.

    `bubble` is how long a rank idles in one step, with equal stages and free communication, and `when` where the
    formula holds; `repeated` is the same for a step that others precede and follow with no barrier between, where it
    is less. p ranks, m microbatches, v stages a rank; F, I, W and B = I + W are times of all layers of a rank, FB of
    an overlapped pair. Empty: there is no formula; simulate it.
    """

    make: Callable[[PipelineShape], Schedule]
    bubble: str = ""
    when: str = ""
    repeated: str = ""
    faults: Callable[[PipelineShape], list[str]] = lambda shape: []
    understands: tuple[str, ...] = ()


Made = TypeVar("Made")


def _of_size(make: Callable[[int, int], Made]) -> Callable[[PipelineShape], Made]:
    """What is made of the numbers of ranks and microbatches of a shape alone."""
    return lambda shape: make(shape.num_ranks, shape.num_microbatches)


GENERATORS: dict[str, Entry] = {
    "sequential": Entry(_of_size(sequential), bubble="m * (p - 1) * (F + B)"),
    "gpipe": Entry(_of_size(gpipe), bubble="(p - 1) * (F + B)"),
    "1f1b": Entry(
        lambda shape: one_f_one_b(shape.num_ranks, shape.num_microbatches, shape.extra_warmup),
        bubble="(p - 1) * (F + B)",
        understands=("extra_warmup",),
    ),
    "interleaved-1f1b": Entry(
        lambda shape: interleaved(shape.num_ranks, shape.num_microbatches, shape.virtual_stages, shape.group),
        bubble="(p - 1) * (F + B) / v",
        when="m >= p",
        faults=lambda shape: interleaved_faults(shape.num_ranks, shape.group),
        understands=("group",),
    ),
    "looped-bfs": Entry(
        lambda shape: looped_bfs(shape.num_ranks, shape.num_microbatches, shape.virtual_stages),
        bubble="(p - 1) * (F + B) / v",
        when="m >= p",
    ),
    "zb-h1": Entry(_of_size(zb_h1), bubble="(p - 1) * (F + I - W)", when="m >= p and W <= I"),
    "zb-h2": Entry(
        _of_size(zb_h2),
        bubble="(p - 1) * F",
        when="m >= 2 * p - 1 and I <= 2 * W <= F + I",
        repeated="(p - 1) * (F + I - 2 * W)",
    ),
    "zb-v": Entry(_of_size(zb_v), bubble="(p - 1) * F / 2", when="m >= 2 * p - 1 and F == I == W", repeated="0"),
    "v-half": Entry(_of_size(v_half)),
    "v-min": Entry(_of_size(v_min)),
    # Where a pair takes less than its parts, these are the bubbles of the ranks at the turn: they run most pairs.
    "dualpipe": Entry(
        _of_size(dualpipe),
        bubble="(p / 2 - 1) * (FB + B - 3 * W)",
        when="F == I and W <= I",
        faults=_of_size(dualpipe_faults),
    ),
    "dualpipev": Entry(
        _of_size(dualpipev),
        bubble="(p - 1) * (FB + B - 3 * W) / 2",
        when="F == I and W <= I",
        faults=_of_size(dualpipev_faults),
    ),
    "pipedream": Entry(
        lambda shape: pipedream(shape.num_ranks, shape.num_microbatches * shape.num_steps),
        bubble="(p - 1) * (F + B)",
        repeated="0",
        understands=("num_steps",),
    ),
    "pipedream-2bw": Entry(
        lambda shape: pipedream_2bw(shape.num_ranks, shape.num_microbatches, shape.num_steps),
        bubble="(p - 1) * (F + B)",
        repeated="0",
        faults=_of_size(pipedream_2bw_faults),
        understands=("num_steps",),
    ),
}


def _auto(shape: PipelineShape) -> Schedule:
    from shardwright.schedule.solver.auto import auto  # the solver is as large as all other schedules together

    limit = shape.most_alive or None
    return auto(
        shape.num_ranks, shape.num_microbatches, shape.costs, limit, stages_per_rank=shape.virtual_stages,
        placement=shape.placement,
    )  # fmt: skip


def _auto_faults(shape: PipelineShape) -> list[str]:
    if shape.virtual_stages > 2:
        return [f"schedule 'auto' runs one or two stages on each rank, and v is {shape.virtual_stages}; use 1 or 2"]
    p, m, num_stages = shape.num_ranks, shape.num_microbatches, shape.num_ranks * shape.virtual_stages
    if num_stages * m > largest.SEARCHED:
        return [
            f"schedule 'auto' searches for an order, and p {p:,} x v {shape.virtual_stages} stages x m {m:,} = "
            f"{num_stages * m:,} forwards are more than {largest.SEARCHED:,}; use at most "
            f"{max(1, largest.SEARCHED // num_stages):,} microbatches, or a schedule by rule, such as 'zb-v' or '1f1b'"
        ]
    from shardwright.schedule.solver.auto_model import Model

    limit = shape.most_alive or None
    try:
        Model.of(shape.num_ranks, shape.num_microbatches, shape.costs, limit, (), shape.virtual_stages)
    except ValueError as error:
        return [str(error)]
    return []


GENERATORS["auto"] = Entry(_auto, faults=_auto_faults, understands=("most_alive", "costs", "placement"))


def shape_faults(name: str, shape: PipelineShape) -> list[str]:
    """Why a schedule does not admit a shape, each fault with its arithmetic and a way out. Empty if it does."""
    entry = GENERATORS[name]
    faults = [
        f"schedule {name!r} has no {field}, and it is {getattr(shape, field)}; leave it out, or use "
        + " or ".join(other for other, its in GENERATORS.items() if field in its.understands)
        for field in ("extra_warmup", "group", "num_steps", "most_alive")
        if getattr(shape, field) != getattr(PipelineShape, field) and field not in entry.understands
    ]
    faults = _stage_faults(name, shape.virtual_stages) + faults
    return size_faults(name, shape) or faults + entry.faults(shape)  # what is too large may take these for ever


def size_faults(name: str, shape: PipelineShape, num_drawn: int = 1) -> list[str]:
    """What of a shape is too large to be laid out and played, `num_drawn` times; with its arithmetic and a way out."""
    p, m, steps = shape.num_ranks, shape.num_microbatches, max(shape.num_steps, num_drawn)
    each = STAGES_PER_RANK.get(name, 1) or shape.virtual_stages
    faults = []
    if p > largest.PIPELINE_RANKS:
        faults.append(f"a pipeline of p {p:,} ranks is too long; use at most {largest.PIPELINE_RANKS:,}")
    if shape.virtual_stages > largest.LAYERS:
        faults.append(
            f"{shape.virtual_stages:,} pieces of the model on each rank are more than a model has layers; use at most "
            f"{largest.LAYERS:,}"
        )
    if p * each * m * steps > largest.COMPUTATIONS:
        most = largest.COMPUTATIONS // (p * each * steps)
        stages = f"p {p:,} ranks x {each:,} stages on each" if each > 1 else f"p {p:,} stages"
        times = f" x {steps:,} steps" if steps > 1 else ""
        faults.append(
            f"{stages} x m {m:,} microbatches{times} = {p * each * m * steps:,} forwards, and at most "
            f"{largest.COMPUTATIONS:,} can be laid out; use "
            + (f"at most {most:,} microbatches" if most else "fewer stages" + " or steps" * (steps > 1))
        )
    return faults


def _stage_faults(name: str, virtual_stages: int) -> list[str]:
    stages = STAGES_PER_RANK.get(name, 1)
    if name == "auto":
        return []  # it says itself what it admits
    if stages == 0:
        if virtual_stages > 1:
            return []
        plain = "gpipe" if name == "looped-bfs" else "1f1b"
        return [
            f"schedule {name!r} runs several stages on each rank, and plan.virtual_stages is {virtual_stages}; "
            f"use 2 or more, or schedule {plain!r}"
        ]
    if virtual_stages in (1, stages):
        return []
    count = "two stages" if stages == 2 else "one stage" + (" of each direction" if name == "dualpipe" else "")
    return [f"schedule {name!r} runs {count} on each rank, and plan.virtual_stages is {virtual_stages}; use {stages}"]


def shape_program(name: str, shape: PipelineShape, recompute: Recompute = "none", gathers: bool = False) -> Program:
    """One optimizer step under a named schedule, all communication written out.

    With `recompute` stages keep their inputs alone (stage_recompute.py); with `gathers` their parameters are sharded
    (zero3_gathers.py). PlanError says why a shape is not admitted.
    """
    return _extended(lower(_made(name, shape)), recompute, gathers)


def shape_order(name: str, shape: PipelineShape, recompute: Recompute = "none", gathers: bool = False) -> Schedule:
    """The order of work of a shape without messages: what the times of a step depend on, and far sooner made."""
    return _extended(with_step(_made(name, shape)), recompute, gathers)


@lru_cache(maxsize=1024)
def shape_placement(name: str, shape: PipelineShape) -> StagePlacement:
    """Which rank holds which stage; of what is made to measure it is known when it is made."""
    return _made(name, shape).placement


@lru_cache(maxsize=8)
def _made(name: str, shape: PipelineShape) -> Schedule:
    faults = shape_faults(name, shape)
    if faults:
        raise PlanError(f"schedule {name}", faults)
    return GENERATORS[name].make(shape)


def _extended(schedule: AnySchedule, recompute: Recompute, gathers: bool) -> AnySchedule:
    if recompute == "stage":
        schedule = add_recompute(schedule)
    return add_gathers(schedule) if gathers else schedule


def forward_of(program: Program) -> Program:
    """The forward passes alone, as in evaluation and generation, on the stages of a program and in its order. Where the
    program gathers parameters, so do they."""
    rows = tuple(
        tuple(part for action in row for part in action.computes() if part.kind is Kind.FORWARD)
        for row in program.ranks
    )
    lowered = lower(Schedule("forward", program.num_microbatches, program.placement, rows))
    return replace(add_gathers(lowered) if program.gathers else lowered, sizes=program.sizes)
