"""The picture of a training system: along each axis of one of its plans, who talks to whom, over which link, how much.

One drawing serves all systems. Bytes and seconds are those of `explain`, of the pipeline rank that sets the pace.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from typing import NamedTuple

from shardwright.api.loaded_job import load
from shardwright.config.cluster_facts import node_devices
from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.phrase import in_language, say
from shardwright.config.text_columns import num_columns
from shardwright.config.units import bytes_text, seconds_text
from shardwright.cost.calibration import shipped
from shardwright.explain.rank_collectives import Crossing
from shardwright.explain.rank_groups import RankGroup
from shardwright.explain.step_traffic import step_traffic
from shardwright.learn.grid_products import cube_bytes, grid_bytes, line_bytes
from shardwright.learn.playable_figure import WHOLE_PLAN
from shardwright.report import svg
from shardwright.report.bars_picture import StackedBars
from shardwright.sharding.groups import REPLICAS
from shardwright.simulate.full_step import simulated_step

_BOTH = " ".join(REPLICAS[False].axes)  # of replicas and parts of sequences, which sum gradients together
_CUTS = {
    "tp": say("cuts matrices and tokens"),
    "cp": say("cuts sequences"),
    "pp": say("cuts the layers"),
    "dp": say("cuts the batch"),
    _BOTH: say("cuts batch and sequences"),
    "dp, ZeRO": say("cuts batch and state"),
    f"{_BOTH}, ZeRO": say("cuts batch, sequences, state"),
    "dp shards": say("cuts the state"),
    "dp copies": say("copies the state"),
    "ends": say("both hold the table"),
}
_SENDS = {
    "tp": say("activations"),
    "cp": say("keys and values"),
    "pp": say("hidden states"),
    "gradients": say("gradients"),
    "parameters": say("parameters"),
}
_WIDTH, _TOP, _PITCH = 900.0, 84.0, 84.0
_NODES_LEFT = 226.0
_CELL, _GAP, _CELLS_A_LINE, _NODE_PITCH = 10.0, 3.0, 4, 64.0
_BARS_LEFT, _BARS_WIDTH, _BAR = 524.0, 360.0, 11.0
_GRID_TOKENS, _GRID_RANKS = 16384, (4, 8, 16, 64)
_MOST_NODES = 4  # of those that a line of ranks is on


class TrafficKind(NamedTuple):
    """Bytes or seconds of one sort, as they are drawn."""

    name: str
    colour: str


TRAFFIC_KINDS = tuple(
    TrafficKind(name, svg.LINE_COLOURS[number])
    for name, number in (
        (say("inside a node"), 0),
        (say("between nodes"), 3),
        (say("hidden under computing"), 2),
        (say("the step waits"), 1),
    )
)
INSIDE, BETWEEN, HIDDEN, EXPOSED = range(len(TRAFFIC_KINDS))


@dataclass(frozen=True)
class SystemPlan:
    """A job as a system would run it: a job of the catalog, or a model on devices, and the fields of its plan."""

    job: str
    sets: Sequence[str] = ()
    devices: int = 0
    device: str = ""

    @property
    def spec(self) -> JobSpec:
        """The checked job."""
        return load(self.job, *self.sets, devices=self.devices, device=self.device).spec

    def under(self, sets: Mapping[str, str]) -> "SystemPlan":
        """The job with other values of some fields."""
        named = dict(override.split("=", 1) for override in self.sets) | dict(sets)
        return replace(self, sets=tuple(f"{field}={value}" for field, value in named.items()))

    @property
    def words(self) -> str:
        """The job as a command has it: "llama3-8b --devices 8 --device h100-sxm --set plan.dp=8"."""
        cluster = f" --devices {self.devices} --device {self.device}" if self.devices else ""
        return self.job + cluster + "".join(f" --set {override}" for override in self.sets)


SYSTEM_PLANS: Mapping[str, SystemPlan] = {
    "megatron-lm": SystemPlan("gpt3-175b-1024", ("plan.sequence_parallel=true", "plan.zero=1")),
    "deepspeed": SystemPlan(
        "megatron-7.5b",
        (
            *("plan.dp=64", "plan.zero=2", "plan.recompute=full"),
            *("precision.compute=fp16", "precision.gradients=compute", WHOLE_PLAN),
        ),
        64,
        "v100-sxm-32g",
    ),
    "fsdp": SystemPlan(
        "llama3-8b",
        ("plan.dp=32", "plan.zero=3", "plan.zero_ranks=8", "plan.recompute=none", WHOLE_PLAN),
        32,
        "h100-sxm",
    ),
    "alpa": SystemPlan(
        "megatron-39b",
        (
            *("plan.tp=8", "plan.pp=8", "plan.dp=1", "plan.sequence_parallel=true", "plan.recompute=full"),
            *("precision.gradients=compute", "model.sequence=1024", "batch.global_batch_size=1024"),
            *("cluster.inter_node.bandwidth_gb_per_s=0.39", WHOLE_PLAN),
        ),
        64,
        "v100-sxm-16g",
    ),
    "torchtitan": SystemPlan(
        "llama3.1-405b",
        (
            *("plan.tp=8", "plan.cp=2", "plan.pp=8", "plan.dp=4", "plan.zero=2", "plan.sequence_parallel=true"),
            *("plan.schedule=interleaved-1f1b", "plan.virtual_stages=2", "plan.recompute=full"),
            *("model.sequence=16384", "batch.global_batch_size=64", WHOLE_PLAN),
        ),
        512,
        "h100-sxm",
    ),
    "nanotron": SystemPlan(
        "llama3-8b",
        (
            *("plan.tp=2", "plan.pp=4", "plan.dp=4", "plan.zero=1", "plan.sequence_parallel=true"),
            *("plan.recompute=none", "model.sequence=4096", "batch.global_batch_size=256", WHOLE_PLAN),
        ),
        32,
        "h100-sxm",
    ),
    "colossal-ai": SystemPlan(
        "llama-65b",
        (
            *("plan.tp=64", "plan.dp=1", "plan.sequence_parallel=true", "plan.recompute=full"),
            *("batch.global_batch_size=64", WHOLE_PLAN),
        ),
        64,
        "h100-sxm",
    ),
}


@dataclass(frozen=True)
class AxisTraffic:
    """Traffic of a rank in a step along an axis, of one sort: bytes inside its node and out of it, the seconds that it
    takes by itself, and those that the step waits for it."""

    group: RankGroup
    sends: str
    inside_bytes: float
    between_bytes: float
    seconds: float
    exposed_s: float


@dataclass(frozen=True)
class TrafficTrack:
    """A bar: its text, and its parts as (number of the kind, amount)."""

    text: str
    parts: Sequence[tuple[int, float]]

    @property
    def total(self) -> float:
        """The length of the bar."""
        return sum(amount for _, amount in self.parts)


def axis_traffic(job: JobSpec) -> tuple[list[AxisTraffic], float]:
    """The traffic along each axis in the order in which a token meets them, and the seconds of a step. Sums of single
    numbers at the end of a step are left out."""
    step = simulated_step(job, shipped())
    traffic, rows = step_traffic(job, step), list[AxisTraffic]()
    for group in traffic.groups:
        by_sort = dict[str, list[Crossing]]()
        for crossing in traffic.crossings:
            if crossing.axis == group.axis and crossing.phase != "end of step":
                sort = crossing.phase if crossing.phase in _SENDS and group.axis != "tp" else group.axis
                by_sort.setdefault(sort, []).append(crossing)
        rows += [_row(group, sort, crossings) for sort, crossings in by_sort.items()]
    return rows, float(step.total)


def _row(group: RankGroup, sort: str, crossings: Sequence[Crossing]) -> AxisTraffic:
    return AxisTraffic(
        group,
        _SENDS[sort],
        sum(float(crossing.sent.inside) for crossing in crossings),
        sum(float(crossing.sent.between) for crossing in crossings),
        sum(float(crossing.seconds or 0.0) for crossing in crossings),
        sum(float(crossing.exposed_s or 0.0) for crossing in crossings),
    )


def system_figure(name: str) -> Callable[[str], str]:
    """The picture of a system by its name: a function of the language."""
    job = SYSTEM_PLANS[name].spec
    rows, step_s = axis_traffic(job)
    return partial(_picture, job, rows, step_s)


def sent_text(inside_bytes: float, between_bytes: float) -> str:
    """The bytes that a rank sends in a step, inside its node and out of it."""
    inside, between = bytes_text(round(inside_bytes)), bytes_text(round(between_bytes))
    if not between_bytes:
        return say("{inside} inside a node", inside=inside)
    if not inside_bytes:
        return say("{between} between nodes", between=between)
    return say("{inside} inside a node, {between} between nodes", inside=inside, between=between)


def title_of(job: JobSpec) -> str:
    """The title of the picture of a job."""
    return say(
        "{model} on {devices} {device}: what a rank sends in a step",
        model=job.model.name,
        devices=f"{job.plan.world:,}",
        device=job.cluster.device,
    )


def texts_of(row: AxisTraffic, job: JobSpec) -> tuple[str, str]:
    """The work that an axis cuts, and the tensors that it sends."""
    axis = row.group.axis
    cuts = _CUTS[f"{axis}, ZeRO" if axis in ("dp", _BOTH) and job.plan.zero else axis]
    return cuts, say("sends {what}", what=row.sends)


def tracks_of(row: AxisTraffic) -> tuple[TrafficTrack, TrafficTrack]:
    """Bytes by link; and seconds, those that computing hides and those that the step waits."""
    alone, exposed = seconds_text(row.seconds), seconds_text(row.exposed_s)
    return (
        TrafficTrack(
            sent_text(row.inside_bytes, row.between_bytes),
            ((INSIDE, row.inside_bytes), (BETWEEN, row.between_bytes)),
        ),
        TrafficTrack(
            say("{alone} by itself, the step waits {exposed}", alone=alone, exposed=exposed),
            ((HIDDEN, max(0.0, row.seconds - row.exposed_s)), (EXPOSED, row.exposed_s)),
        ),
    )


def _picture(job: JobSpec, rows: Sequence[AxisTraffic], step_s: float, language: str) -> str:
    title = title_of(job)
    below = say("a step takes {seconds}; a row is an axis of the plan", seconds=seconds_text(step_s))
    drawn = [
        svg.text(16, 28, in_language(title, language), "name", 17),
        svg.text(16, 50, in_language(below, language), size=14),
    ]
    most = [max(track.total for track in tracks) for tracks in zip(*map(tracks_of, rows), strict=True)]
    for number, row in enumerate(rows):
        top = _TOP + number * _PITCH
        cuts, sends = (in_language(text, language) for text in texts_of(row, job))
        drawn += [
            svg.horizontal_line("grid", svg.Box(16, top, _WIDTH - 32, 0), top - 14),
            svg.text(16, top + 14, f"{row.group.axis} {len(row.group.ranks)}", "name", 17),
            svg.text(16, top + 34, cuts, size=14),
            svg.text(16, top + 52, sends, size=14),
            *_nodes(row.group, node_size(job), top, language),
            *_bars(row, top, most, language),
        ]
    bottom = _TOP + len(rows) * _PITCH
    return svg.document(in_language(title, language), _WIDTH, bottom + 28, [*drawn, *_legend(bottom + 6, language)])


def kind_of(group: RankGroup) -> int:
    """The number of the kind of links that a line of ranks is on."""
    return INSIDE if len(set(group.nodes)) == 1 else BETWEEN


def num_hidden_nodes(group: RankGroup) -> int:
    """The nodes of a line of ranks that are not drawn."""
    return max(0, len(set(group.nodes)) - _MOST_NODES)


def node_size(job: JobSpec) -> int:
    """The devices of a node; all devices where no node is stated."""
    return node_devices(job.cluster) or job.plan.world


def first_nodes(group: RankGroup, size: int) -> list[tuple[int, list[int]]]:
    """The first nodes of the line of rank 0, each with the devices in it that are of the line."""
    devices = dict[int, list[int]]()
    for rank, node in zip(group.ranks, group.nodes, strict=True):
        devices.setdefault(node, []).append(rank % size)
    return list(devices.items())[:_MOST_NODES]


def _nodes(group: RankGroup, size: int, top: float, language: str) -> list[str]:
    """The first nodes of the line of rank 0, with the ranks of the line in colour."""
    drawn, colour = list[str](), TRAFFIC_KINDS[kind_of(group)].colour
    lines = -(-size // _CELLS_A_LINE)
    for place, (node, members) in enumerate(first_nodes(group, size)):
        left = _NODES_LEFT + place * _NODE_PITCH
        width, height = _CELLS_A_LINE * (_CELL + _GAP) + 5, lines * (_CELL + _GAP) + 5
        frame = f'x="{svg.px(left)}" y="{svg.px(top)}" width="{svg.px(width)}" height="{svg.px(height)}"'
        drawn.append(f'<rect class="frame" {frame} rx="4"/>')
        for device in range(size):
            down, across = divmod(device, _CELLS_A_LINE)
            fill = f'fill="{colour}"' if device in members else 'fill="#98a2b3" fill-opacity="0.3"'
            x, y = left + 4 + across * (_CELL + _GAP), top + 4 + down * (_CELL + _GAP)
            drawn.append(f'<rect x="{svg.px(x)}" y="{svg.px(y)}" width="{_CELL:g}" height="{_CELL:g}" rx="2" {fill}/>')
        label = in_language(say("node {number}", number=node), language)
        drawn.append(svg.text(left + width / 2, top + height + 16, label, size=12, anchor="middle"))
    if num_more := num_hidden_nodes(group):
        x = _NODES_LEFT + _MOST_NODES * _NODE_PITCH
        drawn.append(svg.text(x, top + 22, f"+ {num_more}", size=13))
    return drawn


def _bars(row: AxisTraffic, top: float, most: Sequence[float], language: str) -> list[str]:
    """The tracks of an axis below each other, each with the amount that fills its width."""
    drawn = list[str]()
    for line, (track, longest) in enumerate(zip(tracks_of(row), most, strict=True)):
        x, y = _BARS_LEFT, top + 34 * line
        drawn.append(svg.text(x, y + 8, in_language(track.text, language), "name", 12))
        for kind, amount in track.parts:
            width = amount / longest * _BARS_WIDTH
            place = f'x="{svg.px(x)}" y="{svg.px(y + 13)}" width="{svg.px(width)}" height="{_BAR:g}"'
            drawn += [f'<rect {place} fill="{TRAFFIC_KINDS[kind].colour}" fill-opacity="0.85"/>'] * (amount > 0)
            x += width
    return drawn


def _legend(y: float, language: str) -> list[str]:
    """The meaning of the colours."""
    x, drawn = 16.0, list[str]()
    for kind in TRAFFIC_KINDS:
        words = in_language(kind.name, language)
        drawn.append(f'<rect x="{svg.px(x)}" y="{svg.px(y - 11)}" width="13" height="13" rx="2" fill="{kind.colour}"/>')
        drawn.append(svg.text(x + 20, y, words, size=13))
        x += 44 + 7.2 * num_columns(words)
    return drawn


def grids_of_products() -> Callable[[str], str]:
    """The picture of what tensor parallelism sends for a layer along one, two, two and a half and three dims."""
    plan, bars = SYSTEM_PLANS["colossal-ai"], list[tuple[str, dict[str, float]]]()
    matrices = shape_of(plan.spec.model).matrices("dense")
    for ranks in _GRID_RANKS:
        ways = {"1D": line_bytes(matrices, _GRID_TOKENS, ranks)}
        if (side := isqrt(ranks)) ** 2 == ranks:
            ways["2D"] = grid_bytes(matrices, _GRID_TOKENS, 1, side)
        if (side := round(ranks ** (1 / 3))) ** 3 == ranks:
            ways["2.5D"] = grid_bytes(matrices, _GRID_TOKENS, side, side)
            ways["3D"] = cube_bytes(matrices, _GRID_TOKENS, side)
        for way, sent in ways.items():
            parts: dict[str, float] = {
                say("activations"): sent.activations,
                say("weights and their gradients"): sent.weights,
            }
            bars.append((say("{ranks} ranks, {way}", ranks=ranks, way=way), parts))
    title = say(
        "A layer of {model}, {tokens:,} tokens, forward and backward: sent by a rank",
        model=plan.job,
        tokens=_GRID_TOKENS,
    )
    return StackedBars(title, bars, lambda size: bytes_text(round(size))).svg
