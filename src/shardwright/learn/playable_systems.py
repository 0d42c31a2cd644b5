"""Playable pictures of training systems: what each axis sends over which link, as a degree or a network changes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.learn.playable_figure import FigureControl, FigureFrame, PlayableFigure
from shardwright.learn.playable_timelines import numbers_of_step
from shardwright.learn.system_figures import (
    SYSTEM_PLANS,
    TRAFFIC_KINDS,
    AxisTraffic,
    axis_traffic,
    first_nodes,
    kind_of,
    node_size,
    num_hidden_nodes,
    texts_of,
    title_of,
    tracks_of,
)


@dataclass(frozen=True)
class _Choice:
    """The choice of the reader on the page of a system: its label, its values with the number of the plan's own, and
    the fields that a value sets."""

    label: str
    values: Sequence[str]
    start: int
    sets: Callable[[str], Mapping[str, str]]


def _degrees(axis: str, other: str, ranks: int, values: Sequence[str], start: int) -> _Choice:
    """The choice of a degree of one axis, where another axis has the rest of a number of ranks."""
    label = f"{axis} ({other} = {ranks} / {axis})"
    return _Choice(
        label, values, start, lambda value: {f"plan.{axis}": value, f"plan.{other}": str(ranks // int(value))}
    )


_CHOICES: Mapping[str, _Choice] = {
    "megatron-lm": _degrees("tp", "pp", 128, ("2", "4", "8", "16"), 2),
    "deepspeed": _Choice("ZeRO", ("0", "1", "2", "3"), 2, lambda stage: {"plan.zero": stage}),
    "fsdp": _Choice(
        say("devices that divide one copy of the state"),
        ("2", "4", "8", "16", "32"),
        2,
        lambda shards: {"plan.zero_ranks": shards},
    ),
    "alpa": _Choice(
        say("network of a device, GB/s"),
        ("0.1", "0.2", "0.39", "0.78", "3.1"),
        2,
        lambda speed: {"cluster.inter_node.bandwidth_gb_per_s": speed},
    ),
    "torchtitan": _degrees("cp", "dp", 8, ("1", "2", "4", "8"), 1),
    "nanotron": _degrees("pp", "dp", 16, ("1", "2", "4", "8"), 2),
    "colossal-ai": _degrees("tp", "dp", 64, ("4", "8", "16", "32", "64"), 4),
}


def _frame(name: str, value: str) -> FigureFrame:
    """The traffic along each axis under a choice, and the step."""
    plan = SYSTEM_PLANS[name].under(_CHOICES[name].sets(value))
    job = plan.spec
    rows, _ = axis_traffic(job)
    picture = {
        "node": node_size(job),
        "kinds": [[kind.colour, kind.name] for kind in TRAFFIC_KINDS],
        "rows": [_row(row, job) for row in rows],
    }
    return FigureFrame(picture, numbers_of_step(job), f"shardwright explain {plan.words}")


def _row(row: AxisTraffic, job: JobSpec) -> dict[str, Any]:
    """A row as its painter reads it."""
    return {
        "axis": f"{row.group.axis} {len(row.group.ranks)}",
        "texts": texts_of(row, job),
        "kind": kind_of(row.group),
        "nodes": first_nodes(row.group, node_size(job)),
        "more": num_hidden_nodes(row.group),
        "tracks": [vars(track) for track in tracks_of(row)],
    }


def _playable(name: str, choice: _Choice) -> PlayableFigure:
    control = FigureControl(choice.label, choice.values, choice.start)
    return PlayableFigure(title_of(SYSTEM_PLANS[name].spec), "links", [control], partial(_frame, name))


SYSTEM_LINKS: Mapping[str, PlayableFigure] = {name: _playable(name, choice) for name, choice in _CHOICES.items()}
