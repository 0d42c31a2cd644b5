"""A timeline as one static SVG picture, for a document, legible in light and dark mode."""

from functools import partial

from shardwright.config.phrase import ENGLISH, in_language, say
from shardwright.config.text_columns import num_columns
from shardwright.config.units import counted_phrase
from shardwright.report.svg import FONT, document, nice_step, px, text
from shardwright.report.timeline.colours import NAMES, colour_of, ink_on, letters_of, shade
from shardwright.schedule.action import Kind
from shardwright.schedule.schedule import Program
from shardwright.simulate.timeline import RankTimeline, Resource, Span, Timeline
from shardwright.simulate.waits import Cause

_LEFT, _RIGHT, _TOP, _LANE, _GAP, _BOTTOM = 70, 16, 34, 28, 8, 40
_STRIP = 10  # under a lane, for gathers, reductions and releases, if parameters are sharded
_SIZES = (12, 10.5, 9, 8)  # font sizes of a block's digits: the largest that fits is used

_STYLE = (
    FONT
    + """\
.ground { fill: #ffffff; stroke: #e3e6eb } .lane { fill: #f5f6f8 } .name { fill: #1c2230 } .quiet { fill: #667085 }
.grid { stroke: #eceef2 } .wait { stroke: #cbd2dc } .wire { stroke: #f0a3b5 }
.digits { font-weight: 600; text-anchor: middle }
@media (prefers-color-scheme: dark) {
.ground { fill: #161a21; stroke: #2a303b } .lane { fill: #1a1f27 } .name { fill: #e7eaf0 } .quiet { fill: #97a1b2 }
.grid { stroke: #20262f } .wait { stroke: #3d4656 } .wire { stroke: #8f4558 }
}"""
)

_px = partial(px, decimals=2)  # blocks of long programs are thin

_HATCHES = "".join(
    f'<pattern id="{name}" width="{gap}" height="{gap}" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<line class="{name}" x1="0" y1="0" x2="0" y2="{gap}" stroke-width="2"/></pattern>'
    for name, gap in (("wait", 5), ("wire", 3.5))
)


def picture(timeline: Timeline, name: str, width: int = 1120, language: str = ENGLISH, unit: str = "") -> str:
    """The SVG document of a timeline, whose times are in a unit, with words of a language."""
    ranks = len(timeline.ranks)
    pitch = _LANE + _GAP + (_STRIP if timeline.program.gathers else 0)
    bottom = _TOP + ranks * pitch
    legend, legend_height = _legend(timeline, bottom + 22, width - _RIGHT, language)
    height = bottom + legend_height + _BOTTOM
    scale = (width - _LEFT - _RIGHT) / (timeline.makespan or 1.0)
    label = say(
        "{name}: {ranks}, {microbatches}",
        name=name,
        ranks=counted_phrase(ranks, "rank"),
        microbatches=counted_phrase(timeline.program.num_microbatches, "microbatch"),
    )
    parts = _axis(timeline.makespan, scale, bottom, unit)
    for rank, row in enumerate(timeline.ranks):
        top = _TOP + rank * pitch
        parts.append(f'<text class="name" x="16" y="{top + _LANE / 2 + 4}" font-size="12">rank {rank}</text>')
        parts += _lane(timeline, row, top, scale, language)
        parts += _strip(row, top + _LANE + 2, scale, language) if timeline.program.gathers else []
    return document(in_language(label, language), width, height, [*parts, *legend], _STYLE, f"<defs>{_HATCHES}</defs>")


def _axis(makespan: float, scale: float, bottom: float, unit: str) -> list[str]:
    step = nice_step(80 / scale)
    lines = []
    for n in range(int(makespan / step + 1e-9) + 1):
        x = _px(_LEFT + n * step * scale)
        lines.append(f'<line class="grid" x1="{x}" x2="{x}" y1="14" y2="{bottom}"/>')
        time = f"{n * step:g} {unit}".strip()
        has_room = float(x) + 4 + 6.6 * len(time) < _LEFT + makespan * scale + _RIGHT
        place = f'x="{float(x) + 4:g}"' if has_room else f'x="{float(x) - 4:g}" text-anchor="end"'
        lines.append(f'<text class="quiet" {place} y="24" font-size="11">{time}</text>')
    return lines


def _lane(timeline: Timeline, row: RankTimeline, top: float, scale: float, language: str) -> list[str]:
    parts = [f'<rect class="lane" x="{_LEFT}" y="{top}" width="{_px(timeline.makespan * scale)}" height="{_LANE}"/>']
    for gap in row.idle:
        if gap.cause in (Cause.DEPENDENCY, Cause.COMMUNICATION):
            hatch = "wait" if gap.cause is Cause.DEPENDENCY else "wire"
            parts.append(
                f'<rect fill="url(#{hatch})" x="{_px(_LEFT + gap.start * scale)}" y="{top}" '
                f'width="{_px((gap.end - gap.start) * scale)}" height="{_LANE}"/>'
            )
    for span in row.spans:
        if span.resource is Resource.COMPUTE and span.end > span.start:
            parts += _block(timeline.program, span, top, scale, language)
    return parts


def _strip(row: RankTimeline, top: float, scale: float, language: str) -> list[str]:
    """Gathers and reductions as bars, releases as ticks."""
    parts = []
    for span in row.spans:
        if span.resource not in (Resource.COLLECTIVES, Resource.RELEASE):
            continue
        x, width = _LEFT + span.start * scale, max((span.end - span.start) * scale - 0.5, 1.5)
        work = say("{action} of stage {stage}", action=NAMES[span.action.kind], stage=span.action.stage)
        parts.append(
            f'<rect fill="{shade(str(span.action.kind), 0, 1)}" x="{_px(x)}" y="{_px(top)}" width="{_px(width)}" '
            f'height="{_STRIP - 2}">{_title(work, span, language)}</rect>'
        )
    return parts


def _title(work: str, span: Span, language: str) -> str:
    """The words that a browser shows beside what is pointed at."""
    times = say("{work}, {start:g} to {end:g}", work=work, start=span.start, end=span.end)
    return f"<title>{in_language(times, language)}</title>"


def _block(program: Program, span: Span, top: float, scale: float, language: str) -> list[str]:
    """A rectangle, or its two halves if a forward and a backward run as one."""
    x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
    width = width - 1 if width > 3 else width
    actions = span.action.computes() or (span.action,)
    height = _LANE / len(actions)
    parts = []
    for n, action in enumerate(actions):
        ground, y = colour_of(program, action), top + n * height
        is_step = action.kind is Kind.STEP
        digits = in_language(say("update"), language) if is_step else str(action.microbatch)
        work = NAMES[action.kind] if is_step else say("{name} {action}", name=NAMES[action.kind], action=str(action))
        parts.append(
            f'<rect fill="{ground}" x="{_px(x)}" y="{_px(y)}" width="{_px(width)}" height="{_px(height)}" '
            f'rx="{2.5 if width > 8 else 0}">{_title(work, span, language)}</rect>'
        )
        sizes = _SIZES if len(actions) == 1 else _SIZES[1:]
        size = next((size for size in sizes if 0.66 * size * num_columns(digits) + 2 < width), None)
        if size is not None:
            parts.append(
                f'<text class="digits" fill="{ink_on(ground)}" x="{_px(x + width / 2)}" '
                f'y="{_px(y + height / 2 + size * 0.36)}" font-size="{size}">{digits}</text>'
            )
    return parts


def _is_in_forwards(timeline: Timeline, num_chunks: int) -> bool:
    """True if a rank forwards a microbatch, by all of its chunks, in a time of 1."""
    forwards = (span for row in timeline.ranks for span in row.spans if span.action.kind is Kind.FORWARD)
    lengths = {round(span.end - span.start, 9) for span in forwards}
    return bool(lengths & {1.0, round(1.0 / num_chunks, 9)})


def _legend(timeline: Timeline, top: float, right_edge: float, language: str) -> tuple[list[str], float]:
    """The legend of the actions that occur, and the height of its lines after the first."""
    letters = letters_of(timeline)
    causes = {gap.cause for row in timeline.ranks for gap in row.idle}
    x, y, parts = float(_LEFT), top, list[str]()
    # The legend leaves out the optimizer step, whose blocks have its name.
    occurring = [(letter, letters[letter]) for letter in NAMES if letter in letters and letter != "S"]
    items: list[tuple[list[str], str]] = [
        ([shade(letter, n, num_chunks) for n in range(num_chunks)], NAMES[letter]) for letter, num_chunks in occurring
    ]
    later = say("other direction") if timeline.program.placement.num_copies > 1 else say("later chunk")
    items += [([], say("lighter: {later}", later=later))] if max(letters.values(), default=1) > 1 else []
    items += [(["url(#wait)"], say("waits for a computation"))] if Cause.DEPENDENCY in causes else []
    items += [(["url(#wire)"], say("waits for a message"))] if Cause.COMMUNICATION in causes else []
    items += [([], say("time: {unit}", unit=say("1 is a forward")))] if _is_in_forwards(timeline, letters["F"]) else []
    for fills, name in items:
        words = in_language(name, language)
        if x + 18 * len(fills) + 3 + 6.6 * num_columns(words) > right_edge:
            x, y = float(_LEFT), y + 16
        for fill in fills:
            parts.append(f'<rect fill="{fill}" x="{x:g}" y="{y - 9:g}" width="16" height="11" rx="2.5"/>')
            x += 18
        parts.append(text(x + 3, y, words, size=11.5))
        x += 3 + 6.6 * num_columns(words) + 18
    return parts, y - top
