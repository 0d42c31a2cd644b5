"""A picture of a model's scaling: speed-up, efficiency, memory and price over sizes of the cluster."""

import math
from collections.abc import Callable, Sequence

from shardwright.config.job import JobSpec
from shardwright.config.units import GIB
from shardwright.cost.calibration import device_of
from shardwright.planner.scaling import Point, Scaling
from shardwright.report.svg import LINE_COLOURS, Box, Line, LineChart, document, legend, text

_WIDTH, _LEFT, _GAP = 920.0, 66.0, 86.0
_HIGH, _ROW = 180.0, 262.0
_MOST_TICKS = 7
_NAMES = {"strong": "strong: the same batch", "weak": "weak: the batch grows"}


def scaling_picture(job: JobSpec, scalings: Sequence[Scaling]) -> str:
    """The SVG document of scalings. A kind of scaling in which no plan fits is left out."""
    curves = [curve for curve in scalings if curve.points]
    sizes = sorted({point.num_devices for curve in curves for point in curve.points})
    label = f"{job.model.name} on {sizes[0]:,} to {sizes[-1]:,} {job.cluster.device}"
    box_width = (_WIDTH - _LEFT - _GAP - 24) / 2
    boxes = [Box(_LEFT + n % 2 * (box_width + _GAP), 112 + n // 2 * _ROW, box_width, _HIGH) for n in range(4)]
    ticks = {math.log2(size): f"{size:,}" for size in sizes[:: -(-len(sizes) // _MOST_TICKS)]}
    room_gib = device_of(job.cluster.device).memory_gib

    def lines(value: Callable[[Scaling, Point], float]) -> list[Line]:
        return [
            Line(_NAMES[curve.kind], [(math.log2(p.num_devices), value(curve, p)) for p in curve.points], colour)
            for curve, colour in zip(curves, LINE_COLOURS, strict=False)
        ]

    smallest = min(curve.points[0].num_devices for curve in curves)
    ideal = Line("in proportion", [(math.log2(s), math.log2(s / smallest)) for s in sizes], "#98a2b3", is_dashed=True)
    speed_ups = [ideal, *lines(lambda curve, p: max(0.0, math.log2(p.tokens_per_s / curve.points[0].tokens_per_s)))]
    efficiency, memory = lines(Scaling.efficiency), lines(lambda _, p: p.peak_bytes / GIB)
    if curves[0].points[0].usd_per_billion_tokens is None:
        price, prices = "device-hours of 1e9 tokens", lines(lambda _, p: 1e9 / p.tokens_per_s_per_device / 3600)
    else:
        price, prices = "US dollars of 1e9 tokens", lines(lambda _, p: p.usd_per_billion_tokens or 0.0)
    memory_title = f"memory of the fullest device, GiB (dotted: the {room_gib:g} there are)"
    charts = (
        LineChart("speed-up: tokens a second", boxes[0], speed_ups, 1.0, None, _times, ticks),
        LineChart("efficiency: tokens a second of a device", boxes[1], efficiency, 1.0, 1.0, _percent, ticks),
        LineChart(memory_title, boxes[2], memory, room_gib, room_gib, ticks=ticks),
        LineChart(price, boxes[3], prices, 0.0, None, "{:,g}".format, ticks),
    )
    parts = [
        text(20, 30, label, "name", 15),
        text(20, 49, "the best plan at each size; speed-up and efficiency beside the smallest size that fits", size=12),
        *legend(_LEFT, 76, [*speed_ups[1:], ideal]),
        *(part for chart in charts for part in chart.drawn()),
    ]
    for box in boxes:
        parts.append(text(box.left + box.width / 2, box.bottom + 34, "devices", anchor="middle"))
    return document(label, _WIDTH, boxes[-1].bottom + 56, parts)


def _times(doublings: float) -> str:
    """The factor of a whole number of doublings; empty for others, whose factor is not round."""
    return f"{2 ** round(doublings):,} x" if abs(doublings - round(doublings)) < 1e-9 else ""


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
