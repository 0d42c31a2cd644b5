"""An all-reduce over two nodes by one ring and by a hierarchy: the bytes on each link, and the sizes for which each
takes longer."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from shardwright.api.one_collective import CollectiveQuestion, one_collective
from shardwright.config.phrase import in_language, say
from shardwright.config.units import bytes_text
from shardwright.cost.collective_algorithms import stepwise_s
from shardwright.cost.collective_time import nccl_ring_s
from shardwright.learn.drawing import Drawing
from shardwright.report import svg
from shardwright.sharding.collective_steps import Step, steps_of

_DEVICE, _TENSOR_BYTES = "h100-sxm", 2**30
_NODE, _NODES = 4, 2  # of the drawing of links
_PRICED_NODES = 8  # of usual nodes, in the chart
_COLOURS = (svg.LINE_COLOURS[1], svg.LINE_COLOURS[3], svg.LINE_COLOURS[2])
_INSIDE, _BETWEEN = svg.LINE_COLOURS[0], svg.LINE_COLOURS[1]
_WIDTH, _PITCH, _ROW, _RADIUS = 720.0, 72.0, 96.0, 15.0
_CHART = svg.Box(52, 330, _WIDTH - 76, 170)
_ONE_RING, _HIERARCHY = say("one ring"), say("hierarchy")

Load = Counter[tuple[int, int]]  # pieces by (sender, receiver)


def hierarchy_figure() -> Drawing:
    """Links with their bytes, above seconds by size as multiples of the hierarchy's."""
    ranks = _NODE * _NODES
    loads = [_load(steps_of("all-reduce", name, ranks, _NODE)) for name in ("ring", "hierarchical")]
    return partial(_drawn, loads, _multiples())


def _load(steps: Sequence[Step]) -> Load:
    """The pieces that pass each link in all steps together."""
    load = Load()
    for move in chain.from_iterable(steps):
        load[move.sender, move.receiver] += len(move.pieces)
    return load


def _multiples() -> list[svg.Line]:
    """Seconds of one ring, which leaves a node through one port, and of a ring through each port, as multiples of the
    hierarchy's, by size."""
    sizes = [2**power for power in range(10, 34)]
    ranks = _PRICED_NODES * 8
    priced = one_collective(CollectiveQuestion("all-reduce", sizes[0], ranks, _DEVICE)).priced
    rates, group = priced.rates, priced.group
    one_port = replace(rates, network_bytes_per_s=rates.network_bytes_per_s / float(group.ports))
    hierarchy = steps_of("all-reduce", "hierarchical", ranks, int(group.inside))
    lines = dict[str, list[tuple[float, float]]]()
    for place, size in enumerate(sizes):
        least_s = stepwise_s(rates, group, hierarchy, size / ranks)
        for name, seconds in (
            (_ONE_RING, float(nccl_ring_s(one_port, group, size, 2))),
            (say("a ring through each network port"), float(nccl_ring_s(rates, group, size, 2))),
            (_HIERARCHY, least_s),
        ):
            lines.setdefault(name, []).append((float(place), seconds / least_s))
    return [svg.Line(name, points, colour) for (name, points), colour in zip(lines.items(), _COLOURS, strict=True)]


def _drawn(loads: Sequence[Load], multiples: Sequence[svg.Line], language: str) -> str:
    title = say(
        "An all-reduce of {size}, {nodes} nodes of {node}: bytes on each link",
        size=bytes_text(_TENSOR_BYTES),
        nodes=_NODES,
        node=_NODE,
    )
    parts = [svg.text(16, 26, in_language(title, language), "name", 15)]
    for number, (name, load) in enumerate(zip((_ONE_RING, _HIERARCHY), loads, strict=True)):
        parts += _links(name, load, 16 + number * (_WIDTH / 2), language)
    lines = [svg.Line(in_language(line.name, language), line.points, line.colour) for line in multiples]
    heading = say(
        "Seconds as a multiple of the hierarchy's, by size, on {nodes} nodes of 8 {device}",
        nodes=_PRICED_NODES,
        device=_DEVICE,
    )
    ticks = {float(place): bytes_text(2 ** (10 + place)) for place in range(0, 24, 5)}
    chart = svg.LineChart(in_language(heading, language), _CHART, lines, 2.0, 1.0, "{:g} x".format, ticks)
    parts += [*chart.drawn(), *svg.legend(_CHART.left, _CHART.bottom + 38, lines)]
    return svg.document(in_language(title, language), _WIDTH, _CHART.bottom + 52, parts)


def _links(name: str, load: Load, left: float, language: str) -> list[str]:
    """The ranks of each node in a row, and arrows as wide as what they carry."""
    piece_bytes, top = _TENSOR_BYTES / (_NODE * _NODES), 92.0
    between = {link: pieces for link, pieces in load.items() if link[0] // _NODE != link[1] // _NODE}
    inside = {link: pieces for link, pieces in load.items() if link not in between}
    places = [(left + 40 + rank % _NODE * _PITCH, top + rank // _NODE * _ROW) for rank in range(_NODE * _NODES)]
    parts = [svg.text(left, 54, in_language(name, language), "name", 14)]
    for node in range(_NODES):
        frame = f'x="{svg.px(left + 6)}" y="{svg.px(top + node * _ROW - 32)}" width="{svg.px(_NODE * _PITCH - 4)}"'
        parts.append(f'<rect class="frame" {frame} height="62" rx="8"/>')
    for links, colour in ((inside, _INSIDE), (between, _BETWEEN)):
        for link, pieces in links.items():
            size = say("{link}: {size}", link=f"{link[0]} → {link[1]}", size=bytes_text(round(pieces * piece_bytes)))
            parts.append(_arrow(places, link, pieces * 3.4 / _NODE, colour, in_language(size, language)))
    for rank, (x, y) in enumerate(places):
        parts.append(f'<circle class="ground" cx="{svg.px(x)}" cy="{svg.px(y)}" r="{_RADIUS:g}"/>')
        parts.append(svg.text(x, y + 4, str(rank), "name", 12, "middle"))
    bottom, out_bytes = top + _ROW + 54, sum(between.values()) * piece_bytes / _NODES
    for number, (words, links, colour) in enumerate(
        ((say("inside a node"), inside, _INSIDE), (say("between nodes"), between, _BETWEEN))
    ):
        told = say(
            "{place}: {count} links, {size} each",
            place=words,
            count=len(links),
            size=bytes_text(round(max(links.values()) * piece_bytes)),
        )
        y = bottom + 20 * number
        parts.append(f'<rect x="{svg.px(left + 6)}" y="{svg.px(y - 10)}" width="14" height="10" fill="{colour}"/>')
        parts.append(svg.text(left + 26, y, in_language(told, language), size=13))
    told = say("out of a node: {size}", size=bytes_text(round(out_bytes)))
    return [*parts, svg.text(left + 26, bottom + 40, in_language(told, language), size=13)]


def _arrow(places: Sequence[tuple[float, float]], link: tuple[int, int], width: float, colour: str, words: str) -> str:
    """A link from rank to rank: straight to a neighbour, and around those that stand between."""
    (x, y), (to_x, to_y) = (places[rank] for rank in link)
    bend = -44.0 if y == to_y and abs(link[0] - link[1]) > 1 else 0.0
    middle = f"{svg.px((x + to_x) / 2)} {svg.px((y + to_y) / 2 + bend)}"
    path = f"M {svg.px(x)} {svg.px(y)} Q {middle} {svg.px(to_x)} {svg.px(to_y)}"
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-opacity="0.8" stroke-width="{svg.px(width)}">'
        f"<title>{words}</title></path>"
    )
