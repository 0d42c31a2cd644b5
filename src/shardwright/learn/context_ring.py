"""Ring attention over a short sequence, step by step: the keys that each rank has, and the scores of the causal mask
that it computes from them. Drawn from the cut of a sequence and the blocks of the runtime (sharding/sequence.py)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from shardwright.config.phrase import in_language, say
from shardwright.learn.drawing import Drawing
from shardwright.learn.playable_figure import FigureControl, FigureFrame, PlayableFigure
from shardwright.report import svg
from shardwright.sharding.sequence import block_of, held_ranges, positions_of, ring_source

TOKENS = 16  # of the sequence: two chunks for each of up to 8 ranks
_DRAWN_RANKS = 4
_CELL, _STRIP, _PITCH, _LEFT, _TOP = 11.0, 9.0, 218.0, 16.0, 96.0
_TITLE = say("Ring attention of 16 tokens: who computes which scores of the causal mask")

Score = tuple[int, int]  # the positions of a query and of a key


@dataclass(frozen=True)
class RingStep:
    """A step of the ring, by rank: the rank whose keys and values it has, and the scores that it computes."""

    sources: tuple[int, ...]
    scores: tuple[list[Score], ...]


def positions(rank: int, size: int) -> list[int]:
    """The positions of the sequence that a rank holds."""
    return positions_of(held_ranges(TOKENS, size, rank, "ring"))


def ring_steps(size: int) -> list[RingStep]:
    """The steps of a forward over `size` ranks."""
    steps = []
    for step in range(size):
        sources = tuple(ring_source(rank, step, size) for rank in range(size))
        scores = tuple(_scores(rank, source, size) for rank, source in enumerate(sources))
        steps.append(RingStep(sources, scores))
    return steps


def _scores(rank: int, source: int, size: int) -> list[Score]:
    """The scores that a rank computes with the keys of another."""
    block = block_of(rank, source, TOKENS // size, is_causal=True)
    queries, keys = positions(rank, size)[block.queries], positions(source, size)[block.keys]
    return [(query, key) for query in queries for key in keys if key <= query or not block.is_causal]


def scores_of_each(size: int) -> int:
    """The scores of a rank in all steps, of which each rank has as many."""
    (num_scores,) = {sum(len(step.scores[rank]) for step in ring_steps(size)) for rank in range(size)}
    return num_scores


def scores_of_last(size: int) -> int:
    """The scores of the last rank if each held one contiguous part: each query sees its own key and all before it."""
    return sum(query + 1 for query in positions_of(held_ranges(TOKENS, size, size - 1, "ulysses")))


def _balance(size: int) -> list[tuple[str, str]]:
    """The numbers beside a picture."""
    return [
        (say("scores of each rank"), f"{scores_of_each(size)} / {TOKENS * (TOKENS + 1) // 2}"),
        (say("of the last rank, were parts contiguous"), str(scores_of_last(size))),
        (say("times that a rank sends keys and values"), str(size - 1)),
    ]


def _frame(ranks: str) -> FigureFrame:
    """The ring over so many ranks, with a text on each rank at each step."""
    size = int(ranks)
    holders = {position: rank for rank in range(size) for position in positions(rank, size)}
    steps = []
    for step in ring_steps(size):
        texts = [
            say(
                "rank {rank}, queries {queries}: keys of rank {source}, {keys}; {scores} scores",
                rank=rank,
                queries=_ranges_text(rank, size),
                source=source,
                keys=_ranges_text(source, size),
                scores=len(step.scores[rank]),
            )
            for rank, source in enumerate(step.sources)
        ]
        cells = [[*score, rank] for rank, scores in enumerate(step.scores) for score in scores]
        steps.append({"cells": cells, "texts": texts})
    axes = say("across keys, down queries, by their rank")
    picture = {"holders": [holders[position] for position in range(TOKENS)], "axes": axes, "steps": steps}
    return FigureFrame(picture, _balance(size))


def _ranges_text(rank: int, size: int) -> str:
    ranges = held_ranges(TOKENS, size, rank, "ring")
    return " ".join(f"{one[0]}-{one[-1]}" if len(one) > 1 else str(one[0]) for one in ranges)


CONTEXT_RING: Mapping[str, PlayableFigure] = {
    "context-ring": PlayableFigure(
        _TITLE,
        "scores",
        [FigureControl(say("number of ranks"), ("2", "4", "8"), 1)],
        _frame,
        say("Step number"),
    )
}


def context_ring_figure() -> Drawing:
    """The steps of a ring of four ranks beside each other."""
    return partial(_drawn, ring_steps(_DRAWN_RANKS))


def _drawn(steps: Sequence[RingStep], language: str) -> str:
    parts = [svg.text(_LEFT, 26, in_language(_TITLE, language), "name", 15)]
    for number, step in enumerate(steps):
        left = _LEFT + number * _PITCH
        heading = in_language(say("step {number}", number=number + 1), language)
        parts.append(svg.text(left, 52, heading, "name", 13))
        sources = in_language(say("keys of rank {sources}", sources=", ".join(map(str, step.sources))), language)
        parts.append(svg.text(left, 70, sources, size=12))
        parts += _mask(steps[: number + 1], left)
    bottom = _TOP + _CELL * TOKENS + 26
    for rank in range(_DRAWN_RANKS):
        x = _LEFT + 96 * rank
        parts.append(
            f'<rect x="{svg.px(x)}" y="{svg.px(bottom - 10)}" width="12" height="12" fill="{svg.LINE_COLOURS[rank]}"/>'
        )
        parts.append(svg.text(x + 18, bottom, in_language(say("rank {rank}", rank=rank), language), size=13))
    for number, (name, amount) in enumerate(_balance(_DRAWN_RANKS)):
        told = in_language(say("{name}: {amount}", name=name, amount=amount), language)
        parts.append(svg.text(_LEFT + 290 * number, bottom + 24, told, size=13))
    return svg.document(in_language(_TITLE, language), _PITCH * len(steps) + 12, bottom + 38, parts)


def _mask(steps: Sequence[RingStep], left: float) -> Iterator[str]:
    """The scores up to a step, those of the last one strong; above and left of them the ranks that hold them."""
    for rank in range(_DRAWN_RANKS):
        for position in positions(rank, _DRAWN_RANKS):
            along = _STRIP + position * _CELL
            yield _square(left + along, _TOP - _STRIP, (_CELL, 6.0), rank, 1.0)
            yield _square(left, _TOP + along - _STRIP, (6.0, _CELL), rank, 1.0)
    for number, step in enumerate(steps, 1):
        for rank, scores in enumerate(step.scores):
            for query, key in scores:
                opacity = 0.85 if number == len(steps) else 0.25
                yield _square(left + _STRIP + key * _CELL, _TOP + query * _CELL, (_CELL, _CELL), rank, opacity)


def _square(x: float, y: float, size: tuple[float, float], rank: int, opacity: float) -> str:
    return (
        f'<rect x="{svg.px(x)}" y="{svg.px(y)}" width="{size[0] - 1:g}" height="{size[1] - 1:g}" '
        f'fill="{svg.LINE_COLOURS[rank]}" fill-opacity="{opacity:g}"/>'
    )
