"""Text and picture of the command `scale`: the best plan at each size, strong and weak scaling, and the limits of the
batch; speed-up, efficiency, memory and price over sizes of the cluster."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

from shardwright.config.job import JobSpec
from shardwright.config.phrase import ENGLISH, Phrase, both, in_language, say
from shardwright.config.units import DAY_S, GIB, days_column, seconds_text
from shardwright.cost.money import price_words
from shardwright.planner.critical_batch import BatchLimits, Rescaled, rescaled
from shardwright.planner.scaling import Point, Scaling, devices_text
from shardwright.report.document import AlignedRows, Lines, Part, document_text, paragraph
from shardwright.report.fit_verdict import offered_bytes
from shardwright.report.plans_text import job_words, model_name
from shardwright.report.svg import LINE_COLOURS, Box, Line, LineChart, document, legend, text

_MEANING = {
    "strong": say("Strong scaling: the same batch at every size."),
    "weak": say("Weak scaling: the batch grows with the devices."),
}


def scaling_dict(job: JobSpec, scalings: tuple[Scaling, Scaling], limits: BatchLimits) -> dict[str, Any]:
    """Scalings for `--json`. Seconds, bytes, US dollars, days; null is unknown."""
    return {
        "job": job.name,
        "device": job.cluster.device,
        "batch": asdict(limits) | {"more_tokens": list(limits.more_tokens)},
        **{curve.kind: curve.rows() for curve in scalings},
        **{f"{curve.kind}_misfits": list(curve.misfits) for curve in scalings},
    }


def scaling_text(job: JobSpec, scalings: tuple[Scaling, Scaling], limits: BatchLimits, language: str = ENGLISH) -> str:
    """Scalings as text."""
    return document_text(_parts(job, scalings, limits), language)


def _parts(job: JobSpec, scalings: tuple[Scaling, Scaling], limits: BatchLimits) -> Iterator[Part]:
    yield paragraph(
        say(
            "{job} on {device}, the best plan at each size of the cluster.",
            job=job.name,
            device=job.cluster.device,
        ),
        say(
            "Efficiency is throughput of a device, and memory efficiency what all devices hold, beside the smallest "
            "size that fits."
        ),
    )
    for curve in scalings:
        if curve.points:
            yield Lines((_MEANING[curve.kind], AlignedRows(_rows(curve))))
            yield AlignedRows(_plans(curve))
        else:
            yield paragraph(_MEANING[curve.kind])
        if curve.misfits:
            yield paragraph(say("No plan fits on {devices}.", devices=devices_text(curve.misfits)))
    if price := price_words(job.cluster):
        yield paragraph(say("Money is counted {price}.", price=price))
    yield paragraph(*batch_sentences(limits))
    weak = scalings[1]
    if weak.points:
        times = weak.points[-1].job.tokens_per_step / limits.batch_tokens
        yield from map(paragraph, rate_sentences(job, times))


def batch_sentences(limits: BatchLimits) -> list[str]:
    """The cost of the job's batch in tokens, by both estimates of the critical one."""
    low, high = limits.critical.span
    fewest, most = limits.more_tokens
    by_loss, by_data = limits.critical.by_loss_tokens, limits.critical.by_data_tokens
    return [
        say(
            "The batch of {batch} tokens takes {more} tokens to the same loss than the smallest batches would, in a "
            "run of {run} tokens: its critical batch is estimated at {low} to {high} tokens (by its loss, Kaplan et "
            "al. 2020: {by_loss}; by its data, Zhang et al. 2024: {by_data}).",
            batch=_tokens(limits.batch_tokens),
            more=_more_tokens_text(fewest, most),
            run=_tokens(limits.total_tokens),
            low=_tokens(low),
            high=_tokens(high),
            by_loss=_tokens(by_loss),
            by_data=_tokens(by_data),
        ),
        say("There tokens are twice the fewest, and a larger batch can save no more than half of the steps."),
        say("Both estimates are extrapolated."),
    ]


def _more_tokens_text(fewest: float, most: float) -> str:
    """The additional tokens, as shares `fewest` and `most` of both estimates: "6 % to 37 % more", "at least 50 % more",
    "more than twice the"."""
    low, high = _percent(fewest), _percent(most)
    if fewest >= 1:
        return say("more than twice the")
    if most >= 1:
        return say("at least {share} more", share=low)
    return say("{share} more", share=low) if low == high else say("{low} to {high} more", low=low, high=high)


def rate_sentences(job: JobSpec, times: float) -> list[str]:
    """A sentence about the learning rate for a batch `times` as large; nothing for an equal batch."""
    if abs(times - 1) < 1e-9:
        return []
    settings = rescaled(job, times)
    return [
        say(
            "A batch {times:.3g} times as large asks for another learning rate: with AdamW {rate:.2g} instead of "
            "{old:.2g}{betas}, by the square root (Malladi et al. 2022); with SGD it would be {sgd:.2g}, in "
            "proportion.",
            times=times,
            rate=settings.learning_rate,
            old=job.optimizer.learning_rate,
            betas=_betas(settings),
            sgd=settings.sgd_learning_rate,
        )
    ]


def _betas(settings: Rescaled) -> str:
    betas = [
        f"{name} {beta:.4g}"
        for name, beta in (("beta1", settings.beta1), ("beta2", settings.beta2))
        if beta is not None
    ]
    return say(" and {betas}", betas=both(betas)) if betas else ""


def _rows(curve: Scaling) -> list[list[str]]:
    runs_days = [
        [tokens / point.tokens_per_s / DAY_S for tokens in sorted(run_tokens)]
        for point, run_tokens in zip(curve.points, curve.run_tokens, strict=True)
    ]
    time_heading, times = days_column([days for runs in runs_days for days in runs])
    texts = iter(times)
    rows: list[list[str]] = [
        [
            say("devices"), say("batch"), say("step"), say("tokens/s"), say("each"), "MFU", say("efficiency"), "GiB",
            say("memory eff."), "USD/1e9", time_heading,
        ]
    ]  # fmt: skip
    for point, days in zip(curve.points, runs_days, strict=True):
        usd = point.usd_per_billion_tokens
        rows.append(
            [
                f"{point.num_devices:,}",
                f"{point.job.batch.global_batch_size:,}",
                seconds_text(point.step_s),
                f"{point.tokens_per_s:,.0f}",
                f"{point.tokens_per_s_per_device:,.0f}",
                _percent(point.mfu),
                _percent(curve.efficiency(point)),
                f"{point.peak_bytes / GIB:.1f}",
                _percent(curve.memory_efficiency(point)),
                say("unknown") if usd is None else f"{usd:,.0f}",
                "-".join(dict.fromkeys(islice(texts, len(days)))),
            ]
        )
    return rows


def _plans(curve: Scaling) -> list[list[str]]:
    """The plan at each size. The second column has one width, so that all plans begin at one place."""
    words = [job_words(point.job) for point in curve.points]
    width = max(map(len, words))
    return [[f"{p.num_devices:,}:", text.ljust(width)] for p, text in zip(curve.points, words, strict=True)]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


_UNITS = [
    (1e12, "{number:g} trillion"),
    (1e9, "{number:g} billion"),
    (1e6, "{number:g} million"),
    (1e3, "{number:g} thousand"),
]


def _tokens(tokens: float) -> str:
    """A number of tokens with two digits, which are all that an estimate has."""
    rounded = float(f"{tokens:.2g}")
    size, words = next(((size, words) for size, words in _UNITS if rounded >= size), (1.0, "{number:g}"))
    return Phrase(words, {"number": rounded / size})


_PICTURE_WIDTH, _LEFT, _GAP = 920.0, 66.0, 86.0
_HIGH, _ROW = 180.0, 262.0
_MOST_TICKS = 7
_NAMES = {"strong": say("strong: the same batch"), "weak": say("weak: the batch grows")}


def scaling_picture(job: JobSpec, scalings: Sequence[Scaling], language: str = ENGLISH) -> str:
    """The SVG document of scalings, with words of a language. A kind of scaling in which no plan fits is left out."""
    curves = [curve for curve in scalings if curve.points]
    sizes = sorted({point.num_devices for curve in curves for point in curve.points})
    translate = partial(in_language, language=language)
    label = translate(
        say(
            "{model} on {first:,} to {last:,} {device}",
            model=model_name(job),
            first=sizes[0],
            last=sizes[-1],
            device=job.cluster.device,
        )
    )
    charts, lines = _charts(job, curves, sizes, translate)
    subtitle = say("the best plan at each size; speed-up and efficiency beside the smallest size that fits")
    parts = [
        text(20, 30, label, "name", 15),
        text(20, 49, translate(subtitle), size=12),
        *legend(_LEFT, 76, lines),
        *(part for chart in charts for part in chart.drawn()),
    ]
    boxes = [chart.box for chart in charts]
    for box in boxes:
        parts.append(text(box.left + box.width / 2, box.bottom + 34, translate(say("devices")), anchor="middle"))
    return document(label, _PICTURE_WIDTH, boxes[-1].bottom + 56, parts)


def _charts(
    job: JobSpec, curves: Sequence[Scaling], sizes: Sequence[int], translate: Callable[[str], str]
) -> tuple[list[LineChart], list[Line]]:
    """The four charts of the picture, two in a row, and the lines that its legend names. Speed-up, efficiency, memory,
    and money or else device-hours are over the binary logarithm of the number of devices."""

    def lines(value: Callable[[Scaling, Point], float]) -> list[Line]:
        return [
            Line(
                translate(_NAMES[curve.kind]),
                [(math.log2(p.num_devices), value(curve, p)) for p in curve.points],
                colour,
            )
            for curve, colour in zip(curves, LINE_COLOURS, strict=False)
        ]

    box_width = (_PICTURE_WIDTH - _LEFT - _GAP - 24) / 2
    boxes = [Box(_LEFT + n % 2 * (box_width + _GAP), 112 + n // 2 * _ROW, box_width, _HIGH) for n in range(4)]
    ticks = {math.log2(size): f"{size:,}" for size in sizes[:: -(-len(sizes) // _MOST_TICKS)]}
    shown_gib = offered_bytes(job) / GIB
    smallest = min(curve.points[0].num_devices for curve in curves)
    proportional = [(math.log2(size), math.log2(size / smallest)) for size in sizes]
    ideal = Line(translate(say("in proportion")), proportional, "#98a2b3", is_dashed=True)
    speed_ups = [ideal, *lines(lambda curve, p: max(0.0, math.log2(p.tokens_per_s / curve.points[0].tokens_per_s)))]
    efficiency, memory = lines(Scaling.efficiency), lines(lambda _, p: p.peak_bytes / GIB)
    if curves[0].points[0].usd_per_billion_tokens is None:
        price, prices = say("device-hours of 1e9 tokens"), lines(lambda _, p: 1e9 / p.tokens_per_s_per_device / 3600)
    else:
        price, prices = say("US dollars of 1e9 tokens"), lines(lambda _, p: p.usd_per_billion_tokens or 0.0)
    memory_title = say("memory of the fullest process, GiB; a device shows {shown:.1f}", shown=shown_gib)
    speed_title, efficiency_title = say("speed-up: tokens a second"), say("efficiency: tokens a second of a device")
    charts = [
        LineChart(translate(speed_title), boxes[0], speed_ups, 1.0, None, _times, ticks),
        LineChart(translate(efficiency_title), boxes[1], efficiency, 1.0, 1.0, _share_percent, ticks),
        LineChart(translate(memory_title), boxes[2], memory, shown_gib, shown_gib, ticks=ticks),
        LineChart(translate(price), boxes[3], prices, 0.0, None, "{:,g}".format, ticks),
    ]
    return charts, [*speed_ups[1:], ideal]


def _times(doublings: float) -> str:
    """The factor of a whole number of doublings; empty for others, whose factor is not round."""
    return f"{2 ** round(doublings):,} x" if abs(doublings - round(doublings)) < 1e-9 else ""


def _share_percent(share: float) -> str:
    return f"{100 * share:.3g} %"
