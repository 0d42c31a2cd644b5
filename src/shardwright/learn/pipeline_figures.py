"""Figures of pipelines that are drawn from the actions of a schedule: the two ratios of the bubble, and the versions of
the weights that each microbatch sees."""

from collections.abc import Iterator, Sequence
from functools import partial

from shardwright.config.phrase import in_language, say
from shardwright.learn.drawing import Drawing
from shardwright.report import svg
from shardwright.report.timeline.colours import SHADES
from shardwright.report.timeline.study import study_schedule
from shardwright.schedule.action import Kind
from shardwright.schedule.lowering.weight_versions import stashed_versions, weight_versions
from shardwright.schedule.pipeline_shape import PipelineShape
from shardwright.simulate.bubbles import Work
from shardwright.simulate.timeline import Resource, Span, Timeline

_LEFT, _WIDTH, _LANE, _PITCH = 70.0, 900.0, 24.0, 30.0
_WIDE = 1120.0  # of two digits in each block
_SCALED = _WIDTH - _LEFT - 16
_IDLE = svg.LINE_COLOURS[3]


def _timeline(name: str, num_ranks: int, num_microbatches: int, num_steps: int = 1) -> Timeline:
    shape = PipelineShape(num_ranks, num_microbatches, 1, num_steps=num_steps, most_alive=0.0)
    return study_schedule(name, shape, Work(1.0, 1.0, 1.0, 0.0), "none").timeline


def bubble_figure() -> Drawing:
    """A step as it runs, the same with all waits at its end, and both ratios."""
    return partial(_bubble_drawn, _timeline("1f1b", 4, 8))


def _bubble_drawn(timeline: Timeline, language: str) -> str:
    ranks, m = len(timeline.ranks), timeline.program.num_microbatches
    scale, whole = _SCALED / timeline.makespan, timeline.makespan
    busy = sum(span.end - span.start for span in _computing(timeline, 0))
    title = say("1F1B, {ranks} ranks and {microbatches} microbatches: a step as it runs", ranks=ranks, microbatches=m)
    parts = [svg.text(16, 26, in_language(title, language), "name", 15)]
    for rank in range(ranks):
        y = 40 + rank * _PITCH
        parts += _lane(f"rank {rank}", y, _WIDTH - 16)
        parts += [_block(span, span.start, y, scale) for span in _computing(timeline, rank)]
    top = 40 + ranks * _PITCH + 34
    moved = say("the same work, and all waits moved to the end")
    parts.append(svg.text(16, top - 12, in_language(moved, language), "name", 15))
    for rank in range(ranks):
        y, start = top + rank * _PITCH, 0.0
        parts += _lane(f"rank {rank}", y, _WIDTH - 16)
        for span in _computing(timeline, rank):
            parts.append(_block(span, start, y, scale))
            start += span.end - span.start
    y = top + ranks * _PITCH + 12
    bubble = whole - busy
    ideal_words = say("ideal time: m (F + B) = {time:g}", time=busy)
    bubble_words = say("bubble: (p - 1)(F + B) = {time:g}", time=bubble)
    whole_words = say("whole time: (m + p - 1)(F + B) = {time:g}", time=whole)
    parts += _measure(0.0, busy * scale, y, in_language(ideal_words, language))
    parts += _measure(busy * scale, whole * scale, y, in_language(bubble_words, language))
    parts += _measure(0.0, whole * scale, y + 34, in_language(whole_words, language))
    p = ranks
    for number, ratio in enumerate(
        (
            say(
                "bubble / ideal time = (p - 1) / m = {others} / {m} = {share:.1%}",
                others=p - 1,
                m=m,
                share=bubble / busy,
            ),
            say(
                "bubble / whole time = (p - 1) / (m + p - 1) = {others} / {all} = {share:.1%}",
                others=p - 1,
                all=m + p - 1,
                share=bubble / whole,
            ),
        )
    ):
        parts.append(svg.text(_LEFT, y + 90 + 22 * number, in_language(ratio, language), "name", 14))
    return svg.document(in_language(title, language), _WIDTH, y + 126, parts)


def _computing(timeline: Timeline, rank: int) -> Iterator[Span]:
    """The forwards and backwards of a rank in order."""
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    spans = timeline.ranks[rank].spans
    return (span for span in spans if span.resource is Resource.COMPUTE and span.action.kind in kinds)


def _lane(name: str, y: float, right: float) -> list[str]:
    """The name of a rank and its time, all of it idle as yet."""
    return [
        svg.text(16, y + _LANE / 2 + 4, name, "name", 12),
        f'<rect x="{_LEFT:g}" y="{svg.px(y)}" width="{svg.px(right - _LEFT)}" height="{_LANE:g}" fill="{_IDLE}" '
        'fill-opacity="0.25"/>',
    ]


def _block(span: Span, start: float, y: float, scale: float) -> str:
    wide, x = (span.end - span.start) * scale - 1, _LEFT + start * scale
    colour = SHADES[span.action.kind.value][0]
    number = svg.text(x + wide / 2, y + 16, str(span.action.microbatch), "ink", 11, "middle")
    return (
        f'<rect x="{svg.px(x)}" y="{svg.px(y)}" width="{svg.px(wide)}" height="{_LANE:g}" rx="2.5" fill="{colour}"/>'
        + number.replace('class="ink"', 'fill="#ffffff" font-weight="600"')
    )


def _measure(start: float, end: float, y: float, words: str) -> list[str]:
    """A line from end to end with words in its middle, below."""
    left, right = _LEFT + start + 1, _LEFT + end - 2
    path = f"M {svg.px(left)} {svg.px(y - 5)} v 10 m 0 -5 H {svg.px(right)} m 0 -5 v 10"
    return [
        f'<path class="mark" d="{path}" fill="none" stroke-width="1.5"/>',
        svg.text((left + right) / 2, y + 18, words, size=13, anchor="middle"),
    ]


def versions_figure() -> Drawing:
    """PipeDream and PipeDream-2BW: forwards and backwards in the colour of the version that they see."""
    shapes = (("pipedream", _timeline("pipedream", 4, 8)), ("pipedream-2bw", _timeline("pipedream-2bw", 4, 4, 3)))
    return partial(_versions_drawn, shapes)


def _versions_drawn(shapes: Sequence[tuple[str, Timeline]], language: str) -> str:
    title = in_language(say("Versions of the weights that each forward (F) and backward (B) sees"), language)
    parts, y, pitch = [svg.text(16, 26, title, "name", 15)], 62.0, _PITCH + 8
    for name, timeline in shapes:
        program, right = timeline.program, _WIDE - 110
        version_of, kept = weight_versions(program), stashed_versions(program)
        scale = (right - _LEFT) / timeline.makespan
        parts.append(svg.text(16, y - 10, name, "name", 14))
        for rank in range(len(timeline.ranks)):
            parts += _lane(f"rank {rank}", y, right)[:1]
            for span in _computing(timeline, rank):
                version = version_of[span.action.stage, span.action.microbatch]
                parts.append(_versioned(span, version, y, scale))
            keeps = in_language(say("keeps {versions}", versions=kept[rank]), language)
            parts.append(svg.text(right + 10, y + 20, keeps, "name", 13))
            y += pitch
        y += 34
    return svg.document(title, _WIDE, y - 26, parts)


def _versioned(span: Span, version: int, y: float, scale: float) -> str:
    """A block with its microbatch above and its version below; backwards are paler."""
    action = span.action
    wide, x, high = (span.end - span.start) * scale - 1, _LEFT + span.start * scale, _LANE + 10
    colour, opacity = svg.LINE_COLOURS[version % len(svg.LINE_COLOURS)], 0.55 if action.kind is Kind.FORWARD else 0.3
    words = [
        svg.text(x + wide / 2, y + 14, f"{action.kind}{action.microbatch}", "name", 9, "middle"),
        svg.text(x + wide / 2, y + 28, f"v{version}", "name", 9, "middle"),
    ]
    frame = f'x="{svg.px(x)}" y="{svg.px(y)}" width="{svg.px(wide)}" height="{high:g}"'
    return f'<rect {frame} rx="2.5" fill="{colour}" fill-opacity="{opacity:g}"/>' + "".join(words)
