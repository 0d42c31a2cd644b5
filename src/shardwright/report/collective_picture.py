"""A picture of a collective: the pieces that each rank holds after each step, darker the more ranks they sum."""

from shardwright.config.base import PlanError
from shardwright.config.phrase import ENGLISH, in_language, say
from shardwright.cost.collective_algorithms import PricedCollective
from shardwright.report import svg
from shardwright.report.collective_text import MOST_DRAWN, piece_name
from shardwright.sharding.collective_steps import SUMS

_CELL, _GAP, _LEFT, _TOP, _ROW_GAP = 26.0, 22.0, 58.0, 58.0, 44.0
_MOST_ACROSS, _MOST_STATES = 1000.0, 18
_STYLE = (
    svg.STYLE
    + """
.piece { fill: #3b82f6 } .none { fill: none; stroke: #cbd2dc } .whole { fill: #0f9d8a } .word { fill: #1c2230 }
@media (prefers-color-scheme: dark) { .none { stroke: #3d4656 } .word { fill: #e7eaf0 } }"""
)


def collective_picture(collective: PricedCollective, language: str = ENGLISH) -> str:
    """The picture, with words of a language. PlanError if there are too many ranks or steps to draw."""
    n, num_states = collective.num_ranks, len(collective.steps) + 1
    if not 1 < n <= MOST_DRAWN or num_states == 1 or num_states > _MOST_STATES:
        fault = say(
            "a picture shows 2 to {most_drawn} ranks and {steps} steps; ask for fewer --ranks",
            most_drawn=MOST_DRAWN,
            steps=_MOST_STATES - 1,
        )
        raise PlanError("collective --svg", [fault])
    side = n * _CELL
    across = max(1, int((_MOST_ACROSS - _LEFT) // (side + _GAP)))
    title = say("{kind} by {algorithm}", kind=collective.kind, algorithm=collective.drawn)
    heading = say("{title}, {number} ranks", title=title, number=n)
    parts = [svg.text(16, 24, in_language(heading, language), "name", 13)]
    for number in range(num_states):
        left = _LEFT + (number % across) * (side + _GAP)
        top = _TOP + (number // across) * (side + _ROW_GAP)
        parts += _state(collective, number, left, top, language)
    width = _LEFT + min(across, num_states) * (side + _GAP)
    height = _TOP + -(-num_states // across) * (side + _ROW_GAP) - 14
    return svg.document(in_language(title, language), width, height, parts, _STYLE)


def _state(collective: PricedCollective, number: int, left: float, top: float, language: str) -> list[str]:
    n, held = collective.num_ranks, collective.held(number)
    moment = say("step {number}", number=number) if number else say("before")
    parts = [svg.text(left, top - 8, in_language(moment, language))]
    for rank in range(n):
        if left == _LEFT:
            parts.append(svg.text(left - 8, top + (rank + 0.65) * _CELL, f"rank {rank}", anchor="end"))
        for piece in range(n):
            place = left + piece * _CELL, top + rank * _CELL
            parts += _cell(held[rank].get(piece), piece, n, place, collective, language)
    return parts


def _cell(
    contributions: frozenset[int] | None,
    piece: int,
    n: int,
    place: tuple[float, float],
    collective: PricedCollective,
    language: str,
) -> list[str]:
    x, y = place
    frame = f'x="{svg.px(x)}" y="{svg.px(y)}" width="{_CELL - 2:g}" height="{_CELL - 2:g}" rx="3"'
    if contributions is None:
        return [f'<rect class="none" {frame}/>']
    is_sum = collective.kind in SUMS
    kind = "whole" if is_sum and len(contributions) == n else "piece"
    share = len(contributions) / n if is_sum else 0.5
    name = piece_name(piece, contributions, n if is_sum else 0)
    some = in_language(say("{count} of {number}", count=len(contributions), number=n), language)
    shown, size = (name, min(9.5, 36 / len(name))) if len(name) <= 5 else (some, 7.0)
    return [
        f'<rect class="{kind}" {frame} opacity="{0.2 + 0.6 * share:.2f}"><title>{name}</title></rect>',
        svg.text(x + _CELL / 2 - 1, y + 0.62 * _CELL, shown, "word", size, "middle"),
    ]
