"""One palette for all drawings, and the colour of each action.

Hue shows the kind of computation, and hues stay distinct for colour-blind eyes. Lightness shows the chunk of a rank, or
the direction in a pipeline with two.
"""

from functools import lru_cache

from shardwright.config.phrase import say
from shardwright.schedule.action import COMPUTE, Action, Kind
from shardwright.schedule.schedule import Program
from shardwright.simulate.timeline import Timeline

# By letter, the colours of the first and the last chunk (or direction); chunks between have mixtures.
SHADES: dict[str, tuple[str, str]] = {
    "F": ("#3b82f6", "#93c5fd"),
    "B": ("#e5484d", "#ff9b96"),
    "I": ("#f59f00", "#ffd866"),
    "W": ("#0f9d8a", "#63d5c3"),
    "C": ("#c026d3", "#eba4f3"),
    "S": ("#6b7280", "#6b7280"),
    "G": ("#4d7c0f", "#a8d65c"),
    "R": ("#92400e", "#d9a273"),
    "L": ("#1f2937", "#9ca3af"),
}
NAMES = {
    "F": say("forward"),
    "B": say("backward"),
    "I": say("input gradient"),
    "W": say("weight gradient"),
    "C": say("forward again"),
    "S": say("optimizer step"),
    "G": say("gather parameters"),
    "R": say("reduce gradients"),
    "L": say("release parameters"),
}
PAIR = "#8b5cf6"  # a forward and a backward that run as one, if they are drawn in a single colour


def chunk_of(program: Program, action: Action) -> tuple[int, int]:
    """The number of a compute action's chunk (or direction) on its rank, and the number of chunks."""
    placement = program.placement
    if placement.num_copies > 1:
        return placement.copy(action.microbatch), placement.num_copies
    stages = placement.stages_of(placement.rank(action.stage, action.microbatch))
    return stages.index(action.stage), len(stages)


def letters_of(timeline: Timeline) -> dict[str, int]:
    """The letters that occur, with their numbers of chunks (or directions). O is a forward and backward run as one."""
    placement, counts = timeline.program.placement, dict[str, int]()
    for rank, row in enumerate(timeline.ranks):
        num_chunks = placement.num_copies if placement.num_copies > 1 else len(placement.stages_of(rank))
        for kind in filter(COMPUTE.__contains__, row.columns.kinds):
            counts[str(kind)] = max(counts.get(str(kind), 1), num_chunks)
    has_updates = any((row.lengths(row.updates) > 0).any() for row in timeline.ranks)
    has_pairs = any(row.columns.has_pairs for row in timeline.ranks)
    other_letters = "S" * has_updates + "O" * has_pairs + "GRL" * bool(timeline.program.gathers)
    return counts | dict.fromkeys(other_letters, 1)


def colour_of(program: Program, action: Action) -> str:
    """The colour of a compute action or an optimizer step, as #rrggbb."""
    if action.kind is Kind.OVERLAP:
        return PAIR
    if action.kind is Kind.STEP:
        return SHADES["S"][0]
    return shade(str(action.kind), *chunk_of(program, action))


@lru_cache(maxsize=1024)
def shade(letter: str, chunk: int, num_chunks: int) -> str:
    """The colour of a letter on one of several chunks."""
    first_rgb, last_rgb = (rgb(text) for text in SHADES[letter])
    share = chunk / (num_chunks - 1) if num_chunks > 1 else 0.0
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(first_rgb, last_rgb, strict=True))


def rgb(colour: str) -> tuple[int, int, int]:
    """The three bytes of #rrggbb."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


@lru_cache(maxsize=1024)
def ink_on(colour: str) -> str:
    """Black or white, whichever is legible on a colour (relative luminance as WCAG 2 defines it)."""
    linear = [(c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4) for c in rgb(colour)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if luminance < 0.3 else "#111827"
