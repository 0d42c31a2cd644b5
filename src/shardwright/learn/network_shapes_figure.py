"""A fat tree beside a torus of as many devices, drawn link by link, and the seconds of collectives on both."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from shardwright.api.one_collective import CollectiveQuestion, one_collective
from shardwright.config.phrase import in_language, say
from shardwright.config.units import bytes_text, seconds_text
from shardwright.cost.collective_time import all_to_all_s, nccl_ring_s
from shardwright.cost.topology import Group, group_of, reach_of_ranks
from shardwright.layers.query import Topology
from shardwright.learn.drawing import Drawing
from shardwright.report import svg

_SIDE, _LEAF, _NARROW = 8, 8, 0.25  # of a torus, devices below a switch of a tree, share of a narrow level
_DEVICE, _TENSOR_BYTES = "h100-sxm", 2**30
_WIDTH, _CELL = 800.0, 26.0


@dataclass(frozen=True)
class NetworkShape:
    """The links between devices, and the seconds of an all-reduce by rings and of an all-to-all over all of them."""

    name: str
    all_reduce_s: float
    all_to_all_s: float


def network_shapes() -> list[NetworkShape]:
    """A full fat tree, one with a part of the bandwidth upward, and a torus; each device has the same bandwidth."""
    ranks = _SIDE * _SIDE
    rates = one_collective(CollectiveQuestion("all-gather", _TENSOR_BYTES, 16, _DEVICE)).priced.rates
    rates = replace(rates, link_bytes_per_s=rates.network_bytes_per_s, link_latency_s=rates.network_latency_s)

    def shape(name: str, group: Group) -> NetworkShape:
        ring_s = float(nccl_ring_s(rates, group, _TENSOR_BYTES, 2))
        return NetworkShape(name, ring_s, float(all_to_all_s(rates, group, _TENSOR_BYTES)))

    def tree(share: float) -> Group:
        return group_of(ranks, 1, reach_of_ranks(1, Topology(((_LEAF, share),))))

    torus = group_of(ranks, 1, reach_of_ranks(ranks, Topology(torus=(_SIDE, _SIDE))))
    return [
        shape(say("fat tree"), tree(1.0)),
        shape(say("fat tree, {share:g} of the bandwidth upward", share=_NARROW), tree(_NARROW)),
        shape(say("torus, {side} x {side}", side=_SIDE), torus),
    ]


def network_shapes_figure() -> Drawing:
    """Both shapes above their seconds."""
    return partial(_drawn, network_shapes())


def _drawn(shapes: Sequence[NetworkShape], language: str) -> str:
    title = say("{devices} devices of the same bandwidth, joined in two ways", devices=_SIDE * _SIDE)
    parts = [svg.text(16, 26, in_language(title, language), "name", 15)]
    parts += _tree(24.0, 78.0, 400.0) + _torus(500.0, 78.0)
    for x, shape in ((24.0, shapes[0]), (500.0, shapes[-1])):
        parts.append(svg.text(x, 50, in_language(shape.name, language), "name", 13))
    top = 78 + _SIDE * _CELL + 44
    columns = (
        (330.0, say("all-reduce of {size}, by rings", size=bytes_text(_TENSOR_BYTES))),
        (560.0, say("all-to-all of {size}", size=bytes_text(_TENSOR_BYTES))),
    )
    longest_s = max(second for shape in shapes for second in (shape.all_reduce_s, shape.all_to_all_s))
    parts += [svg.text(x, top - 14, in_language(words, language), "name", 13) for x, words in columns]
    for number, shape in enumerate(shapes):
        y = top + 28 * number
        parts.append(svg.text(320, y + 13, in_language(shape.name, language), "name", 13, "end"))
        for (x, _), seconds, colour in zip(
            columns, (shape.all_reduce_s, shape.all_to_all_s), svg.LINE_COLOURS, strict=False
        ):
            wide = 130 * seconds / longest_s
            parts.append(
                f'<rect x="{svg.px(x)}" y="{svg.px(y)}" width="{svg.px(wide)}" height="18" fill="{colour}" '
                'fill-opacity="0.85"/>'
            )
            parts.append(svg.text(x + wide + 8, y + 13, seconds_text(seconds), "name", 13))
    return svg.document(in_language(title, language), _WIDTH, top + 28 * len(shapes) + 10, parts)


def _line(x: float, y: float, to_x: float, to_y: float, width: float) -> str:
    return (
        f'<line class="mark" x1="{svg.px(x)}" y1="{svg.px(y)}" x2="{svg.px(to_x)}" y2="{svg.px(to_y)}" '
        f'stroke-width="{width:g}"/>'
    )


def _square(x: float, y: float, size: float, colour: str) -> str:
    return (
        f'<rect x="{svg.px(x - size / 2)}" y="{svg.px(y - size / 2)}" width="{size:g}" height="{size:g}" rx="2" '
        f'fill="{colour}"/>'
    )


def _tree(left: float, top: float, width: float) -> list[str]:
    """Two levels of switches above the devices; upward a switch has as many links as below."""
    devices, leaves = _SIDE * _SIDE, _SIDE * _SIDE // _LEAF
    roots = leaves // 2
    bottom, middle = top + (_SIDE - 1) * _CELL, top + 0.55 * (_SIDE - 1) * _CELL
    leaf_x = [left + width * (place + 0.5) / leaves for place in range(leaves)]
    root_x = [left + width * (place + 0.5) / roots for place in range(roots)]
    device_x = [left + width * (place + 0.5) / devices for place in range(devices)]
    parts = [_line(x, middle, to_x, top, _LEAF / roots * 0.7) for x in leaf_x for to_x in root_x]
    parts += [_line(x, bottom, leaf_x[place // _LEAF], middle, 0.7) for place, x in enumerate(device_x)]
    parts += [_square(x, top, 16, svg.LINE_COLOURS[3]) for x in root_x]
    parts += [_square(x, middle, 16, svg.LINE_COLOURS[3]) for x in leaf_x]
    return [*parts, *(_square(x, bottom, 5, svg.LINE_COLOURS[0]) for x in device_x)]


def _torus(left: float, top: float) -> list[str]:
    """Devices on a grid with links to their neighbours; stubs at the edges are those that close the rings."""
    ends = (-0.45 * _CELL, (_SIDE - 1 + 0.45) * _CELL)
    parts = []
    for place in range(_SIDE):
        along = place * _CELL
        parts.append(_line(left + ends[0], top + along, left + ends[1], top + along, 1.4))
        parts.append(_line(left + along, top + ends[0], left + along, top + ends[1], 1.4))
    colour = svg.LINE_COLOURS[0]
    return parts + [_square(left + x * _CELL, top + y * _CELL, 10, colour) for x in range(_SIDE) for y in range(_SIDE)]
