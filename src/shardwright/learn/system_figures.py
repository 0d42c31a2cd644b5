"""The picture of a training system: along each axis of one of its plans, who talks to whom, over which link, how much.

One drawing serves all systems. Bytes and seconds are those of `explain`, of the pipeline rank that sets the pace.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isqrt

from shardwright.api.loaded_job import load
from shardwright.config.cluster_facts import node_devices
from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.phrase import in_language, say
from shardwright.config.units import bytes_text, seconds_text
from shardwright.cost.calibration import shipped
from shardwright.explain.rank_collectives import Crossing
from shardwright.explain.rank_groups import RankGroup
from shardwright.explain.step_traffic import step_traffic
from shardwright.learn.grid_products import cube_bytes, grid_bytes, line_bytes
from shardwright.learn.playable_figure import WHOLE_PLAN
from shardwright.report import svg
from shardwright.report.bars_picture import StackedBars
from shardwright.report.text_columns import num_columns
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
_INSIDE, _BETWEEN, _HIDDEN, _EXPOSED = (svg.LINE_COLOURS[number] for number in (0, 3, 2, 1))
_WIDTH, _TOP, _PITCH = 900.0, 84.0, 84.0
_NODES_LEFT, _MOST_NODES = 214.0, 4  # of the nodes that a line of ranks is on
_CELL, _GAP, _CELLS_A_LINE, _NODE_PITCH = 10.0, 3.0, 4, 66.0
_BARS_LEFT, _BARS_WIDTH, _BAR = 524.0, 360.0, 11.0
_GRID_TOKENS, _GRID_RANKS = 16384, (4, 8, 16, 64)


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


def _picture(job: JobSpec, rows: Sequence[AxisTraffic], step_s: float, language: str) -> str:
    model, devices, device = job.model.name, f"{job.plan.world:,}", job.cluster.device
    title = say(
        "{model} on {devices} {device}: what a rank sends in a step", model=model, devices=devices, device=device
    )
    below = say("a step takes {seconds}; a row is an axis of the plan", seconds=seconds_text(step_s))
    drawn = [
        svg.text(16, 28, in_language(title, language), "name", 17),
        svg.text(16, 50, in_language(below, language), size=14),
    ]
    most_bytes = max(row.inside_bytes + row.between_bytes for row in rows)
    most_s = max(max(row.seconds, row.exposed_s) for row in rows)
    for number, row in enumerate(rows):
        top = _TOP + number * _PITCH
        axis = row.group.axis
        cuts = in_language(_CUTS[f"{axis}, ZeRO" if axis in ("dp", _BOTH) and job.plan.zero else axis], language)
        sends = in_language(say("sends {what}", what=row.sends), language)
        drawn += [
            svg.horizontal_line("grid", svg.Box(16, top, _WIDTH - 32, 0), top - 14),
            svg.text(16, top + 14, f"{axis} {len(row.group.ranks)}", "name", 17),
            svg.text(16, top + 34, cuts, size=14),
            svg.text(16, top + 52, sends, size=14),
            *_nodes(row.group, node_devices(job.cluster) or job.plan.world, top, language),
            *_bars(row, top, most_bytes, most_s, language),
        ]
    bottom = _TOP + len(rows) * _PITCH
    return svg.document(in_language(title, language), _WIDTH, bottom + 28, [*drawn, *_legend(bottom + 6, language)])


def _nodes(group: RankGroup, size: int, top: float, language: str) -> list[str]:
    """The first nodes of the line of rank 0, with the ranks of the line in colour."""
    nodes, drawn = list(dict.fromkeys(group.nodes)), list[str]()
    members, colour = set(group.ranks), _INSIDE if len(nodes) == 1 else _BETWEEN
    lines = -(-size // _CELLS_A_LINE)
    for place, node in enumerate(nodes[:_MOST_NODES]):
        left = _NODES_LEFT + place * _NODE_PITCH
        width, height = _CELLS_A_LINE * (_CELL + _GAP) + 5, lines * (_CELL + _GAP) + 5
        frame = f'x="{svg.px(left)}" y="{svg.px(top)}" width="{svg.px(width)}" height="{svg.px(height)}"'
        drawn.append(f'<rect class="frame" {frame} rx="4"/>')
        for device in range(size):
            down, across = divmod(device, _CELLS_A_LINE)
            is_member = node * size + device in members
            fill = f'fill="{colour}"' if is_member else 'fill="#98a2b3" fill-opacity="0.3"'
            x, y = left + 4 + across * (_CELL + _GAP), top + 4 + down * (_CELL + _GAP)
            drawn.append(f'<rect x="{svg.px(x)}" y="{svg.px(y)}" width="{_CELL:g}" height="{_CELL:g}" rx="2" {fill}/>')
        label = in_language(say("node {number}", number=node), language)
        drawn.append(svg.text(left + width / 2, top + height + 16, label, size=12, anchor="middle"))
    if len(nodes) > _MOST_NODES:
        x = _NODES_LEFT + _MOST_NODES * _NODE_PITCH
        drawn.append(svg.text(x, top + 22, f"+ {len(nodes) - _MOST_NODES}", size=13))
    return drawn


def _bars(row: AxisTraffic, top: float, most_bytes: float, most_s: float, language: str) -> list[str]:
    """Bytes by link, and below them seconds: those that computing hides, and those that the step waits."""
    hidden_s = max(0.0, row.seconds - row.exposed_s)
    alone, exposed = seconds_text(row.seconds), seconds_text(row.exposed_s)
    waits = say("{alone} by itself, the step waits {exposed}", alone=alone, exposed=exposed)
    by_link = sent_text(row.inside_bytes, row.between_bytes)
    drawn = list[str]()
    for line, (words, most, parts) in enumerate(
        (
            (by_link, most_bytes, ((row.inside_bytes, _INSIDE), (row.between_bytes, _BETWEEN))),
            (waits, most_s, ((hidden_s, _HIDDEN), (row.exposed_s, _EXPOSED))),
        )
    ):
        x, y = _BARS_LEFT, top + 34 * line
        drawn.append(svg.text(x, y + 8, in_language(words, language), "name", 12))
        for amount, colour in parts:
            width = amount / most * _BARS_WIDTH
            place = f'x="{svg.px(x)}" y="{svg.px(y + 13)}" width="{svg.px(width)}" height="{_BAR:g}"'
            drawn += [f'<rect {place} fill="{colour}" fill-opacity="0.85"/>'] * (amount > 0)
            x += width
    return drawn


def _legend(y: float, language: str) -> list[str]:
    """The meaning of the colours."""
    names = {
        _INSIDE: say("inside a node"),
        _BETWEEN: say("between nodes"),
        _HIDDEN: say("hidden under computing"),
        _EXPOSED: say("the step waits"),
    }
    x, drawn = 16.0, list[str]()
    for colour, name in names.items():
        words = in_language(name, language)
        drawn.append(f'<rect x="{svg.px(x)}" y="{svg.px(y - 11)}" width="13" height="13" rx="2" fill="{colour}"/>')
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
